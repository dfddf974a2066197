"""Naming a process for certain: its pid together with when it started. A pid alone is reused."""

import os
import sys
from pathlib import Path

import msgspec


class ProcessId(msgspec.Struct, frozen=True):
    """A process, for certain: ``start_ticks`` is when it started, in a unit of the platform's."""

    pid: int
    start_ticks: int


def start_ticks(pid: int) -> int | None:
    """Return when ``pid`` started, in clock ticks since boot (field 22 of /proc/PID/stat, proc(5)).

    None: there is no such process, or it is a zombie. Where there is no /proc, the hundredths of a second since the
    epoch at which it started.
    """
    if sys.platform != "linux":
        return _start_elsewhere(pid)
    try:
        # Bytes: a process may call itself what is no UTF-8, or hold a parenthesis in its name.
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in b"ZX" else int(fields[19])


def _start_elsewhere(pid: int) -> int | None:
    """Ask psutil. Never ``os.kill(pid, 0)``, which on Windows is no question: it interrupts the process."""
    import psutil  # only where there is no /proc: a rank on Linux does without it

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time() * 100)
    except (psutil.Error, ValueError):
        return None


def this_process() -> ProcessId:
    """Name the calling process."""
    return ProcessId(os.getpid(), start_ticks(os.getpid()) or 0)


def is_alive(process: ProcessId) -> bool:
    """Return whether that very process, not a later one with its pid, is alive (zombies are not)."""
    return process.pid > 0 and start_ticks(process.pid) == process.start_ticks
