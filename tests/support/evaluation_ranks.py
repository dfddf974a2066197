"""One rank that trains each of several configurations, one after the other: rank 0 saves each run's weights.

A job is a configuration file; ``FILE.pt`` receives the weights of the end, the evaluation examples, and of ZeRO-3 how
many parameters were gathered at the end of each training forward, the rehearsal's too. Rank 0 of a job called
``full-disk...`` can write no file above 1 KiB while it rehearses (``...-at-export``: while it exports), ``no-room``
finds 100 KiB of free disk, and ``small-disk-T-N...`` writes to a tmpfs with room for N tenths of a checkpoint, of which
a file takes T tenths after the rehearsal.
"""

import os
import resource
import shutil
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import psutil
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from ftmon.protocol.errors import FtmonError
from ftmon.trainer.recipe import trainer
from ftmon.trainer.recipe.distributed import World
from ftmon.trainer.recipe.state import TrainState
from ftmon.trainer.recipe.trainer import Trainer
from recipe_ranks import runs, save


@contextmanager
def little_memory() -> Generator[None]:
    """Let malloc fail beyond a hundred MiB more than there are."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 100 * 2**20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def full_disk(world: World, during: str) -> Generator[None]:
    """Let rank 0 write no large file during one of the trainer's functions."""
    original = getattr(trainer, during)

    def limited(*arguments: Any) -> Any:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if world.is_first:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
        try:
            return original(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    setattr(trainer, during, limited)
    try:
        yield
    finally:
        setattr(trainer, during, original)


@contextmanager
def no_room() -> Generator[None]:
    """Let every disk look full."""
    original = shutil.disk_usage
    shutil.disk_usage = lambda path: original(path)._replace(free=100 * 1024)  # type: ignore[assignment]
    try:
        yield
    finally:
        shutil.disk_usage = original


@contextmanager
def small_disk(run: Trainer, taken: int, tenths: int) -> Generator[None]:
    """Leave little room on the disk of a run's output, and less once the rehearsal is over."""
    rehearse, measure = trainer.rehearse, run.checkpoints.measure
    sizes: list[int] = []

    def take(name: str, count: int) -> None:
        with (run.output / name).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, count)

    def measure_and_fill(state: TrainState) -> int:
        sizes.append(measure(state))
        take("filler", shutil.disk_usage(run.output).free - sizes[0] * tenths // 10)
        return sizes[0]

    def rehearse_and_take(*arguments: Any) -> None:
        rehearse(*arguments)
        take("other", max(1, sizes[0] * taken // 10))

    trainer.rehearse, run.checkpoints.measure = rehearse_and_take, measure_and_fill
    try:
        yield
    finally:
        trainer.rehearse = rehearse
        for name in ("filler", "other"):
            (run.output / name).unlink(missing_ok=True)


def gathered_after_forwards(engine: Any) -> list[int]:
    """Return a list that gets, after each forward with gradients, how many partitioned parameters are whole."""
    counts: list[int] = []

    def count(module: Any, *_: Any) -> None:
        if torch.is_grad_enabled():
            states = [getattr(parameter, "ds_status", None) for parameter in module.parameters()]
            counts.append(states.count(ZeroParamStatus.AVAILABLE))

    engine.module.register_forward_hook(count)
    return counts


def surroundings(name: str, world: World, run: Trainer) -> AbstractContextManager[None]:
    if name.startswith("small-disk"):
        taken, tenths = map(int, name.split("-")[2:4])
        return small_disk(run, taken, tenths)
    if name.startswith("full-disk"):
        return full_disk(world, "save_model" if name.endswith("at-export") else "rehearse")
    if name == "no-room":
        return no_room()
    return little_memory() if name.startswith("out-of-memory") else nullcontext()


def work(world: World, jobs: list[str]) -> None:
    for path, run in runs(world, jobs):
        gathered = gathered_after_forwards(run.engine)
        try:
            with surroundings(path.stem, world, run):
                run.fit()
        except FtmonError as error:
            world.log(f"refused: {error}")
            world.barrier()
            continue
        except RuntimeError as error:
            if not path.stem.startswith("out-of-memory"):
                raise
            world.log(f"failed: {str(error).splitlines()[0]}")
            continue
        save(path, run, [] if run.evaluator is None else run.evaluator.examples.rows, gathered=gathered)
