"""Batches delivered by dataloaders, until their forward begins; their counted parts are in the host's memory.

Some loops fetch batches ahead: accelerate's loader one, a Trainer all micro-batches of a step and one more. So forwards
use them in the order of their fetches. The first step shows how many remain when the first batch of the next step is
requested; the script has left out any more than that.
"""

from collections import deque
from typing import Any

from ..phases.marks import Notes
from .batch import OnHost, on_host

_MOST = 256
"""Limit of batches kept per dataloader."""


class _Queue:
    """The batches of one dataloader iterator."""

    __slots__ = ("ahead", "batches")

    def __init__(self) -> None:
        self.batches: deque[OnHost] = deque(maxlen=_MOST)
        self.ahead: int | None = None
        """Batches fetched ahead of a step; None: no step has ended yet."""


class FetchedBatches:
    """The fetched batches without a forward; for the training thread alone."""

    def __init__(self) -> None:
        self._queue: _Queue | None = None
        """Queue of the dataloader that was used last."""
        self._notes: Notes | None = None
        self._micro_steps = 0
        """Notes of the step of the latest forward, and its micro-steps before that forward."""

    def add(self, iterator: Any, notes: Notes, found: Any) -> None:
        """Add a batch of a dataloader's iterator; ``notes``: of the unfinished step."""
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
