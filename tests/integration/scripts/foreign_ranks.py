"""Two ranks without ftmon; at step 20 rank 1 starts a child, and waits for a lock that nobody releases."""

import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model, rank = torch.nn.Linear(8, 8), dist.get_rank()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def fetch_labels() -> None:
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


for step in range(1_000_000):
    if step == 20 and rank == 1:
        fetch_labels()
    time.sleep(0.02)
    model(torch.ones(2, 8)).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
