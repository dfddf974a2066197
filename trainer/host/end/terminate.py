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

    KILL follows TERM after ``term_seconds`` and is repeated for ``kill_seconds``; ``on_wait`` is called between polls.

    Returns:
        Processes still alive, usually in uninterruptible sleep (state D).
    """
    begun = time.monotonic()
    killed_at: float | None = None
    reported: set[tuple[int, int]] = set()
    while True:
        now = time.monotonic()
        left = find()
        if not left or (killed_at is not None and now - killed_at > kill_seconds):
            return left
        if killed_at is None and now - begun >= term_seconds:
            killed_at = now
        for process in left:
            with contextlib.suppress(PermissionError):
                if killed_at is not None:
                    processes.send_signal(process, signal.SIGKILL)
                elif (process.pid, process.start_ticks) not in reported:
                    reported.add((process.pid, process.start_ticks))
                    processes.send_signal(process, signal.SIGTERM)
                    processes.send_signal(process, signal.SIGCONT)
        on_wait()
        time.sleep(_POLL_SECONDS)
