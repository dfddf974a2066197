"""A pipeline of two stages of unequal size, by PyTorch's own schedule; the last one prints its loss step by step.

The schedule of the first three steps divides gradients by the number of micro-batches, that of the others does not.
"""

import json

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.data import DataLoader

MICRO_BATCHES = 4


def main():
    rank = dist.get_rank()
    torch.manual_seed(rank)
    layers = [torch.nn.Linear(8, 16), torch.nn.Tanh()] if rank == 0 else [torch.nn.Linear(16, 1)]
    model = torch.nn.Sequential(*layers)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    divides, sums = (
        ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=lambda out, target: (out - target).pow(2).mean(), scale_grads=scale)
        for scale in (True, False)
    )
    loader = iter(DataLoader(torch.randn(48, 9), batch_size=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    told = []
    for number in range(6):
        schedule = divides if number < 3 else sums
        batch = next(loader) if number % 2 else torch.randn(8, 9)
        if rank == 0:
            schedule.step(batch[:, :8].contiguous())
        else:
            losses = []
            schedule.step(target=batch[:, 8:], losses=losses)
            total = torch.stack(losses).sum().item()
            told.append(total / MICRO_BATCHES if number < 3 else total)
        optimizer.step()
        optimizer.zero_grad()
    print("piped", json.dumps(told), flush=True)
