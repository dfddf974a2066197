"""One rank that trains several configurations one after the other; its losses are printed to the last bit.

``resume_ranks.py FILE...``, or the jobs of ``forked_ranks``. What a file is called says what happens to it:

``cut-N-...``   the run is given up after its Nth step in this process, all ranks at once
``kill-N-...``  the rank kills itself with SIGKILL after its Nth step
``term-N-...``  rank 1 alone receives SIGTERM after its Nth step
``full-N-...``  rank 0 can write no file above 1 KiB from the Nth step on, for three steps
"""

import gc
import os
import resource
import signal
import sys
import threading
from pathlib import Path

from ftmon.protocol.errors import FtmonError
from ftmon.trainer.recipe import step as progress
from ftmon.trainer.recipe import trainer
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.distributed import World
from ftmon.trainer.recipe.monitor import Unwatched
from ftmon.trainer.recipe.train import train


class GivenUpError(Exception):
    pass


def work(world: World, jobs: list[str]) -> None:
    trainer._LEAST_SECONDS = 200.0  # a step of two ranks on a busy host
    ask = Unwatched.stop_requested
    step = progress.ProgressLines.step

    def exact(self: progress.ProgressLines, number: int, result: object, *rest: object) -> None:
        loss = float(result.loss_sum.item())  # type: ignore[attr-defined]
        os.write(1, f"rank {world.rank} {number} {loss.hex()}\n".encode())  # in one piece
        step(self, number, result, *rest)  # type: ignore[arg-type]

    progress.ProgressLines.step = exact  # type: ignore[method-assign]
    for path in map(Path, jobs):
        gc.freeze()  # DeepSpeed collects garbage for every engine: not again and again in what was imported
        kind, _, rest = path.stem.partition("-")
        calls = 0

        def stop_requested(self: Unwatched, kind: str = kind, rest: str = rest) -> bool:
            nonlocal calls
            calls += 1
            when = int(rest.partition("-")[0]) if kind in ("cut", "kill", "term", "full") else 0
            if kind == "cut" and calls == when:
                raise GivenUpError
            if kind == "kill" and calls == when:
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "term" and calls == when and world.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if kind == "full" and world.is_first and calls in (when, when + 3):
                limit = 1024 if calls == when else resource.RLIM_INFINITY
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            return ask(self)

        Unwatched.stop_requested = stop_requested  # type: ignore[method-assign]
        # A print of all ranks' lines, one job after the other.
        world.barrier()
        if world.is_first:
            os.write(1, f"== {path.stem}\n".encode())
        world.barrier()
        try:
            train(load(str(path)).config, world)
        except GivenUpError:
            os.write(1, b"given up\n")
            # In a run of its own it ends with the process; here it would write into the next job's checkpoints.
            for thread in threading.enumerate():
                if thread.name == "ftmon-checkpoint":
                    thread.join()
        except FtmonError as error:
            if world.is_first:
                os.write(1, f"refused: {error}\n".encode())
        world.barrier()


if __name__ == "__main__":
    place = World()
    work(place, sys.argv[1:])
    place.leave()
