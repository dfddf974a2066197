"""Where a step's time goes: PyTorch's profile of a few steps of a row of ``train_speed.py``.

    python bench/gpu/profile_step.py ROW --work FOLDER [--before N] [--out FILE] [--tiny]

FOLDER holds the weights and documents of an earlier ``train_speed.py --work FOLDER``. One rank, or those of
``torchrun`` (the first one is shown); without the monitor.
Prints the share of the profiled time in which a kernel ran, the kernels and the host's operations that took longest.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import train_rows
from ftmon.trainer.recipe import start as command
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.distributed import World
from ftmon.trainer.recipe.hardware import free_port
from ftmon.trainer.recipe.preflight import resolve
from ftmon.trainer.recipe.train import train
from ftmon.trainer.recipe.trainer import Trainer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

STEPS = 5


def busy_share(events: Any, seconds: float) -> float:
    """Return the share of ``seconds`` in which at least one of the device's events ran."""
    spans = sorted((e.time_range.start, e.time_range.end) for e in events if e.device_type == DeviceType.CUDA)
    covered, until = 0.0, 0.0
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered / 1e6 / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=train_rows.ROWS)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--before", type=int, default=20, help="steps before those that are profiled")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    row = train_rows.ROWS[given.row]
    if given.tiny:
        row = train_rows.shrunk(row)
    folder, data = train_rows.folder_of(given.work, row), given.work / f"{given.row}.jsonl"
    words = train_rows.overrides(row, folder, data, given.before + STEPS, given.tiny)
    resolved = resolve.resolve(
        load(None, [*words, f"output.dir={given.work}/profile-{given.row}", "training.rehearsal=false"])
    )
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    if "RANK" not in os.environ:
        os.environ |= {**alone, "MASTER_PORT": str(free_port())}
    os.environ |= command.launch_environment(resolved)
    on_gpu = resolved.device == "cuda"
    profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])
    train_step, calls, started, seconds = Trainer.train_step, 0, 0.0, 0.0

    def counted(self: Trainer, *arguments: Any) -> Any:
        nonlocal calls, started, seconds
        calls += 1
        if calls == given.before + 1:
            profiler.start()
            started = time.perf_counter()
        result = train_step(self, *arguments)
        if calls == given.before + STEPS:
            if on_gpu:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
            profiler.stop()
        return result

    Trainer.train_step = counted  # type: ignore[method-assign]
    world = World()
    train(resolved.config, world)
    world.leave()
    if os.environ["RANK"] != "0":
        return
    averages = profiler.key_averages()
    text = f"{given.row}: {seconds / STEPS * 1e3:.1f} ms a step while profiled"
    if on_gpu:
        text += f", a kernel ran in {busy_share(profiler.events(), seconds):.1%} of it\n"
        text += averages.table(sort_by="self_device_time_total", row_limit=30, max_name_column_width=70)
    text += "\n" + averages.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=70)
    print(text)
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
