"""Measure exports of a long recording beside W&B's own reader, offline:

    python bench/export.py --steps 100000 --times 3

Makes a recording of one rank and a W&B offline run (``wandb==0.31.0``) of the same points, eight figures, and reads
both in turn: ``ftmon export RUN parquet`` and ``wandb leet inspect --json``, whose output goes nowhere. A trace for
Perfetto of 10,000 steps of 8 ranks follows. Prints one JSON object: seconds by the clock and of processor time, each
command's start included, all runs and the fastest. On a busy machine the processor time is the steadier of both.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from ftmon.protocol.messages.telemetry import Step
from make_recording import make
from streams import Stream

LOG = """
import json, sys, wandb
settings = wandb.Settings(x_disable_stats=True, console="off", silent=True)
run = wandb.init(project="bench", mode="offline", dir=sys.argv[1], settings=settings)
for line in sys.stdin:
    run.log(json.loads(line))
run.finish()
"""


def points(stream: Stream) -> list[dict[str, float]]:
    """Return the figures of each step under the names that trackers show."""
    return [
        {
            "train/global_step": step.step,
            "train/loss": step.loss or 0.0,
            "train/learning_rate": step.lr or 0.0,
            "train/grad_norm": step.grad_norm or 0.0,
            "train/step_duration_seconds": step.host_us / 1e6,
            "train/tokens": step.tokens,
            "system/memory_allocated_peak_bytes": max(phase.allocated.peak for phase in step.phases),
            "system/memory_reserved_peak_bytes": max(phase.reserved.peak for phase in step.phases),
        }
        for frame in stream.frames()
        if isinstance(step := frame.message, Step)
    ]


def logged(folder: Path, lines: list[dict[str, float]]) -> Path:
    """Log points into a W&B offline run; return its file."""
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    environment = {**os.environ, "WANDB_MODE": "offline"}
    subprocess.run([sys.executable, "-c", LOG, str(folder)], input=text, text=True, check=True, env=environment)
    return next(folder.glob("wandb/offline-run-*/run-*.wandb"))


def timed(command: list[str]) -> dict[str, float]:
    """Run a command without its output; return its seconds by the clock and of processor time."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    spent, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"s": spent, "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def in_turn(commands: dict[str, list[str]], times: int) -> dict[str, dict[str, object]]:
    """Run commands in turn; return all seconds of each, and the least."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for _ in range(times):
        for name, command in commands.items():
            taken[name].append(timed(command))
    least: Callable[[str, str], float] = lambda name, figure: min(one[figure] for one in taken[name])  # noqa: E731
    return {
        name: {"least_s": least(name, "s"), "least_cpu_s": least(name, "cpu_s"), "all": taken[name]} for name in taken
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--without-wandb", action="store_true")
    options = parser.parse_args()
    figures: dict[str, object] = {"python": platform.python_version(), "load": os.getloadavg(), "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory(prefix="ftmon-bench-") as name:
        folder = Path(name)
        stream = {"ranks": 1, "steps": options.steps, "step_s": 0.1}
        make(folder / "long.sqlite", Stream(**stream))
        export = [sys.executable, "-m", "ftmon.tui.cli", "export", str(folder / "long.sqlite")]
        commands = {"parquet": [*export, "parquet", "-o", str(folder / "steps.parquet")]}
        if not options.without_wandb:
            file = logged(folder, points(Stream(**stream)))
            figures["wandb_bytes"] = file.stat().st_size
            commands["wandb"] = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(file)]
        figures |= in_turn(commands, options.times)
        make(folder / "ranks.sqlite", Stream(ranks=8, steps=10_000))
        trace = folder / "run.pftrace"
        export[-1] = str(folder / "ranks.sqlite")
        figures |= in_turn({"perfetto": [*export, "perfetto", "-o", str(trace)]}, options.times)
        figures["perfetto_bytes"] = trace.stat().st_size
    figures["load_after"] = os.getloadavg()
    print(json.dumps(figures, indent=2, default=lambda value: round(value, 2)))


if __name__ == "__main__":
    main()
