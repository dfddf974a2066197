"""Usual time of a step, the unit of stop proposals, stack captures and time limits."""

from collections import deque
from statistics import median

_STEPS = 9


class Pace:
    """Median time of the last steps: a first step that compiles, or a last one with half a batch, has no effect."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self.usual = 0.0
        """Seconds a step; 0.0 before the first."""

    def note(self, seconds: float) -> None:
        """Record the time of a step."""
        self._seconds.append(seconds)
        self.usual = median(self._seconds)
