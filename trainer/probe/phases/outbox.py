"""Queue from the training thread to the publisher: never waits, and uses a bounded amount of memory."""

import contextlib
from collections import deque
from typing import Any

from .marks import StepRaw

LIMIT = 20_000
"""Items waiting for the publisher; beyond it they are dropped and counted: a stuck publisher costs no memory."""


class Outbox:
    """Items for the publisher: raw steps, messages, and ``hello`` for the rank to introduce itself."""

    __slots__ = ("items", "overflowed", "pending", "steps_done")

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.pending: deque[StepRaw] = deque()
        """Steps the publisher has received and not sent yet: the device has not passed their ends."""
        self.overflowed = 0
        """Items dropped because the queue was full."""
        self.steps_done = 0
        """Steps this process has finished, whatever their numbers."""

    def hand_over(self, item: Any) -> None:
        """Hand an item to the publisher."""
        if len(self.items) < LIMIT:
            self.items.append(item)
        else:
            self.overflowed += 1

    def hand_over_step(self, raw: StepRaw) -> None:
        """Hand a finished step to the publisher."""
        self.steps_done += 1
        if len(self.items) < LIMIT:  # spelled out: once a step on the training thread
            self.items.append(raw)
        else:
            self.overflowed += 1

    def send_hello(self) -> None:
        """Make the publisher send this rank's hello, again if it has already."""
        self.hand_over("hello")

    def unsent_steps(self) -> list[StepRaw]:
        """List the finished steps without a message yet, oldest first; any thread."""
        for _ in range(5):
            with contextlib.suppress(RuntimeError):  # the publisher removed one meanwhile
                return [*self.pending, *(item for item in self.items if isinstance(item, StepRaw))]
        return []
