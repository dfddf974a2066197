"""DDP on gloo, two ranks, and what the others wait for: ``MODE`` is honest (an upload, then a script that ends early)
or late (a file lock before the first step, until FOLDER/released is there; later one rank skips collectives)."""

import contextlib
import fcntl
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist

UPLOAD = """
import socket, threading, time
listening = socket.socket(); listening.bind(("127.0.0.1", 0)); listening.listen(1)
def serve():
    other, _ = listening.accept()
    while other.recv(65536): time.sleep(0.2)
threading.Thread(target=serve, daemon=True).start()
connection = socket.create_connection(listening.getsockname())
end = time.monotonic() + 15
while time.monotonic() < end: connection.sendall(bytes(65536))
"""
HOLD = """
import fcntl, os, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
while not os.path.exists(sys.argv[2]): time.sleep(0.1)
"""


def wait_for_lock(folder):
    path, released = os.path.join(folder, "cache.lock"), os.path.join(folder, "released")
    holder = subprocess.Popen([sys.executable, "-c", HOLD, path, released], stdout=subprocess.PIPE)
    holder.stdout.readline()
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def main():
    mode, folder = sys.argv[1:]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if mode == "late" and rank == 1:
        wait_for_lock(folder)
    steps = {"honest": 40 - rank, "late": 100_000}[mode]
    for step in range(steps):
        skips = mode == "late" and rank == 1 and step >= 10
        with model.no_sync() if skips else contextlib.nullcontext():
            time.sleep(0.02)
            model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if mode == "honest" and step == 25:
            if rank == 0:
                subprocess.run([sys.executable, "-c", UPLOAD], check=True)
            dist.barrier()


main()
