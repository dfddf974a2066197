"""Finds the lock file that the training thread waits for: of PyTorch's extension builds, or of ``filelock``."""

import contextlib
import os
import sys
import time
from types import FrameType
from typing import Any

from ...host import processes

COMPILERS = frozenset(
    (
        *("ninja", "nvcc", "cicc", "ptxas", "fatbinary", "cc1plus", "cc1", "hipcc", "icpx"),
        *("c++", "g++", "gcc", "cc", "clang", "clang++", "ld", "ld.lld", "collect2", "as", "make", "cmake"),
    )
)
_FRAMES = 64


def waits_for(thread: int) -> dict[str, Any]:
    """Return the lock file that a thread waits for, as plain data; empty if it waits for none.

    Returns:
        ``path``; ``build``: whether it is the lock of a build, and then ``compiler``: whether a compiler runs in its
        folder on this host, and ``idle_s``: seconds since the last change of another file there.
    """
    frame = sys._current_frames().get(thread)
    for _ in range(_FRAMES):
        if frame is None:
            return {}
        path, build = _lock_of(frame)
        if path:
            return {"path": path, "build": build, **(_builder(path) if build else {})}
        frame = frame.f_back
    return {}


def _lock_of(frame: FrameType) -> tuple[str, bool]:
    file, name = frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name
    if file.endswith("/torch/utils/file_baton.py") and name == "wait":
        return str(getattr(frame.f_locals.get("self"), "lock_file_path", "")), True
    if "/filelock/" in file and name == "acquire":
        return str(getattr(frame.f_locals.get("self"), "lock_file", "")), False
    return "", False


def _works_in(pid: int, folder: str) -> bool:
    """Return whether a compiler may build there: PyTorch starts them in the build's own folder."""
    try:
        return os.path.samefile(f"/proc/{pid}/cwd", folder)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # another user's: its folder may not be read


def _builder(path: str) -> dict[str, Any]:
    table = processes.table()
    compiler = any(p.alive and p.name in COMPILERS and _works_in(p.pid, os.path.dirname(path)) for p in table.values())
    newest = 0.0
    with contextlib.suppress(OSError), os.scandir(os.path.dirname(path)) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
    return {"compiler": compiler, "idle_s": max(0.0, time.time() - newest) if newest else 0.0}
