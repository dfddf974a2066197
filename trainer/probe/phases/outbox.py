"""Queue from the training thread to the publisher: never waits, and uses a bounded amount of memory."""

import contextlib
from collections import deque
from typing import Any

from .marks import StepRaw

LIMIT = 20_000
"""Limit of queued items; further ones are dropped and counted, so that a stuck publisher costs no memory."""


class Outbox:
    """Items for the publisher: raw steps, messages, and ``hello`` for the rank to introduce itself."""

    __slots__ = ("items", "overflowed", "pending", "steps_done")

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.pending: deque[StepRaw] = deque()
        """Steps that the publisher has received and not sent: the device has not passed their ends."""
        self.overflowed = 0
        """Items dropped because the queue was full."""
        self.steps_done = 0
        """Number of steps this process has finished, independent of their numbering."""

    def hand_over(self, item: Any) -> None:
        """Queue an item for the publisher."""
        if len(self.items) < LIMIT:
            self.items.append(item)
        else:
            self.overflowed += 1

    def hand_over_step(self, raw: StepRaw) -> None:
        """Queue a finished step for the publisher."""
        self.steps_done += 1
        if len(self.items) < LIMIT:  # not by ``hand_over``: runs once a step on the training thread
            self.items.append(raw)
        else:
            self.overflowed += 1

    def send_hello(self) -> None:
        """Make the publisher send this rank's hello again."""
        self.hand_over("hello")

    def unsent_steps(self) -> list[StepRaw]:
        """Return the finished steps without a message yet, oldest first; any thread."""
        for _ in range(5):
            with contextlib.suppress(RuntimeError):  # the publisher removed one meanwhile
                return [*self.pending, *(item for item in self.items if isinstance(item, StepRaw))]
        return []
