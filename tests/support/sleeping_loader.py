"""A job of two ranks, one of which waits in its data loader for a store that is away, until it is back."""

import os
from pathlib import Path

import start_ranks

SLEEPS = """
import os, select, sys, time, torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 160
    def __getitem__(self, row):
        if row == 80 and dist.get_rank() == 1:
            print(f"away since {time.time()}", flush=True)
            fetch_from_a_store_that_is_away(os.open(sys.argv[1], os.O_RDWR))
        return torch.ones(4)

def fetch_from_a_store_that_is_away(store):
    select.select([store], [], [], 600)  # as a library waits for an answer; time.sleep has an end of its own

def main():
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for rows in DataLoader(Rows(), batch_size=4):
        model(rows).pow(2).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
    print("all rows seen", flush=True)

try:
    main()
except KeyboardInterrupt:
    print("interrupted: the script puts its affairs in order", flush=True)
    sys.exit(1)
"""
WHERE = "in fetch_from_a_store_that_is_away"


def job(tmp_path: Path) -> list[str]:
    script, store = tmp_path / "sleeps.py", tmp_path / "store"
    script.write_text(SLEEPS)
    os.mkfifo(store)
    return start_ranks.command(2, str(script), str(store))


def store_is_back(tmp_path: Path) -> None:
    """End the wait of a rank that is in it."""
    store = os.open(tmp_path / "store", os.O_WRONLY | os.O_NONBLOCK)
    os.write(store, b"rows")
    os.close(store)
