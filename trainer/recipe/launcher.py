"""Starts the ranks of this host and waits for them: ``python -m ftmon.trainer.recipe.launcher OPTIONS -- ARGUMENTS``.

Each rank is a Python process with ARGUMENTS and the variables that DeepSpeed's launcher sets. With the first rank that
fails all others are ended, and its status is the launcher's. Nothing here imports torch, which DeepSpeed's launcher
does before it starts a rank: seconds of each start.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

import psutil

_GRACE_SECONDS = 30.0  # Time from SIGTERM to SIGKILL
_OWN_END_SECONDS = 1.0
"""Time after a failure in which other ranks, which often fail of the same error, report it and end by themselves."""


def command(ranks: int, gpus: Sequence[str], port: int, arguments: Sequence[str]) -> list[str]:
    """Return the launcher's command; ``gpus``: one for each rank, as named in CUDA_VISIBLE_DEVICES, or none."""
    words = [sys.executable, "-u", "-m", "ftmon.trainer.recipe.launcher", f"--ranks={ranks}", f"--port={port}"]
    return [*words, *([f"--gpus={','.join(gpus)}"] if gpus else []), "--", *arguments]


def environment_of(rank: int, ranks: int, gpus: str, port: int, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a rank; all ranks are on this host."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_SIZE": ranks}
    own |= {"CROSS_RANK": 0, "CROSS_SIZE": 1, "MASTER_PORT": port}
    result = {**base, "MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in own.items()}}
    return {**result, "CUDA_VISIBLE_DEVICES": gpus} if gpus else result


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks, and return 0, or the first status that is not 0 (1 after SIGINT or SIGTERM)."""
    given = _parser().parse_args(argv)
    running: dict[int, subprocess.Popen[bytes]] = {}

    def stop(*_: int | FrameType | None) -> None:
        _end(list(running))
        sys.exit(1)

    # Before the first rank: a signal between its start and this would leave it behind.
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    for rank in range(given.ranks):
        environment = environment_of(rank, given.ranks, given.gpus, given.port)
        started = subprocess.Popen([sys.executable, "-u", *given.arguments], env=environment)
        running[started.pid] = started
    while running:
        pid, status = os.wait()
        ended = running.pop(pid, None)
        if ended is None:
            continue
        ended.returncode = os.waitstatus_to_exitcode(status)
        if ended.returncode:
            time.sleep(_OWN_END_SECONDS)
            _end(list(running))
            # As the shell and DeepSpeed's launcher see a death by a signal: 256 less its number.
            return ended.returncode % 256
    return 0


def _end(pids: Sequence[int]) -> None:
    ending: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            ending += [*process.children(recursive=True), process]
    for process in ending:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(ending, timeout=_GRACE_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ftmon.trainer.recipe.launcher", description=__doc__)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--port", type=int, required=True, help="TCP port at which the ranks meet")
    parser.add_argument("--gpus", default="", help="CUDA_VISIBLE_DEVICES of the ranks")
    parser.add_argument("arguments", nargs="+", help="Python's arguments: a script or -m and a module")
    return parser


if __name__ == "__main__":
    sys.exit(main())
