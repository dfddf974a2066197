"""Which launcher started this host's ranks."""

import os

from ....protocol.host.process import start_ticks

_RANK_VARIABLES = (b"LOCAL_RANK=", b"RANK=")
_MOST_ANCESTORS = 16


def launch_of_this_process() -> str:
    """Return the process that launched this host's ranks, ``PID-START_TICKS``; empty if /proc does not show it.

    It is the nearest ancestor whose environment names no rank: there may be a wrapper for each rank in between
    (``torchrun --no-python wrap.sh``, ``numactl``). ``/proc/PID/environ`` has the environment at the start of a
    process, without its own changes.
    """
    pid = os.getppid()
    try:
        if _names_a_rank("self"):
            for _ in range(_MOST_ANCESTORS):
                if pid <= 1 or not _names_a_rank(str(pid)):
                    break
                pid = _parent(pid)
        ticks = start_ticks(pid)
    except (OSError, ValueError):
        return ""
    return f"{pid}-{ticks}" if ticks is not None else ""


def _names_a_rank(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return any(entry.startswith(_RANK_VARIABLES) for entry in file.read().split(b"\0"))
    except PermissionError:  # of another user, such as a job scheduler: not a rank
        return False


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        stat = file.read()
    return int(stat[stat.rindex(b")") + 2 :].split()[1])
