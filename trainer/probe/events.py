"""Device times: CUDA events recorded at phase boundaries, reused, and read long after, when they have passed."""

from collections import deque
from typing import Any


class CudaEvents:
    """A pool of timing events. ``mark`` is for the training thread, the rest for the publisher."""

    def __init__(self) -> None:
        import torch

        self._new: Any = torch.cuda.Event
        self._capturing: Any = torch.cuda.is_current_stream_capturing
        self._free: deque[Any] = deque()

    def mark(self) -> Any:
        """Record an event on the current stream; None inside a CUDA graph capture."""
        if self._capturing():
            return None
        try:
            event = self._free.pop()
        except IndexError:
            event = self._new(enable_timing=True)
        event.record()
        return event

    def recycle(self, event: Any) -> None:
        """Give back an event that nobody will read again."""
        if event is not None:
            self._free.append(event)


def has_passed(event: Any) -> bool:
    """Tell whether the device has come past an event, without waiting; None counts as passed.

    Raises:
        RuntimeError: the device is in an error state.
    """
    return event is None or bool(event.query())


def elapsed_us(start: Any, end: Any) -> int | None:
    """Device time between two passed events in microseconds; None when either is missing or cannot be read."""
    if start is None or end is None:
        return None
    try:
        return max(0, round(start.elapsed_time(end) * 1000))
    except RuntimeError:
        return None
