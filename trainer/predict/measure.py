"""Measures configurations by short real trainings, each in processes of its own that keep nothing.

``python -m ftmon.trainer.predict.measure CONFIG PARENT`` is one rank: it sets up the training of a resolved
configuration, runs some steps on its longest rows, and rank 0 prints a ``Measured`` as a JSON object.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ...protocol.errors import FtmonError
from ...protocol.run.end import signal_name
from ...protocol.run.environment import monitor_environment
from ...protocol.run.start import module_command
from ...protocol.text import duration, gib
from ..host.processes import end_with_parent
from ..recipe import launcher
from ..recipe.config import write
from ..recipe.config.load import load
from ..recipe.hardware import free_port
from ..recipe.preflight.resolve import Resolved, resolve
from ..recipe.start import launch_environment
from .choose import Candidate, Estimate

CLOSE = 0.8  # Share of the best predicted speed from which a candidate is measured: predicted times are up to 20 % off
MOST = 3  # Candidates that are measured
_WARM_UP = 3  # First steps, without time: they compile, and allocate what stays
_SECONDS = 10.0  # Time of the measured steps
_MOST_STEPS = 20
_LIMIT_SECONDS = 300.0
_NOTHING_KEPT = (
    "training.rehearsal=false",
    "output.save_model=false",
    "output.push=",
    "evaluation={path: '', split: '', share: 0, every: 0, patience: 0, samples: 0}",
    "checkpoint={every: 0, minutes: 0, keep_best: false, at_end: false, resume: never, rehearse: false}",
    "debug.fault=",
)
_DONE = "measured: "


class Measured(msgspec.Struct, frozen=True):
    """Figures of the steps of one configuration."""

    tokens_per_second: float = 0.0  # Of all ranks, without padding
    step_seconds: float = 0.0
    reserved_bytes: int = 0  # Highest reserved memory of a rank's GPU; 0 on the CPU
    out_of_memory: bool = False


def best(
    ranked: Sequence[Estimate], measure: Callable[[Candidate], Measured], tell: Callable[[str], None]
) -> tuple[list[Estimate], list[str]]:
    """Return the candidates with the fastest measured one first, and a line for each that was measured.

    Those that run out of memory are left out, and the next one is measured in their place if no other is left. If a
    training fails otherwise, no further one is measured.
    """
    close = [one for one in ranked if one.tokens_per_second >= CLOSE * ranked[0].tokens_per_second][:MOST]
    waiting = list(ranked)
    tried: dict[Candidate, Measured] = {}
    lines: list[str] = []
    while waiting and (len(tried) < len(close) or all(one.out_of_memory for one in tried.values())):
        of = waiting.pop(0).candidate
        name = ", ".join(of.words())
        tell(f"measuring {name}")
        try:
            found = tried[of] = measure(of)
        except FtmonError as error:
            lines.append(f"measured {name}: failed: {error}")
            break
        if found.out_of_memory:
            lines.append(f"measured {name}: out of memory, so it is not chosen")
        else:
            peak = f", {gib(found.reserved_bytes, 1)} reserved" if found.reserved_bytes else ""
            lines.append(f"measured {name}: {found.tokens_per_second:,.0f} tokens/s{peak}")
    left = [one for one in ranked if not tried.get(one.candidate, Measured()).out_of_memory]
    speeds = {of: found.tokens_per_second for of, found in tried.items()}
    return sorted(left, key=lambda one: -speeds.get(one.candidate, 0.0)), lines


def run(source: str, overrides: Sequence[str], environ: Mapping[str, str]) -> Measured:
    """Return the figures of a configuration's steps on this machine.

    Raises ``FtmonError`` if the training failed, otherwise than by running out of memory.
    """
    with tempfile.TemporaryDirectory(prefix="ftmon-measure-") as folder:
        words = [*overrides, *_NOTHING_KEPT, f"output.dir={folder}/output"]
        resolved = resolve(load(source, words))
        config = Path(folder, "config.yaml")
        config.write_text(write.dump(resolved.config))
        return _ended(_start(resolved, config, environ), Path(folder))


def _start(resolved: Resolved, config: Path, environ: Mapping[str, str]) -> list["subprocess.Popen[bytes]"]:
    """Start the ranks; each ends with this process."""
    port = resolved.config.run.master_port or free_port()
    environment = monitor_environment(environ) | launch_environment(resolved, environ)
    started: list[subprocess.Popen[bytes]] = []
    for rank in range(resolved.ranks):
        of_rank = launcher.environment_of(rank, resolved.ranks, ",".join(resolved.gpus), port, environment)
        with Path(config.parent, f"rank-{rank}.log").open("wb") as log:
            started.append(
                subprocess.Popen(
                    module_command("ftmon.trainer.predict.measure", [str(config), str(os.getpid())]),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=of_rank,
                )
            )
    return started


def _ended(started: "Sequence[subprocess.Popen[bytes]]", folder: Path) -> Measured:
    """Wait for the ranks, and end them all with the first that fails, or after the time limit."""
    until = time.monotonic() + _LIMIT_SECONDS
    try:
        while any(one.poll() is None for one in started):
            if any(one.returncode for one in started) or time.monotonic() > until:
                break
            time.sleep(0.1)
    finally:
        statuses = [one.poll() for one in started]
        for one in started:
            if one.poll() is None:
                one.kill()
            one.wait()
    logs = [folder.joinpath(f"rank-{rank}.log").read_text(errors="replace") for rank in range(len(started))]
    results = [line for log in logs for line in log.splitlines() if line.startswith(_DONE)]
    found = [msgspec.json.decode(line.removeprefix(_DONE), type=Measured) for line in results]
    failed = [one for one in found if one.out_of_memory]
    if failed or found:
        return (failed or found)[0]
    raise FtmonError(why_no_result(statuses, logs))


def why_no_result(statuses: Sequence[int | None], logs: Sequence[str]) -> str:
    """Return in words why ranks gave no result, from their statuses (negative: a signal; None: it ran on) and logs."""
    last = [line for log in logs for line in log.strip().splitlines()[-1:]]
    said = f"; last line: {last[0]}" if last else ""
    failed = {rank: status for rank, status in enumerate(statuses) if status}
    if not failed and None in statuses:
        return f"no result in {duration(_LIMIT_SECONDS)}{said}"
    for rank, status in failed.items():
        if status < 0:
            return f"rank {rank} was killed by {signal_name(-status)}{said}"
    return last[0] if last else "the ranks ended without a result"


def main(argv: Sequence[str]) -> int:
    """Run one rank; return its exit status."""
    config, parent = argv
    end_with_parent(int(parent))
    import torch

    try:
        found = _measure(config)
    except (torch.OutOfMemoryError, MemoryError):
        found = Measured(out_of_memory=True)
    except FtmonError as error:
        print(error, flush=True)
        return error.exit_status
    if found is not None:
        print(f"{_DONE}{msgspec.json.encode(found).decode()}", flush=True)
    # At once: the other ranks may be in a collective.
    os._exit(1 if found is not None and found.out_of_memory else 0)


def _measure(path: str) -> Measured | None:
    """Return the figures of this rank's steps; None on ranks other than 0."""
    import torch
    import torch.distributed as dist

    from ..recipe.distributed import World
    from ..recipe.rehearse import compile_first
    from ..recipe.train import setup

    world = World()
    trainer = setup(load(path).config, world)
    config = trainer.config
    if config.model.compile != "off":
        compile_first(trainer, trainer.data, trainer.model)
    rows = trainer.data.longest(config.training.micro_batch * config.training.micro_steps * world.data_ranks)
    rows = rows * -(-config.training.micro_batch * config.training.micro_steps * world.data_ranks // len(rows))
    size = config.training.micro_batch
    starts = [(micro * world.data_ranks + world.data_rank) * size for micro in range(config.training.micro_steps)]
    fetches: list[Any] = [partial(trainer.data.batch, rows[start : start + size]) for start in starts]
    used = rows[: size * config.training.micro_steps * world.data_ranks]
    labels = int(trainer.data.examples.label_tokens[used].sum())
    tokens = int(trainer.data.examples.tokens[used].sum())
    trainer.engine.train()

    def step() -> float:
        began = time.perf_counter()
        trainer.train_step(fetches, labels)
        if world.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds = [step() for _ in range(_WARM_UP)][-1]
    agreed = torch.tensor([seconds], dtype=torch.float64, device=world.device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    count = max(2, min(_MOST_STEPS, round(_SECONDS / float(agreed[0]))))
    dist.barrier()
    seconds = sum(step() for _ in range(count)) / count
    peak = torch.tensor([torch.cuda.max_memory_reserved() if world.on_gpu else 0], device=world.device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return Measured(tokens / seconds, seconds, int(peak[0])) if world.is_first else None


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
