"""Device times: CUDA events recorded at phase boundaries, reused, and read long after, when they have passed."""

from collections import deque
from typing import Any

from . import cuda_graphs


class CudaEvents:
    """A pool of timing events of one device. ``mark`` is for the training thread, the rest for the publisher."""

    def __init__(self, device: int) -> None:
        import torch

        core: Any = torch._C
        cuda_graphs.install(torch)
        self._device = device
        self._new: Any = torch.cuda.Event
        self._record: Any = core._CudaEventBase.record
        self._raw_stream: Any = core._cuda_getCurrentRawStream
        self._current_stream: Any = torch.cuda.current_stream
        self._streams: dict[int, Any] = {}
        self._free: deque[Any] = deque()

    def mark(self) -> Any:
        """Record an event on the current stream; None inside a CUDA graph capture."""
        if cuda_graphs.under_way:
            return None
        try:
            event = self._free.pop()
        except IndexError:
            event = self._new(enable_timing=True)
        # Making a Stream object costs more than recording, so the few Stream objects are kept.
        raw = self._raw_stream(self._device)
        stream = self._streams.get(raw)
        if stream is None:
            stream = self._streams[raw] = self._current_stream(self._device)
        self._record(event, stream)
        return event

    def recycle(self, event: Any) -> None:
        """Return an event to the pool once no reader is left."""
        if event is not None:
            self._free.append(event)


def has_passed(event: Any) -> bool:
    """Return whether the device has passed an event, without waiting; None counts as passed.

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
