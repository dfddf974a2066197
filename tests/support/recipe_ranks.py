"""One rank that trains several configurations one after the other in one process group: imports are paid for once.

``recipe_ranks.py FILE...``; in a file called ``stop-at-N.yaml`` rank 1 alone asks to stop after step N.
"""

import gc
import sys
from pathlib import Path

from ftmon.protocol.errors import FtmonError
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.engine.distributed import World
from ftmon.trainer.recipe.monitor import Unwatched
from ftmon.trainer.recipe.train import train


def main() -> None:
    gc.freeze()  # DeepSpeed collects garbage for every engine: not again and again in what was imported
    world = World()
    asked = Unwatched.stop_requested
    for path in map(Path, sys.argv[1:]):
        if world.is_first:
            sys.stdout.write(f"== {path.stem}\n")  # in one piece: unbuffered, print writes the line's end by itself
        if path.stem.startswith("stop-at-") and world.rank == 1:
            calls = iter(range(1, 1000))
            wanted = int(path.stem.rpartition("-")[2])
            Unwatched.stop_requested = lambda self, calls=calls, wanted=wanted: next(calls) >= wanted
        try:
            train(load(str(path)).config, world)
        except FtmonError as error:
            if world.is_first:
                sys.stdout.write(f"refused: {error}\n")
            world.barrier()
        Unwatched.stop_requested = asked
    world.leave()


main()
