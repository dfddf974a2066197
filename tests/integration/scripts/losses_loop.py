"""Two DDP ranks that scale losses in every way scripts do it; each prints what it optimised, step by step."""

import contextlib
import json

import torch
import torch.distributed as dist

ACCUMULATION = 4


def plain(loss):
    return loss


def in_place(loss):
    loss /= ACCUMULATION
    return loss


def multiplied_in_place(loss):
    return loss.mul_(1 / ACCUMULATION)


WAYS = [
    (lambda loss: loss / ACCUMULATION, 1 / ACCUMULATION),
    (lambda loss: loss * (1 / ACCUMULATION), 1 / ACCUMULATION),
    (in_place, 1 / ACCUMULATION),
    (multiplied_in_place, 1 / ACCUMULATION),
    (plain, 1),
]


def main():
    torch.manual_seed(dist.get_rank())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    told = []
    for scale, share in WAYS:
        total, batches = 0.0, torch.utils.data.DataLoader(torch.randn(8 * ACCUMULATION, 8), batch_size=4)
        for number, batch in enumerate(batches, 1):
            updates = number % ACCUMULATION == 0
            with contextlib.nullcontext() if updates else model.no_sync():
                loss = model(batch).pow(2).mean()
                total += loss.item() * share
                scale(loss).backward()
            if updates:
                optimizer.step()
                optimizer.zero_grad()
                told.append(total)
                total = 0.0
    for batch in torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=4):
        first = model(batch).pow(2).mean()
        first.backward()
        second = model(batch).abs().mean() * 3
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append((first + second).item())
    print("optimised", json.dumps(told), flush=True)
