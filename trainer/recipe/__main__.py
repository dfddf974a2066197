"""One rank of ftmon's trainer: ``python -m ftmon.trainer.recipe [CONFIG]``, started by ``launcher``.

Without CONFIG it reads the run directory's ``config.yaml``. The configuration is already resolved (``preflight``).
"""

import gc
import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

from ...protocol.errors import FtmonError, UsageError
from ...protocol.run.environment import RUN_ENV
from ...protocol.run.rundir import RunDir
from .termination import StoppedEarlyError, Termination, say_early


def main(arguments: list[str]) -> int:
    """Train; return the exit status."""
    if arguments:
        path = arguments[0]
    elif RUN_ENV in os.environ:
        path = str(RunDir(os.environ[RUN_ENV]).config)
    else:
        print("usage: python -m ftmon.trainer.recipe CONFIG", file=sys.stderr)
        return 2
    rank = os.environ.get("RANK", "0")
    Termination.start_up()
    try:
        gc.disable()
        from .config.load import load

        config = load(path).config
        with _without_sklearn():
            from .distributed import World, start_device

            start_device()
            from .train import train

        _keep_imported()
        world = World()
        train(config, world)
        # Not after a failure: NCCL would wait here forever for collectives that the other ranks are still in.
        world.leave()
        _keep_imported()  # and later imports: they end with the process
    except FtmonError as error:
        if not isinstance(error, UsageError):
            print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        elif rank == "0":  # every rank finds the same error; one reports it
            print(error, file=sys.stderr, flush=True)
        sys.last_value = error  # as the interpreter does; the probe reports it as the cause of this rank's end
        return error.exit_status
    except StoppedEarlyError:
        say_early()
        return 128 + signal.SIGTERM  # not 0: the launcher ends the other ranks, which may wait for this one
    return 0


@contextmanager
def _without_sklearn() -> Generator[None]:
    """Hide scikit-learn from imports in the body.

    transformers would import it, with SciPy and pandas, for assisted generation: a second of each start.
    """
    modules = cast(dict[str, Any], sys.modules)
    hidden = modules.setdefault("sklearn", None) is None
    try:
        yield
    finally:
        if hidden:
            del modules["sklearn"]


def _keep_imported() -> None:
    """Exempt present objects from garbage collection, which needs seconds for them at a rank's start and end."""
    gc.freeze()
    gc.enable()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
