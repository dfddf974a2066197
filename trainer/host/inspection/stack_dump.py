"""Dumps stacks of a rank that cannot answer: by a signal to faulthandler, and native frames by py-spy.

The signal's default action ends a process. It is therefore sent only if the process has the known pid and start time,
currently catches the signal, and still has the announced file open (``SelfDump``).

faulthandler reads the frames of all threads without the GIL: signal only ranks that ``gil_wait`` has found.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ....protocol.messages.telemetry import SelfDump
from .. import processes
from ..processes import Process

WRITE_SECONDS = 1.0
"""Time limit for the handler, from the signal to the last line written."""
PY_SPY_SECONDS = 20.0
_POLL_SECONDS = 0.02
_QUIET_LOOKS = 5
"""Looks in a row at a file that did not grow: the handler is done. It may not run between two of its lines."""
_LARGEST = 1 << 20


class DumpTarget(NamedTuple):
    """A rank to signal."""

    rank: int
    pid: int
    start_ticks: int
    dump: SelfDump | None


def by_signal(targets: Iterable[DumpTarget]) -> dict[int, str]:
    """Signal ranks whose native code holds the GIL to write their stacks, and return the stacks.

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
    unchanged: Counter[int] = Counter()
    deadline = time.monotonic() + WRITE_SECONDS
    while waiting and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        for rank, (path, size) in list(waiting.items()):
            text = _added(path, size)
            # faulthandler writes line by line: it is done when the file stops growing.
            unchanged[rank] = unchanged[rank] + 1 if text and text == found.get(rank) else 0
            if unchanged[rank] == _QUIET_LOOKS:
                del waiting[rank]
            found[rank] = text
    return {rank: text for rank, text in found.items() if text}


def may_signal(target: DumpTarget) -> bool:
    """Return whether the process is the same, catches the signal, and still has the announced file open."""
    dump = target.dump
    process = processes.read(target.pid)
    if dump is None or process is None or process.start_ticks != target.start_ticks or process.state not in "RS":
        return False
    bit = 1 << (dump.signal - 1)
    caught = processes.status(target.pid).get("SigCgt", "0")
    blocked = processes.status(target.pid, dump.receiver).get("SigBlk")
    if not int(caught, 16) & bit or blocked is None or int(blocked, 16) & bit:
        return False
    try:
        return os.path.samefile(f"/proc/{target.pid}/fd/{dump.descriptor}", dump.path)
    except OSError:
        return False


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
