"""Long work on the publisher's thread in slices, so that the training thread never waits long for the interpreter."""

import time

SLICE_NS = 400_000
REST_SECONDS = 0.0002
"""Between two slices: a thread that waits for the lock gets it, where a handover of Python's own takes 5 ms."""


class Pulse:
    """Call it often from a loop; counts the time that was worked."""

    def __init__(self) -> None:
        self._since = time.perf_counter_ns()
        self._worked_ns = 0

    def __call__(self) -> None:
        """Rest, if a slice of work has been done since the last rest."""
        now = time.perf_counter_ns()
        if now - self._since >= SLICE_NS:
            self._worked_ns += now - self._since
            time.sleep(REST_SECONDS)
            self._since = time.perf_counter_ns()

    @property
    def worked_us(self) -> int:
        """Microseconds worked so far, rests not counted."""
        return (self._worked_ns + time.perf_counter_ns() - self._since) // 1000
