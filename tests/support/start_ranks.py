"""A launcher of ranks that costs nothing itself, for tests of something else: torchrun imports torch first.

``python start_ranks.py N SCRIPT ARGUMENT...``. The first rank that fails ends the others, and the launcher fails.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from ftmon.trainer.recipe.hardware import free_port


def command(ranks: int, *words: object) -> list[str]:
    """Return the command of a job of so many ranks."""
    return [sys.executable, str(Path(__file__)), str(ranks), *map(str, words)]


def main() -> None:
    ranks = int(sys.argv[1])
    port = free_port()
    children: dict[int, subprocess.Popen[bytes]] = {}
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
        child = subprocess.Popen([sys.executable, "-u", *sys.argv[2:]], env=environment)
        children[child.pid] = child

    def end(*_: object) -> None:
        for child in children.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)  # ``terminate`` would take its status from ``os.wait``

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's reaches the ranks too
    failed = False
    while children:
        pid, status = os.wait()
        child = children.pop(pid, None)
        if child is not None and status and not failed:
            failed = True
            end()
    sys.exit(failed)


if __name__ == "__main__":
    main()
