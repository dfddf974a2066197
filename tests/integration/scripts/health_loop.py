"""Two ranks under DDP on the CPU; ``FAULT`` in the environment says what goes wrong after step ``AT``.

``nan``: the loss of rank 1 becomes NaN. ``loader``: batches take longer than steps. ``compile``: a compiled function
sees a new shape at each step. Several may be joined by commas. Both ranks have the same rows. After step ``AT`` they
wait for the file ``GATE``, if that is set.
"""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FAULTS = set(os.environ.get("FAULT", "").split(","))
AT = int(os.environ.get("AT", "15"))
GATE = os.environ.get("GATE", "")
STEPS = int(os.environ.get("STEPS", "60"))


class Rows(Dataset):
    def __len__(self):
        return 4 * STEPS

    def __getitem__(self, index):
        time.sleep(0.02 if "loader" in FAULTS else 0.0)
        return torch.randn(16, generator=torch.Generator().manual_seed(2 * index + dist.get_rank()))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scale = torch.compile(lambda found: (found * 2).sum(), backend="eager", dynamic=False)
    for step, rows in enumerate(DataLoader(Rows(), batch_size=4), 1):
        while GATE and step == AT + 1 and not os.path.exists(GATE):
            time.sleep(0.05)
        loss = model(rows).pow(2).mean()
        if "compile" in FAULTS:
            loss = loss + 0 * scale(torch.ones(max(1, step - AT) + 2))
        if "nan" in FAULTS and step > AT and rank == 1:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
    dist.barrier()
    del model, optimizer, loss  # as in short_loop.py
    dist.destroy_process_group()


main()
