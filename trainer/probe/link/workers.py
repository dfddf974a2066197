"""Stacks of a rank's dataloader workers: a rank that waits for one stands in the loader, the fault is in the worker.

A worker is a fork of the rank. It keeps a file in memory, and writes the stack of its main thread there when it gets
``SIGNAL``; Python runs the handler between two instructions, or in an interrupted wait. The rank's publisher sends the
signal, only to children that catch it and have that file, and reads the file in ``/proc``.
"""

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

SIGNAL = signal.SIGRTMAX - 9
"""A real-time signal that no library of this field uses."""
_FILE = "ftmon-worker"
_NAME = "pt_data_worker"
"""PyTorch's name for the process."""
_SECONDS = 0.1
"""A worker that has not answered after this is in native code."""
_MOST = 8


def answer_signals() -> None:
    """Make this process, a fork of a rank, write its stack on ``SIGNAL``; nothing if it uses the signal itself."""
    with contextlib.suppress(OSError, ValueError):
        if signal.getsignal(SIGNAL) is signal.SIG_DFL:
            file = os.memfd_create(_FILE)
            signal.signal(SIGNAL, lambda _, frame: _write(file, frame))


def _write(file: int, frame: FrameType | None) -> None:
    found = traceback.extract_stack(frame)
    lines = [f'  File "{each.filename}", line {each.lineno} in {each.name}' for each in reversed(found)]
    os.pwrite(file, "\n".join(lines).encode(errors="replace"), 0)


def stacks_of_workers(pid: int) -> str:
    """Return the stacks of a process's dataloader workers as ``faulthandler`` writes them; empty: none answered."""
    files = {child: file for child in list(_workers(pid))[:_MOST] if (file := _file_of(child)) is not None}
    for child in files:
        with contextlib.suppress(OSError):
            os.kill(child, SIGNAL)
    deadline = time.monotonic() + _SECONDS
    found: dict[int, str] = {}
    while len(found) < len(files) and time.monotonic() < deadline:
        time.sleep(0.005)
        for child, file in files.items():
            with contextlib.suppress(OSError):
                if child not in found and (text := file.read_text(errors="replace")):
                    found[child] = text
    return "".join(f"\nThread 0x{child:016x} [{_NAME} {child}]:\n{text}\n" for child, text in found.items())


def _workers(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                if Path(f"/proc/{child}/comm").read_text().strip() == _NAME:
                    yield child


def _file_of(child: int) -> Path | None:
    """Return the file of a worker that catches the signal."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        status: dict[str, Any] = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{child}/status").read_text().splitlines() if ":\t" in line
        )
        if int(status["SigCgt"], 16) >> (SIGNAL - 1) & 1:
            return next(file for file in Path(f"/proc/{child}/fd").iterdir() if f"memfd:{_FILE}" in os.readlink(file))
    return None
