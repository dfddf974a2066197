"""One rank that trains several configurations; in a file called ``stop-at-N.yaml`` rank 1 asks to stop after step N.

``runs`` is the loop of the modules whose ranks change a run before it trains, or save what came of it.
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from ftmon.protocol.errors import FtmonError
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.distributed import World
from ftmon.trainer.recipe.monitor import Unwatched
from ftmon.trainer.recipe.train import setup, train
from ftmon.trainer.recipe.trainer import Trainer


def runs(world: World, jobs: list[str]) -> Iterator[tuple[Path, Trainer]]:
    """Set up each configuration's run and end it afterwards; print what is refused. Garbage is costly here: frozen."""
    for path in map(Path, jobs):
        gc.freeze()
        world.log(f"== {path.stem}")
        try:
            run = setup(load(str(path)).config, world)
        except FtmonError as error:
            world.log(f"refused: {error}")
            world.barrier()
            continue
        yield path, run
        run.engine.destroy()


def save(path: Path, run: Trainer, rows: Any, **values: Any) -> None:
    """Write ``FILE.pt`` of a job on rank 0: the weights, ``rows`` as lists, and other values."""
    parameters = dict(run.engine.module.named_parameters())
    with GatheredParameters(list(parameters.values()), enabled=run.config.zero.stage == 3):
        weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    plain = [{name: torch.as_tensor(value).tolist() for name, value in row.items()} for row in rows]
    if run.world.is_first:
        torch.save({"weights": weights, "rows": plain, **values}, path.with_suffix(".pt"))


def work(world: World, jobs: list[str]) -> None:
    asked = Unwatched.stop_requested
    for path in map(Path, jobs):
        gc.freeze()
        world.log(f"== {path.stem}")
        if path.stem.startswith("stop-at-") and world.rank == 1:
            calls = iter(range(1, 1000))
            wanted = int(path.stem.rpartition("-")[2])
            Unwatched.stop_requested = lambda self, calls=calls, wanted=wanted: next(calls) >= wanted
        try:
            train(load(str(path)).config, world)
        except FtmonError as error:
            world.log(f"refused: {error}")
            world.barrier()
        Unwatched.stop_requested = asked
