"""Makes this process a background process: low CPU and disk priority, first to be OOM-killed, ends with its parent."""

import contextlib
import ctypes
import os
import platform
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # ioprio_set(2) has no wrapper in glibc
_IOPRIO_IDLE = 3 << 13


def end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent (by pid) ends; exit at once if the parent has ended."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def lower_priority(idle: bool = True) -> None:
    """Lower this process's CPU and disk priority, and make it the first to be killed when memory runs out.

    ``idle``: the idle class; otherwise only a low priority, because a user waits for the result.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if not idle:
        _lower_priority(10)
        return
    _lower_priority(19)
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, 1, 0, _IOPRIO_IDLE)


def _lower_priority(niceness: int) -> None:
    """Raise the niceness, also if the parent has set one; never lower it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))
