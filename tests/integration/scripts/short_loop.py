"""A few steps of a small model over gloo, as one job of a driver script.

argv: number of steps, width of the batch, and how it ends: ``ok``; ``once`` (rank 1 raises in the first attempt of an
elastic restart); ``fail`` (rank 0 raises before its first step); ``oom`` (rank 0 raises PyTorch's out-of-memory error
where the model is made).
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=120)


def main():
    steps, width, how = int(sys.argv[-3]), int(sys.argv[-2]), sys.argv[-1]
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    # torchrun keeps one store for all attempts (PyTorch 2.13, static and c10d rendezvous): without a prefix gloo
    # finds the addresses of the attempt before, and is refused or waits for ever.
    store, rank, world = next(dist.rendezvous("env://", timeout=PATIENCE))
    store = dist.PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)
    torch.manual_seed(0)
    if how == "oom" and rank == 0:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 3.25 "
            "GiB is free. Including non-PyTorch memory, this process has 75.80 GiB memory in use. Of that "
            "70.10 GiB is allocated by PyTorch, and 5.20 GiB is reserved by PyTorch but unallocated."
        )
    if how == "fail" and rank == 0:
        raise ValueError("the configuration has no such dataset")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        loss = model(torch.ones(width, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if how == "once" and attempt == 0 and step == 2 and rank == 1:
            raise RuntimeError("the first attempt fails")
    dist.barrier()
    # A reducer that is the last to hold the group joins gloo's thread with the GIL, which that thread may wait for.
    del model, optimizer, loss
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
