"""Limits the failures of a main loop, after which its process ends so that another one replaces it."""

_MOST = 100
_SECONDS = 30.0
"""A tick that always fails, four times a second, reaches the limit within a window."""


class Failures:
    """Counts the failures of a main loop per time window."""

    def __init__(self) -> None:
        self._count = 0
        self._since = 0.0

    def too_many(self, now: float) -> bool:
        """Count a failure at ``now`` (``time.monotonic``); return whether its window has more than 100."""
        if now - self._since > _SECONDS:
            self._since, self._count = now, 0
        self._count += 1
        return self._count > _MOST
