"""One rank that trains each of several configurations, one after the other: rank 0 saves each run's weights.

A job is a configuration file; ``FILE.pt`` receives the weights of the end, the evaluation examples, and of ZeRO-3 how
many parameters were gathered at the end of each training forward, the rehearsal's too. Rank 0 of a job
called ``full-disk...`` can write no file above 1 KiB while it rehearses, ``no-room`` finds 100 KiB of free disk.
"""

import resource
import shutil
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from ftmon.protocol.errors import FtmonError
from ftmon.trainer.recipe import trainer
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.distributed import World
from ftmon.trainer.recipe.train import setup


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
def full_disk(world: World) -> Generator[None]:
    """Let rank 0 write no large file until the rehearsal is over."""
    original = trainer.rehearse

    def rehearse(*arguments: Any) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if world.is_first:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
        try:
            original(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    trainer.rehearse = rehearse
    try:
        yield
    finally:
        trainer.rehearse = original


@contextmanager
def no_room() -> Generator[None]:
    """Let every disk look full."""
    original = shutil.disk_usage
    shutil.disk_usage = lambda path: original(path)._replace(free=100 * 1024)  # type: ignore[assignment]
    try:
        yield
    finally:
        shutil.disk_usage = original


def gathered_after_forwards(engine: Any) -> list[int]:
    """Return a list that gets, after each forward with gradients, how many partitioned parameters are whole."""
    counts: list[int] = []

    def count(module: Any, *_: Any) -> None:
        if torch.is_grad_enabled():
            states = [getattr(parameter, "ds_status", None) for parameter in module.parameters()]
            counts.append(states.count(ZeroParamStatus.AVAILABLE))

    engine.module.register_forward_hook(count)
    return counts


def surroundings(name: str, world: World) -> AbstractContextManager[None]:
    if name.startswith("full-disk"):
        return full_disk(world)
    if name == "no-room":
        return no_room()
    return little_memory() if name.startswith("out-of-memory") else nullcontext()


def work(world: World, jobs: list[str]) -> None:
    for path in map(Path, jobs):
        world.log(f"== {path.stem}")
        config = load(str(path)).config
        try:
            run = setup(config, world)
            gathered = gathered_after_forwards(run.engine)
            with surroundings(path.stem, world):
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
        parameters = dict(run.engine.module.named_parameters())
        with GatheredParameters(list(parameters.values()), enabled=config.zero.stage == 3):
            weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        held_out = [] if run.evaluator is None else run.evaluator.examples.rows
        rows = [{name: [int(token) for token in row[name]] for name in ("input_ids", "labels")} for row in held_out]
        if world.is_first:
            torch.save({"weights": weights, "rows": rows, "gathered": gathered}, path.with_suffix(".pt"))
        run.engine.destroy()
