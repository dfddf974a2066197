"""One rank that trains several configurations one after the other in one process group: imports are paid for once.

``recipe_ranks.py FILE...``; in a file called ``stop-at-N.yaml`` rank 1 alone asks to stop after step N.
"""

import sys
from pathlib import Path

from ftmon.protocol.errors import FtmonError
from ftmon.trainer.recipe.decode import load
from ftmon.trainer.recipe.loop import train
from ftmon.trainer.recipe.monitor import Monitor
from ftmon.trainer.recipe.ranks import World


def main() -> None:
    world = World()
    asked = Monitor.stop_requested
    for path in map(Path, sys.argv[1:]):
        if world.is_first:
            print(f"== {path.stem}", flush=True)
        if path.stem.startswith("stop-at-") and world.rank == 1:
            calls = iter(range(1, 1000))
            wanted = int(path.stem.rpartition("-")[2])
            Monitor.stop_requested = lambda self, calls=calls, wanted=wanted: next(calls) >= wanted
        try:
            train(load(str(path)).config, world)
        except FtmonError as error:
            if world.is_first:
                print(f"refused: {error}", flush=True)
            world.barrier()
        Monitor.stop_requested = asked
    world.leave()


main()
