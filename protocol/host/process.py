"""Identifies a process by its pid and start time; a pid alone may be reused."""

import os
import sys
from pathlib import Path

import msgspec


class ProcessId(msgspec.Struct, frozen=True):
    """A process; ``start_ticks`` is its start time in a unit of the platform."""

    pid: int
    start_ticks: int


def start_ticks(pid: int) -> int | None:
    """Return when ``pid`` started, in clock ticks since boot (field 22 of /proc/PID/stat, proc(5)).

    Without /proc, the unit is hundredths of a second since the epoch. None: there is no such process, or it is a
    zombie.
    """
    if sys.platform != "linux":
        return _start_elsewhere(pid)
    try:
        # Bytes: the name of a process may not be UTF-8, and may contain parentheses.
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in b"ZX" else int(fields[19])


def _start_elsewhere(pid: int) -> int | None:
    """Return the start time from psutil. Not ``os.kill(pid, 0)``, which on Windows interrupts the process."""
    import psutil  # only without /proc: a rank on Linux does not need it

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time() * 100)
    except (psutil.Error, ValueError):
        return None


def this_process() -> ProcessId:
    """Return the identity of the calling process."""
    return ProcessId(os.getpid(), start_ticks(os.getpid()) or 0)


def is_alive(process: ProcessId) -> bool:
    """Return whether this process, and not a later one with its pid, is alive (zombies are not)."""
    return process.pid > 0 and start_ticks(process.pid) == process.start_ticks
