"""A gloo rank. argv: the length of rows, and what step 6 of the last rank does (``ok``, ``oom`` or ``hang``)."""

import sys
import time

import torch
import torch.distributed as dist


def main():
    length, what = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    last = dist.get_rank() == dist.get_world_size() - 1
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(1, 9):
        rows = torch.randn(length * 64, 64)
        if step == 6 and last and what == "oom":
            torch.empty(1 << 55, dtype=torch.uint8)
        model(rows).square().mean().backward()
        if step == 6 and last and what == "hang":
            time.sleep(3600)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


main()
