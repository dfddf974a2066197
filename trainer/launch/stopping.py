"""The signals that a launcher passes on to its job."""

import signal
import time
from typing import NamedTuple

TO_THE_JOB = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Passed on to the job's process alone, each time; its launcher (torchrun, deepspeed) decides about its children."""
PASSED_ON = (signal.SIGINT, *TO_THE_JOB)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_SECONDS = 0.5
"""timeout(1) and systemd signal every process of a group or service: the same request then comes to the launcher from
them and from the command that started the run."""


class Request(NamedTuple):
    """A signal that came, and when (``time.monotonic``)."""

    number: signal.Signals
    at: float


class Requests:
    """The signals that a launcher has to pass on. ``note`` may be called from a signal handler."""

    def __init__(self) -> None:
        self._waiting: list[Request] = []
        self._last: dict[signal.Signals, float] = {}

    def note(self, number: int) -> None:
        """Record one signal."""
        self._waiting.append(Request(signal.Signals(number), time.monotonic()))

    def drain(self) -> list[signal.Signals]:
        """Return the signals to pass on, in order; two requests to end at the same time count as one."""
        waiting, self._waiting = self._waiting, []
        found: list[signal.Signals] = []
        for number, at in waiting:
            last = self._last.get(number)
            self._last[number] = at
            if number not in _ENDING or last is None or at - last > _SAME_SECONDS:
                found.append(number)
        return found
