"""Whether a rank's process does anything: processor time, reads and writes of it and of all its children, from /proc.

A training thread that sleeps at one line of Python and does not wake up, in a process that does nothing, is stuck. One
that sleeps while a child works, or while the disk is busy for it, waits for honest work; one that wakes up time and
again does work in small pieces. (proc(5): stat, status, io, wchan.)
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..protocol.telemetry import SelfDump
from . import processes
from .processes import Process

BUSY_SHARE = 0.03
"""More processor time than this share of one core is work."""
BUSY_SECONDS = 0.03
"""And more than this: the clock ticks in hundredths."""
WAKES_PER_SECOND = 0.2
"""PyTorch's dataloader looks every five seconds whether its worker still lives: that is no work either."""
SPARE_WAKES = 0.5
_OWN_THREADS = ("ZMQbg", "ftmon", "pt_")
"""Threads of ftmon's sockets and of PyTorch's watchdogs look around many times a second: that is no work of the
script."""
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class Activity(NamedTuple):
    """One look at a process and its children."""

    time: float
    """``time.monotonic``."""
    state: str
    """The training thread's state letter; empty: gone."""
    wchan: str
    """The kernel function it waits in; empty: it may not be read, or it runs."""
    cpu_seconds: float
    io_bytes: int
    on_disk: bool
    """A thread of it or of a child is in uninterruptible sleep (D): it waits for a disk, most likely."""
    switches: int = 0
    """How often the training thread was switched to another: each time it woke up and went to sleep again."""

    def rested_since(self, before: "Activity") -> bool:
        """Tell whether nothing was done between an earlier look and this one."""
        passed = self.time - before.time
        used = self.cpu_seconds - before.cpu_seconds
        return (
            self.state == before.state == "S"
            and not self.on_disk
            and not before.on_disk
            and self.io_bytes == before.io_bytes
            and used <= max(BUSY_SECONDS, BUSY_SHARE * passed)
            and self.switches - before.switches <= SPARE_WAKES + passed * WAKES_PER_SECOND
        )


def look(pid: int, dump: SelfDump | None, table: Mapping[int, Process], now: float) -> Activity:
    """Look at the process ``pid``.

    Args:
        pid: a rank's process.
        dump: which of its threads trains, and which is the probe's own; None: the main thread, and not known.
        table: the process table (``processes.table``).
        now: ``time.monotonic``.
    """
    training = dump.training if dump is not None else pid
    found = _threads(pid, training, dump.receiver if dump is not None else -1)
    seconds, moved, waits = found.seconds, found.io_bytes, found.on_disk
    for child in processes.descendants([pid], dict(table)):
        below = _threads(child.pid, child.pid, -1)
        seconds += below.seconds
        moved += below.io_bytes
        waits = waits or below.on_disk
    return Activity(now, found.state, wchan(pid, training), seconds, moved, waits, _switches(pid, training))


def wchan(pid: int, thread: int) -> str:
    """Name the kernel function a thread waits in; empty where that may not be read, or it waits in none."""
    try:
        return Path(f"/proc/{pid}/task/{thread}/wchan").read_text().strip().strip("0")
    except OSError:
        return ""


def _switches(pid: int, thread: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/task/{thread}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.partition(":")[2]) for line in lines if "ctxt_switches:" in line)


class _Threads(NamedTuple):
    state: str
    """The training thread's."""
    seconds: float
    io_bytes: int
    on_disk: bool


def _threads(pid: int, training: int, own: int) -> _Threads:
    """Add up what the threads of one process have done; ftmon's own are left out."""
    state, ticks, moved, waits = "", 0, 0, False
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        threads = []
    for thread in threads:
        folder = f"/proc/{pid}/task/{thread}"
        try:
            text = Path(folder, "stat").read_bytes().decode("utf-8", "replace")
        except OSError:
            continue
        end = text.rindex(")")
        fields = text[end + 2 :].split()
        number = int(thread)
        if number == training:
            state = fields[0]
        if number == own or text[text.index("(") + 1 : end].startswith(_OWN_THREADS):
            continue
        waits = waits or fields[0] == "D"
        ticks += int(fields[11]) + int(fields[12])
        moved += _io(Path(folder, "io"))
    return _Threads(state, ticks / _TICKS, moved, waits)


def _io(path: Path) -> int:
    """Return the bytes a thread has had read from and written to disks; 0 where that may not be read."""
    try:
        text = path.read_text()
    except OSError:
        return 0
    found = dict(line.split(": ") for line in text.splitlines() if ": " in line)
    return int(found.get("read_bytes", 0)) + int(found.get("write_bytes", 0))
