"""What the training thread hands to the publisher's: never waits, and takes a bounded amount of memory."""

import contextlib
from collections import deque
from typing import Any

from .marks import StepRaw

LIMIT = 20_000
"""Items waiting for the publisher; beyond it they are dropped and counted: a stuck publisher costs no memory."""


class Outbox:
    """Items for the publisher: raw steps, messages, and ``hello`` for the rank to introduce itself."""

    __slots__ = ("folding", "items", "overflowed", "steps_done")

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.folding: deque[StepRaw] = deque()
        """Steps the publisher has taken and not sent yet: the device has not come past their ends."""
        self.overflowed = 0
        """Items that found no room."""
        self.steps_done = 0
        """Steps this process has finished, whatever their numbers."""

    def hand_over(self, item: Any) -> None:
        """Give an item to the publisher."""
        if len(self.items) < LIMIT:
            self.items.append(item)
        else:
            self.overflowed += 1

    def hand_over_step(self, raw: StepRaw) -> None:
        """Give a finished step to the publisher."""
        self.steps_done += 1
        if len(self.items) < LIMIT:  # spelled out: once a step on the training thread
            self.items.append(raw)
        else:
            self.overflowed += 1

    def send_hello(self) -> None:
        """Have the publisher introduce this rank, anew if it has already."""
        self.hand_over("hello")

    def unsent_steps(self) -> list[StepRaw]:
        """List the finished steps that nobody has made a message of yet, oldest first; any thread."""
        for _ in range(5):
            with contextlib.suppress(RuntimeError):  # the publisher took one meanwhile
                return [*self.folding, *(item for item in self.items if isinstance(item, StepRaw))]
        return []
