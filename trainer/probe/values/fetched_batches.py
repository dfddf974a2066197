"""Batches that dataloaders have delivered, until their forward begins: what is counted of them is in the host's memory.

Some loops ask for batches ahead: accelerate's loader for one, a Trainer for all micro-batches of a step and one. So
forwards take them in the order in which they were fetched. How many are left when the first batch of the next step is
asked for is learnt from the first step; more than that are batches that the script left out.
"""

from collections import deque
from typing import Any

from ..phases.marks import Notes
from .batch import OnHost, on_host

_MOST = 256
"""Batches that are kept of one dataloader."""


class _Queue:
    """The batches of one dataloader iterator."""

    __slots__ = ("ahead", "batches")

    def __init__(self) -> None:
        self.batches: deque[OnHost] = deque(maxlen=_MOST)
        self.ahead: int | None = None
        """Batches fetched ahead of a step; None: no step has ended yet."""


class FetchedBatches:
    """The batches under way, on the training thread alone."""

    def __init__(self) -> None:
        self._queue: _Queue | None = None
        """That of the dataloader that was asked last."""
        self._notes: Notes | None = None
        self._micro_steps = 0
        """Notes of the step whose forwards took batches, and its micro-steps before the last of them."""

    def add(self, iterator: Any, notes: Notes, found: Any) -> None:
        """Add a batch of a dataloader's iterator; ``notes`` are those of the step in the making."""
        queue: _Queue | None = getattr(iterator, "_ftmon_batches", None)
        if queue is None:
            queue = iterator._ftmon_batches = _Queue()
        self._queue = queue
        if self._notes is not None and notes is not self._notes:
            self._notes = None
            if queue.ahead is None:
                queue.ahead = len(queue.batches)
            while len(queue.batches) > queue.ahead:
                queue.batches.popleft()
        queue.batches.append(on_host(found))

    def take(self, notes: Notes) -> OnHost | None:
        """Return the batch whose forward begins; None if none was fetched for it, or it had a forward before."""
        again = notes is self._notes and notes.micro_steps == self._micro_steps
        self._notes, self._micro_steps = notes, notes.micro_steps
        if again:
            return None
        queue = self._queue
        return queue.batches.popleft() if queue is not None and queue.batches else None
