"""A pipeline of two stages of unequal size, by PyTorch's own schedule; the last one prints its loss step by step."""

import json

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

MICRO_BATCHES = 4


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    layers = [torch.nn.Linear(8, 16), torch.nn.Tanh()] if rank == 0 else [torch.nn.Linear(16, 1)]
    model = torch.nn.Sequential(*layers)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=lambda output, target: (output - target).pow(2).mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    told = []
    for _ in range(6):
        if rank == 0:
            schedule.step(torch.randn(8, 8))
        else:
            losses = []
            schedule.step(target=torch.randn(8, 1), losses=losses)
            told.append(torch.stack(losses).mean().item())
        optimizer.step()
        optimizer.zero_grad()
    print("optimised", json.dumps(told), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
