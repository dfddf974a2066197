"""Detects waits with a time limit in ``threading`` or ``queue``, as in ``Event.wait(75)`` between attempts."""

import queue
import sys
import threading

from ..frame_locals import frame_locals

_FILES = frozenset((threading.__file__, queue.__file__))


def waits_for_a_time(thread: int) -> bool:
    """Return whether a thread is in a wait of the standard library with a time limit, by its innermost frames."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename in _FILES:
        # Condition.wait, Event.wait, Thread.join, Barrier.wait, Queue.get; a Semaphore's is in Condition.wait.
        limit = frame_locals(frame).get("timeout")
        if isinstance(limit, float | int) and limit > 0:
            return True
        frame = frame.f_back
    return False
