"""Detects batches that a plain loop fetched and did not train on; only the end of a validation shows that it was one.

Where no hook sees the forward, a batch counts as training once it was fetched. If a dataloader is exhausted without a
backward, or two of its batches are fetched and the next one is of another dataloader, they were evaluated: their phases
become ``eval``, and their samples and tokens belong to no step.

A loop that trains on each batch by itself leaves a batch out if it fetches another one of the same dataloader before
any backward: its forward failed, or its loss was not finite. That batch belongs to no step either. Some loops fetch
batches ahead, as accelerate does: they leave out none of the first batches of a dataloader.

If the model is put into evaluation mode after a batch was fetched, and another batch of the same dataloader follows
before any backward, both are evaluated (ignite fetches first).

Where each backward has one batch, a single batch may be left out, too: it was only inspected, or the loop stopped at
its limit, if another pass over the same data begins; it was evaluated if a pass over the training data continues or
begins.
"""

from collections.abc import Callable
from typing import Any

from ..phases.marks import BatchesNoted, Notes
from ..phases.tracker import Tracker
from .one_each import OneEach

_ENOUGH = 2
"""From this number of batches without a backward on, they are no part of a step with several dataloaders."""
_PHASES = ("data", "forward", "idle")


class LoaderPass:
    """Follows the batches since the last backward; for the training thread alone."""

    def __init__(self, tracker: Tracker, evaluated: Callable[[], None]) -> None:
        self._tracker = tracker
        self._evaluated = evaluated
        self._count = 0
        """Batches fetched from the latest dataloader since the last backward."""
        self._key = 0
        self._notes: Notes | None = None
        self._marks: Any = None
        self._first = 0
        self._before = BatchesNoted()
        self._delivered = 0
        """Batches that the latest dataloader has delivered."""
        self._ahead: int | None = None
        """Batches that the first dataloader fetched ahead: those before its first backward, less one."""
        self._one_each = OneEach()
        self._data = 0
        """The ``id`` of the latest iterator's data set."""
        self._since = 0
        """Batches fetched from any dataloader since the last backward."""
        self._sole = OneEach()
        """As ``_one_each``, with batches of all dataloaders."""

    def fetching(self, again: bool, iterator: Any, trains_on: bool = False) -> None:
        """Handle a request for a batch; ``again``: of the same iterator as the last one.

        ``trains_on``: the latest backward's batch was of the same data set.
        """
        if again:
            return
        data = id(getattr(iterator, "_dataset", None))
        if self._count == 1 and (self._sole or not self._sole.known):
            if data == self._data:
                self._looked_at()
            elif self._sole and (trains_on or getattr(iterator, "_ftmon_trained", False)):
                self._end_evaluation()
        self._left(_ENOUGH)
        self._data = data

    def evaluating(self) -> None:
        """Handle a request for another batch of the same dataloader while the model is in evaluation mode."""
        if self._count:
            self._end_evaluation()
            self._count = 0

    def fetched(self, key: int) -> None:
        """Handle the delivery of a batch that is not noted yet; ``key``: of the dataloader in ``Notes.fetches``."""
        tracker, notes = self._tracker, self._tracker.notes
        self._delivered += 1
        self._since += 1
        if self._count and notes is self._notes and tracker.marks is self._marks:
            self._count += 1
            if self._one_each and self._delivered > 1 + (self._ahead or 0):
                notes.restore_batches(self._before)
            return
        self._key, self._count, self._notes, self._marks = key, 1, notes, tracker.marks
        self._first = len(tracker.marks) - 1
        self._before = notes.batches()

    def resumed(self, key: int, first: int, before: BatchesNoted) -> None:
        """Train on the batch that was fetched last, in evaluation mode; it is in the notes.

        Args:
            key: of the dataloader in ``Notes.fetches``.
            first: index of the mark of its request.
            before: the batches noted before it.
        """
        self._key, self._notes, self._marks = key, self._tracker.notes, self._tracker.marks
        self._count = self._delivered = self._since = 1
        self._first, self._before = first, before

    def trained(self) -> None:
        """Handle a backward: the fetched batches are trained on."""
        if self._ahead is None and self._count:
            self._ahead = self._count - 1
        self._one_each.trained(self._count)
        self._sole.trained(self._since)
        self._count = self._since = 0

    def exhausted(self) -> None:
        """Handle the end of the dataloader that was used last."""
        self._left(1)

    def finish(self) -> None:
        """Handle the end of the process, possibly in the middle of a step that uses several batches."""
        if self._one_each:
            self._left(_ENOUGH)

    def _left(self, least: int) -> None:
        """Leave the latest dataloader; ``least`` or more of its batches without a backward were evaluated."""
        if self._count >= least:
            self._end_evaluation()
        self._count = self._delivered = 0

    def _end_evaluation(self) -> None:
        self._relabel(_PHASES, "eval")
        self._evaluated()

    def _looked_at(self) -> None:
        self._relabel(("forward",), "idle")

    def _relabel(self, phases: tuple[str, ...], name: str) -> None:
        """Remove the batches from the step's notes, and rename ``phases`` since they were fetched to ``name``."""
        tracker, notes = self._tracker, self._tracker.notes
        if notes is not self._notes or tracker.marks is not self._marks:
            return
        for index in range(self._first, len(tracker.marks)):
            if tracker.marks[index].phase in phases:
                tracker.relabel(index, name)
        notes.restore_batches(self._before)
        notes.fetches.pop(self._key, None)
