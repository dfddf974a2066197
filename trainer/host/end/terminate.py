"""Ends a set of processes: TERM, then KILL, repeatedly until none is left."""

import contextlib
import signal
import time
from collections.abc import Callable

from .. import processes
from ..processes import Process

_TERM_SECONDS = 2.0
_KILL_SECONDS = 8.0
_POLL_SECONDS = 0.05


def sweep(
    find: Callable[[], list[Process]],
    on_wait: Callable[[], None] = lambda: None,
    term_seconds: float = _TERM_SECONDS,
    kill_seconds: float = _KILL_SECONDS,
) -> list[Process]:
    """End all processes that ``find`` returns, calling it repeatedly, because a process may start others until it dies.

    Args:
        find: lists the living processes to end.
        on_wait: called between polls (the launcher reaps its children there).
        term_seconds: seconds between TERM and KILL; 0 starts with KILL.
        kill_seconds: seconds to continue after that.

    Returns:
        Processes still alive, usually in uninterruptible sleep (state D).
    """
    begun = time.monotonic()
    reported: set[tuple[int, int]] = set()
    while True:
        left = find()
        elapsed = time.monotonic() - begun
        if not left or elapsed > term_seconds + kill_seconds:
            return left
        for process in left:
            with contextlib.suppress(PermissionError):
                if elapsed >= term_seconds:
                    processes.send_signal(process, signal.SIGKILL)
                elif (process.pid, process.start_ticks) not in reported:
                    reported.add((process.pid, process.start_ticks))
                    processes.send_signal(process, signal.SIGTERM)
                    processes.send_signal(process, signal.SIGCONT)
        on_wait()
        time.sleep(_POLL_SECONDS)
