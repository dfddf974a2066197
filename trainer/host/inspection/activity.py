"""Reads the activity of a rank's process tree from proc(5) and sock_diag(7): ``Activity``.

``protocol.analysis.stalls.activity`` compares two of them.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ....protocol.analysis.stalls.activity import Activity
from ....protocol.messages.telemetry import SelfDump
from .. import processes
from ..processes import Process
from . import traffic

__all__ = ["Activity", "measure", "switches", "wchan"]

_OWN_THREADS = ("ZMQbg", "ftmon", "pt_", "gloo_", "NCCL")
"""Threads of the monitor's sockets, of PyTorch's watchdogs and of communication libraries. They poll many times a
second and forward data of other ranks, which is not work of the script."""
_LOADER_WORKER = "pt_data_worker"
"""PyTorch's name for a worker's main thread."""
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def measure(
    pid: int,
    dump: SelfDump | None,
    table: Mapping[int, Process],
    now: float,
    sockets: Mapping[int, int] | None = None,
    others: Iterable[int] = (),
    ranks: Iterable[int] = (),
) -> Activity:
    """Return the totals of the process ``pid`` and its descendants.

    Args:
        pid: a rank's process.
        dump: ids of its training thread and of the probe's thread; None: unknown, the main thread is used.
        table: the process table (``processes.table``).
        now: ``time.monotonic``.
        sockets: ``traffic.by_socket``; None: read here.
        others: other processes whose work counts as this rank's: daemons it started, holders of a lock it waits for.
        ranks: processes of ranks, whose work does not count for the rank that started them.
    """
    sockets = traffic.by_socket() if sockets is None else sockets
    training = dump.training if dump is not None else pid
    found = _threads(pid, training, dump.receiver if dump is not None else -1)
    moved, waits, chars, sent = found.io_bytes, found.on_disk, found.chars, traffic.of_process(pid, sockets)
    seconds, naps = 0.0, 0
    further = [table[other] for other in others if other in table and other != pid]
    tree = processes.descendants([pid, *others], dict(table), ranks)
    below = {p.pid: p for p in (*further, *tree) if p.pid != pid}
    for child in below.values():
        read = _threads(child.pid, child.pid, -1)
        seconds += read.seconds
        moved += read.io_bytes
        chars += read.chars
        waits = waits or read.on_disk
        sent += traffic.of_process(child.pid, sockets)
        # A data set sleeps between two attempts; an idle worker waits in poll(2), where it wakes up too.
        if child.name == _LOADER_WORKER and "nanosleep" in wchan(child.pid, child.pid):
            naps += switches(child.pid, child.pid)
    living = [child for child in below.values() if child.alive]
    newest = max((child.start_ticks for child in living), default=0)
    return Activity(
        time=now,
        state=found.state,
        wchan=wchan(pid, training),
        cpu_seconds=found.seconds,
        io_bytes=moved,
        on_disk=waits,
        switches=switches(pid, training),
        below_seconds=seconds,
        chars=chars,
        traffic=sent,
        processes=1 + len(living),
        newest=newest,
        worker_naps=naps,
        training_seconds=found.training_seconds,
    )


def wchan(pid: int, thread: int) -> str:
    """Return the kernel function in which a thread waits; empty if it waits in none, or if it is not readable."""
    try:
        return Path(f"/proc/{pid}/task/{thread}/wchan").read_text().strip().strip("0")
    except OSError:
        return ""


def switches(pid: int, thread: int) -> int:
    """Return the context switches of a thread so far; 0 if they are not readable."""
    fields = processes.status(pid, thread)
    return sum(int(fields.get(f"{kind}_ctxt_switches", 0)) for kind in ("voluntary", "nonvoluntary"))


class _Threads(NamedTuple):
    state: str
    """State of the training thread."""
    seconds: float
    io_bytes: int
    chars: int
    on_disk: bool
    training_seconds: float


def _threads(pid: int, training: int, own: int) -> _Threads:
    """Return the summed work of one process's threads, without those in ``_OWN_THREADS``."""
    state, ticks, own_ticks, moved, chars, waits = "", 0, 0, 0, 0, False
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        threads = []
    for thread in threads:
        folder = f"/proc/{pid}/task/{thread}"
        read = processes.stat_fields(f"{folder}/stat")
        if read is None:
            continue
        name, fields = read
        number = int(thread)
        if number == training:
            state, own_ticks = fields[0], int(fields[11]) + int(fields[12])
        if number == own or name.startswith(_OWN_THREADS):
            continue
        waits = waits or fields[0] == "D"
        ticks += int(fields[11]) + int(fields[12])
        disk, passed = _io(Path(folder, "io"))
        moved += disk
        chars += passed
    return _Threads(state, ticks / _TICKS, moved, chars, waits, own_ticks / _TICKS)


def _io(path: Path) -> tuple[int, int]:
    """Return a thread's bytes read from and written to disks, and through read(2) and write(2); 0 if not readable."""
    try:
        text = path.read_text()
    except OSError:
        return 0, 0
    found = dict(line.split(": ") for line in text.splitlines() if ": " in line)
    disk = int(found.get("read_bytes", 0)) + int(found.get("write_bytes", 0))
    return disk, int(found.get("rchar", 0)) + int(found.get("wchar", 0))
