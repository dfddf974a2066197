"""Handles signals to a command that follows a run: counts or keeps them, so that none interrupts a fold."""

import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from types import FrameType
from typing import Any

FOR_THE_RUN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ``ftmon run`` forwards to the run."""


class Interrupts:
    """Counts Ctrl-C."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle one signal."""
        self.count += 1


@contextmanager
def counted_interrupts() -> Generator[Interrupts]:
    """Count SIGINT instead of raising KeyboardInterrupt."""
    interrupts = Interrupts()
    before = signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def kept(numbers: Iterable[signal.Signals]) -> Generator["deque[signal.Signals]"]:
    """Keep received signals in a queue; signals ignored at the start (nohup, a background job) stay ignored."""
    waiting: deque[signal.Signals] = deque()
    before: dict[signal.Signals, Any] = {}

    def keep(number: int, _frame: FrameType | None) -> None:
        waiting.append(signal.Signals(number))

    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, keep)
    try:
        yield waiting
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def passed_on(send: Callable[[signal.Signals], object], owned: bool) -> Generator[threading.Event]:
    """Forward the app's signals to a run that this command started; a signal that requests the end sets the event.

    SIGHUP is not forwarded: a lost terminal ends only the app.
    """
    stopped = threading.Event()
    before: dict[signal.Signals, Any] = {}

    def forward(number: int, _frame: FrameType | None) -> None:
        send(signal.Signals(number))
        if number in (signal.SIGINT, signal.SIGTERM):
            stopped.set()

    for number in FOR_THE_RUN if owned else ():
        if number != signal.SIGHUP and signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, forward)
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
