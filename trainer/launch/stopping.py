"""The signals that a launcher forwards to its job."""

import signal
import time

TO_THE_JOB = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Forwarded to the job's process only; its launcher (torchrun, deepspeed) decides what its children receive."""
PASSED_ON = (signal.SIGINT, *TO_THE_JOB)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_SECONDS = 0.5
"""Window in which equal signals count as one. timeout(1) and systemd signal every process of a group or service, so a
request reaches the launcher both directly and through the command that started the run."""


class Requests:
    """Signals waiting to be forwarded. ``note`` may be called from a signal handler."""

    def __init__(self) -> None:
        self._waiting: list[tuple[signal.Signals, float]] = []
        self._last: dict[signal.Signals, float] = {}

    def note(self, number: int) -> None:
        """Record one signal."""
        self._waiting.append((signal.Signals(number), time.monotonic()))

    def drain(self) -> list[signal.Signals]:
        """Return the signals to forward, in order; simultaneous requests to end count as one.

        Several SIGTERM or SIGHUP that wait here are one request, however far apart this process took them. A second
        SIGINT is another request, for a faster end.
        """
        waiting, self._waiting = self._waiting, []
        found: list[signal.Signals] = []
        for number, at in waiting:
            last = self._last.get(number)
            self._last[number] = at
            same = last is not None and at - last <= _SAME_SECONDS
            if number not in _ENDING or not (same or (number != signal.SIGINT and number in found)):
                found.append(number)
        return found
