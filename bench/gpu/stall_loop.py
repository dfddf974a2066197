"""A small training on every GPU that goes wrong at one step of the last rank: what ``stalls.py`` starts.

    torchrun ... stall_loop.py KIND FILE

KIND: ``none``, ``missing`` (sleeps before a collective), ``ddp`` (the same under DistributedDataParallel, whose
collectives run in C++), ``native`` (sleeps in native code and holds Python's lock), ``stop`` (SIGSTOP) or ``exit``
(finishes, and does not end). When it begins is written to FILE. Where there are more ranks than GPUs, they share these:
NCCL is told that the ranks of one GPU are on hosts of their own, and joins those through sockets.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

KIND, FILE = sys.argv[1], Path(sys.argv[2])
AT = 40
FOR_EVER = 100_000
WIDTH = 2048


def begins():
    """Note when it begins."""
    temporary = FILE.with_suffix(".new")
    temporary.write_text(str(time.time()))
    temporary.replace(FILE)


def go_wrong():
    """Do what the kind says; the last rank only."""
    if KIND in ("missing", "ddp"):
        begins()
        time.sleep(FOR_EVER)
    elif KIND == "native":
        begins()
        ctypes.PyDLL(None).sleep(FOR_EVER)
    elif KIND == "stop":
        begins()
        os.kill(os.getpid(), signal.SIGSTOP)


def choose_device():
    """Take the GPU of this rank's number, or share one."""
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    if ranks > gpus:
        os.environ |= {"NCCL_HOSTID": f"share-{rank // gpus}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
    torch.cuda.set_device(rank % gpus)


def main():
    choose_device()
    dist.init_process_group("nccl")
    last = dist.get_rank() == dist.get_world_size() - 1
    plain = model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(8)]).cuda()
    if KIND == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = [torch.randn(WIDTH) for _ in range(64)]
    step = 0
    while KIND != "exit" or step < AT:
        for batch in torch.utils.data.DataLoader(rows, batch_size=16):
            step += 1
            loss = model(batch.cuda()).float().pow(2).mean()
            if last and step == AT:
                go_wrong()
            loss.backward()
            if KIND != "ddp":
                for parameter in plain.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            time.sleep(0.02)
    dist.barrier()
    dist.destroy_process_group()
    if last:
        begins()
        threading.Thread(target=time.sleep, args=(FOR_EVER,)).start()


if __name__ == "__main__":
    main()
