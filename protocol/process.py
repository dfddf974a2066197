"""Naming a process for certain: its pid together with when it started. A pid alone is reused."""

import os
import sys
from pathlib import Path

import msgspec


class ProcessId(msgspec.Struct, frozen=True):
    """A process, for certain. ``start_ticks`` is 0 where the platform does not tell."""

    pid: int
    start_ticks: int


def start_ticks(pid: int) -> int | None:
    """Return when ``pid`` started, in clock ticks since boot (field 22 of /proc/PID/stat, proc(5)).

    None: there is no such process, or it is a zombie. Where there is no /proc, 0 for a process that lives.
    """
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except OSError:
            return None
        return 0
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def this_process() -> ProcessId:
    """Name the calling process."""
    return ProcessId(os.getpid(), start_ticks(os.getpid()) or 0)


def is_alive(process: ProcessId) -> bool:
    """Tell whether that very process, not a later one with its pid, still lives (zombies do not)."""
    return process.pid > 0 and start_ticks(process.pid) == process.start_ticks
