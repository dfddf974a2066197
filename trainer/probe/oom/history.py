"""Figures of earlier steps, for the report of a failed allocation; kept by the publisher, a few operations a step."""

import math

from ....protocol.messages.telemetry import Step

STARTS = 64
"""Number of step beginnings kept; they are thinned out evenly, so that they cover all steps since the first."""


class OomHistory:
    """The largest batch, the highest peak so far, and the allocated bytes at the beginning of steps."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.largest_shape: list[int] = []
        self.largest_shape_step = 0
        self._largest = 0
        self._starts: list[int] = []
        self._stride = 1
        self._seen = 0

    def note(self, step: Step) -> None:
        """Record a finished step."""
        self.note_shape(step.batch_shape, step.step)
        peak = step.peak_phase
        if peak is not None:
            self.peak_bytes = max(self.peak_bytes, peak.peak_span.peak)
            if self._seen % self._stride == 0:
                self._add(step.phases[0].allocated.start)
            self._seen += 1

    def note_shape(self, shape: list[int], step: int) -> None:
        """Record the batch of a finished step; a second call changes nothing."""
        size = math.prod(shape) if shape else 0
        if size > self._largest:
            self._largest, self.largest_shape, self.largest_shape_step = size, shape, step

    def starts(self) -> list[int]:
        """Return the bytes allocated at the beginning of steps, oldest first, evenly spaced."""
        return list(self._starts)

    def _add(self, start: int) -> None:
        if len(self._starts) >= STARTS:
            self._starts = self._starts[::2]
            self._stride *= 2
            if self._seen % self._stride:
                return
        self._starts.append(start)
