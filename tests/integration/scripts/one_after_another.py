"""Scripts one after the other, of ranks in one group or of one process; ``plain`` trains each rank alone."""

import gc
import importlib
import os
import sys

import torch


def plain():
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in torch.utils.data.DataLoader(torch.randn(20, 8), batch_size=4):
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks = "RANK" in os.environ
    if ranks:
        torch.distributed.init_process_group("gloo")
    for name in sys.argv[1:]:
        (plain if name == "plain" else importlib.import_module(name).main)()
        print("over", name, flush=True)
        gc.collect()
    if ranks:
        torch.distributed.destroy_process_group()
