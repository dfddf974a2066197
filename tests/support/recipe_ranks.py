"""One rank that trains several configurations; in a file called ``stop-at-N.yaml`` rank 1 asks to stop after step N."""

from pathlib import Path

from ftmon.protocol.errors import FtmonError
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.distributed import World
from ftmon.trainer.recipe.monitor import Unwatched
from ftmon.trainer.recipe.train import train


def work(world: World, jobs: list[str]) -> None:
    asked = Unwatched.stop_requested
    for path in map(Path, jobs):
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
