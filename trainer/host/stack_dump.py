"""Dumps stacks of a rank that cannot answer: by a signal to faulthandler, and native frames by py-spy.

The signal's default action ends a process. It is therefore sent only if the process has the known pid and start time,
currently catches the signal, and still has the announced file open (``SelfDump``).

faulthandler reads the frames of all threads without Python's lock. Where a thread runs Python meanwhile, it may follow
a frame that is gone, and the process dies of SIGSEGV. The signal is therefore sent only while the probe's own thread
waits for the lock, does not get it, and no other thread may hold it and run Python: a thread that runs Python gives the
lock away within microseconds of processor time, so each one is asleep, or has computed for long.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ...protocol.telemetry import SelfDump
from . import processes
from .processes import Process

WRITE_SECONDS = 1.0
"""Time limit for the handler, from the signal to the last line written."""
PY_SPY_SECONDS = 20.0
_LOOKS, _LOOK_SECONDS = 4, 0.05
"""A thread that waits for Python's lock wakes up every 5 ms (``sys.getswitchinterval``), in each look. One that waits
for messages, or gets the lock, sleeps through some of the looks."""
_LEAST_WAKEUPS = 2
_LEAST_TICKS = 3
"""Processor time, in clock ticks, within the looks after which a runnable thread is known to run no Python. One that
has less may hold the lock and be kept from the processor by other processes."""
_POLL_SECONDS = 0.02
_LARGEST = 1 << 20


class DumpTarget(NamedTuple):
    """A rank to signal."""

    rank: int
    pid: int
    start_ticks: int
    dump: SelfDump | None


def waiting_for_lock(targets: Collection[DumpTarget]) -> set[int]:
    """Return the ranks whose probe waits for Python's lock. Blocks for a fifth of a second; not for a main loop."""
    waiting = {target for target in targets if target.dump is not None}
    before = {target: _wakeups(target) for target in waiting}
    looks = [{target: _threads(target) for target in waiting}]
    for _ in range(_LOOKS if waiting else 0):
        time.sleep(_LOOK_SECONDS)
        now = {target: _wakeups(target) for target in waiting}
        waiting = {target for target in waiting if now[target] - before[target] >= _LEAST_WAKEUPS}
        before = now
        looks.append({target: _threads(target) for target in waiting})
    return {target.rank for target in waiting if not _may_run_python([look[target] for look in looks])}


def _may_run_python(looks: list[dict[int, tuple[str, int]]]) -> bool:
    """Return whether a thread was runnable and has hardly run, by what ``_threads`` returned at each look."""
    runnable = {thread for look in looks for thread, (state, _) in look.items() if state == "R"}
    first, last = looks[0], looks[-1]
    return any(
        thread not in first or thread not in last or last[thread][1] - first[thread][1] < _LEAST_TICKS
        for thread in runnable
    )


def _threads(target: DumpTarget) -> dict[int, tuple[str, int]]:
    """Return the state and processor time, in ticks, of each thread of a rank but the probe's own."""
    found: dict[int, tuple[str, int]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{target.pid}/task"):
            if target.dump is not None and int(name) == target.dump.receiver:
                continue
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{target.pid}/task/{name}/stat").read_text().rpartition(")")[2].split()
                found[int(name)] = fields[0], int(fields[11]) + int(fields[12])
    return found


def _wakeups(target: DumpTarget) -> int:
    """Return how often the probe's thread has given up the processor to wait; 0 if that is not readable."""
    thread = target.dump.receiver if target.dump is not None else target.pid
    try:
        lines = Path(f"/proc/{target.pid}/task/{thread}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.partition(":")[2]) for line in lines if line.startswith("voluntary_ctxt_switches:")), 0)


def by_signal(targets: Iterable[DumpTarget]) -> dict[int, str]:
    """Signal ranks that wait for Python's lock to write their stacks, and return the stacks.

    Ranks that must not be signalled are omitted. Blocks for up to ``WRITE_SECONDS`` for all of them together; not for
    use in a main loop.
    """
    waiting: dict[int, tuple[Path, int]] = {}
    for target in targets:
        if target.dump is not None and may_signal(target):
            path = Path(target.dump.path)
            size = path.stat().st_size
            if _tgkill(target.pid, target.dump.receiver, target.dump.signal):
                waiting[target.rank] = path, size
    found: dict[int, str] = {}
    deadline = time.monotonic() + WRITE_SECONDS
    while waiting and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        for rank, (path, size) in list(waiting.items()):
            text = _added(path, size)
            # faulthandler writes line by line: it is done when the file stops growing.
            if text and text == found.get(rank):
                del waiting[rank]
            found[rank] = text
    return {rank: text for rank, text in found.items() if text}


def may_signal(target: DumpTarget) -> bool:
    """Return whether the process is the same, catches the signal, and still has the announced file open."""
    dump = target.dump
    process = processes.read(target.pid)
    if dump is None or process is None or process.start_ticks != target.start_ticks or process.state not in "RS":
        return False
    try:
        caught = _mask(target.pid, "SigCgt") >> (dump.signal - 1) & 1
        blocked = _mask(target.pid, "SigBlk", dump.receiver) >> (dump.signal - 1) & 1
        same_file = os.path.samefile(f"/proc/{target.pid}/fd/{dump.descriptor}", dump.path)
    except (OSError, ValueError):
        return False
    return bool(caught) and not blocked and same_file


def py_spy() -> str:
    """Return the path of py-spy; empty if it is not installed."""
    return shutil.which("py-spy") or ""


def native(process: Process) -> tuple[str, str]:
    """Read a process's stacks with py-spy, including native frames, if permitted. The process is paused meanwhile.

    Returns:
        The stacks, or an empty string and the reason.
    """
    program = py_spy()
    if not program:
        return "", "py-spy is not installed"
    try:
        done = subprocess.run(
            [program, "dump", "--native", "--pid", str(process.pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PY_SPY_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"py-spy: {error}"
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()
        return "", f"py-spy: {last[-1] if last else f'exit status {done.returncode}'}"[:300]
    return done.stdout[:_LARGEST].decode(errors="replace"), ""


def _mask(pid: int, name: str, thread: int | None = None) -> int:
    path = f"/proc/{pid}/status" if thread is None else f"/proc/{pid}/task/{thread}/status"
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.partition(":")[2], 16)
    raise ValueError(f"{path} has no {name}")


def _tgkill(pid: int, thread: int, number: int) -> bool:
    libc: Any = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(AttributeError):  # glibc before 2.30
        return libc.tgkill(pid, thread, number) == 0
    return False


def _added(path: Path, size: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(size)
            return file.read(_LARGEST).decode(errors="replace")
    except OSError:
        return ""
