"""The training of the health scenes: DDP on the CPU, or one rank with a loss scaler; see ``ranks``."""

import contextlib
import json
import math
import os
import time
from pathlib import Path

import ftmon
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

SCENE = json.loads(os.environ["SCENE"])
KIND, AT, STEPS = SCENE["kind"], 60 + SCENE["at"], min(SCENE["steps"], 1500)
FOLDER, RANK = Path(SCENE["folder"]), int(os.environ["RANK"])
MINE = SCENE["culprit"] in (RANK, -1)
STEP_SECONDS = 0.012
EPOCH = 100


def begun():
    """Note when the fault began, for the runner."""
    if (FOLDER / "fault.json").exists():
        return
    temporary = FOLDER / f".fault-{RANK}"
    temporary.write_text(json.dumps({"time": time.time(), "rank": RANK, "pid": os.getpid()}))
    temporary.replace(FOLDER / "fault.json")


class Rows(Dataset):
    def __len__(self):
        return 4 * (EPOCH if KIND == "slow-epochs" else STEPS)

    def __getitem__(self, index):
        if KIND == "input-bound" and index // 4 + 1 >= AT:
            begun()
            time.sleep(0.01)
        elif KIND == "slow-epochs" and index == 0:
            time.sleep(0.6)
        own = 1_000_000 * RANK
        return torch.randn(16, generator=torch.Generator().manual_seed(index + own))


def batches():
    while True:
        yield from DataLoader(Rows(), batch_size=4)


class Shapes:
    """A function that ``torch.compile`` compiles anew for each shape."""

    def __init__(self):
        torch._dynamo.config.recompile_limit = 1000
        self.compiled = torch.compile(lambda rows: (rows * 2).sum(), backend="eager", dynamic=False)

    def __call__(self, step):
        size = step if KIND == "recompilation" and step >= AT else 8 + step % 2
        if size > 9:
            begun()
        return self.compiled(torch.ones(size))


def change(loss, model, step, noise):
    """Make of a loss what the scene wants it to be."""
    if KIND in ("noisy-loss", "diverging-loss", "grad-explosion", "grad-collapse", "loss-plateau"):
        loss = 0 * loss + sum((p**2).sum() for p in model.parameters()) * 0.01
        flat = KIND == "loss-plateau"
        level = 1.5 + 2 * math.exp(-(min(step, AT) if flat else step) / 60)
        loss = loss - float(loss.detach()) + level * math.exp((0.01 if flat else 0.1) * float(noise))
    late = step >= AT
    if late and KIND == "diverging-loss":
        begun()
        loss = loss * min(6.0, 1.05 ** (step - AT))
    elif late and KIND == "grad-explosion":
        begun()
        loss = loss * 100 - 99 * float(loss.detach())  # the same value, and a gradient of 100 times the size
    elif late and KIND == "grad-collapse":
        begun()
        loss = loss * 1e-4 + (1 - 1e-4) * float(loss.detach())
    elif late and KIND == "nan-gradient":
        begun()
        loss = loss + (0 * next(model.parameters()).sum()).sqrt()  # 0, and its derivative is infinite
    elif late and KIND == "loss-plateau":
        begun()
    elif KIND == "noisy-loss" and step % 97 == 0:
        loss = loss * 6
    elif late and KIND == "nan-loss" and MINE:
        begun()
        loss = loss * float("nan")
    return loss


def disk(step, model):
    """Write as the scene wants it; 128 MiB are there."""
    folder = Path(os.environ["SCENE_DISK"])
    if KIND == "disk-filling" and step >= AT and RANK == 0:
        begun()
        with contextlib.suppress(OSError), (folder / "log").open("ab") as file:
            file.write(bytes(80_000))  # some 5 MB/s
            time.sleep(STEP_SECONDS / 4)
    elif KIND == "checkpoint-and-remove" and step % 60 == 0 and RANK == 0:
        (folder / "optimizer").write_bytes(bytes(20_000_000))
        save(model, folder / "checkpoint.pt")
        (folder / "optimizer").unlink()
    elif KIND == "checkpoint-failed" and step % 20 == 0 and RANK == 0:
        if step >= AT:
            fill(folder / "other")
            begun()
        save(model, folder / f"step-{step}.pt")


def fill(path):
    """Write until the disk is full."""
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))


def save(model, path):
    """Write a checkpoint and report it, as a script does that goes on without."""
    probe = ftmon.watch()
    try:
        torch.save(model.state_dict(), path)
    except (OSError, RuntimeError) as error:
        probe.checkpoint_failed(str(path), str(error))
    else:
        probe.checkpoint(str(path))


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    dist.init_process_group("gloo")
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16) if SCENE["engine"] == "scaler" else None
    shapes = Shapes() if KIND in ("recompilation", "two-shapes") else None
    if "SCENE_DISK" in os.environ:
        os.chdir(os.environ["SCENE_DISK"])
    noise = torch.Generator().manual_seed(RANK)
    torch.manual_seed(RANK)
    for step, rows in enumerate(batches(), 1):
        if step > STEPS:
            break
        if step == AT:
            (FOLDER / f"ready-{RANK}").write_text(str(time.time()))
        loss = change(model(rows).pow(2).mean(), model, step, torch.randn((), generator=noise))
        if shapes is not None:
            loss = loss + 0 * shapes(step)
        if scaler is not None:
            scaled(scaler, optimizer, loss, model, step)
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            if KIND == "nan-gradient":
                for parameter in model.parameters():
                    parameter.grad.nan_to_num_()
            optimizer.step()
        optimizer.zero_grad()
        if KIND == "noisy-loss" and step % 150 == 0:
            optimizer.param_groups[0]["lr"] = 1e-3
        elif KIND == "noisy-loss":
            optimizer.param_groups[0]["lr"] *= 0.98
        if "SCENE_DISK" in os.environ:
            disk(step, model)
        if KIND != "loss-plateau":  # which takes a thousand steps
            time.sleep(STEP_SECONDS)
    dist.barrier()
    dist.destroy_process_group()


def scaled(scaler, optimizer, loss, model, step):
    """One update with a loss scaler that overflows at each step, at each growth, or above a scale that it finds."""
    scaler.scale(loss).backward()
    limit = math.inf
    if KIND == "scaler-search":
        limit = 2.0**10
    elif step >= AT:
        begun()
        limit = 0.0 if KIND == "scaler-floor" else 2.0**15
        scaler.set_growth_interval(3)
    if scaler.get_scale() > limit:
        next(model.parameters()).grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()


if __name__ == "__main__":
    (FOLDER / f"pid-{RANK}").write_text(str(os.getpid()))
    main()
