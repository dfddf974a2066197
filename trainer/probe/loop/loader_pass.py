"""Batches that a plain loop has fetched and not trained on: a validation, which only its end tells from training.

Where no hook sees the forward, a batch counts as training once it was fetched. If a dataloader comes to its end, or two
batches of it are fetched and then one of another or none, without any backward in between, they were evaluated: their
phases become ``eval``, and their samples and tokens are no step's.

A loop that trains on each batch by itself leaves a batch out if it fetches another one of the same dataloader before
any backward: its forward failed, or its loss was not finite. What was noted of it is no step's either. Some loops fetch
batches ahead, as accelerate does: the first ones of a dataloader are left out by none of them.

A model that is put into evaluation mode after a batch was fetched evaluates it, too, if another of the same dataloader
follows before any backward (ignite fetches first).

Where each backward has one batch, a single one is left out, too: if another pass over the same data begins (the script
has looked at a batch, or stopped at its limit), or if a pass over the data that is trained on goes on or begins (one
batch was evaluated).
"""

from collections.abc import Callable
from typing import Any

from ..phases.marks import BatchesNoted, Notes
from ..phases.tracker import Tracker
from .one_each import OneEach

_ENOUGH = 2
"""So many batches without a backward are no batch of a step with batches of several dataloaders."""
_PHASES = ("data", "forward", "idle")


class LoaderPass:
    """The batches since the last backward, on the training thread alone.

    Args:
        tracker: the phase machine.
        evaluated: called when batches were evaluated, and are out of the notes.
    """

    __slots__ = (
        "_ahead",
        "_before",
        "_count",
        "_data",
        "_delivered",
        "_evaluated",
        "_first",
        "_key",
        "_marks",
        "_notes",
        "_one_each",
        "_since",
        "_sole",
        "_tracker",
    )

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
        """Batches of the first dataloader that were fetched before its first backward, but for one."""
        self._one_each = OneEach()
        self._data = 0
        """The ``id`` of the latest iterator's data set."""
        self._since = 0
        """Batches fetched from any dataloader since the last backward."""
        self._sole = OneEach()
        """As ``_one_each``, with batches of all dataloaders."""

    def fetching(self, again: bool, iterator: Any, trains_on: bool = False) -> None:
        """A batch is asked for.

        Args:
            again: it is of the iterator that the last one was of.
            iterator: the dataloader's iterator.
            trains_on: the latest backward's batch was of the same data set.
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
        """Another batch of the same dataloader is asked for while the model is in evaluation mode."""
        if self._count:
            self._end_evaluation()
            self._count = 0

    def fetched(self, key: int) -> None:
        """A batch was fetched, and is not in the notes yet; ``key`` is that of the dataloader in ``Notes.fetches``."""
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
        """The batch that was fetched last, in evaluation mode, is to be trained on: it is in the notes.

        Args:
            key: that of the dataloader in ``Notes.fetches``.
            first: the mark at which it was asked for.
            before: what was noted of batches before it.
        """
        self._key, self._notes, self._marks = key, self._tracker.notes, self._tracker.marks
        self._count = self._delivered = self._since = 1
        self._first, self._before = first, before

    def trained(self) -> None:
        """A backward begins: what was fetched is trained on."""
        if self._ahead is None and self._count:
            self._ahead = self._count - 1
        self._one_each.trained(self._count)
        self._sole.trained(self._since)
        self._count = self._since = 0

    def exhausted(self) -> None:
        """The dataloader that was asked last has no batch left."""
        self._left(1)

    def finish(self) -> None:
        """The process ends, possibly in the middle of a step that uses several batches."""
        if self._one_each:
            self._left(_ENOUGH)

    def _left(self, least: int) -> None:
        """The latest dataloader is not asked again; ``least`` batches or more without a backward were evaluated."""
        if self._count >= least:
            self._end_evaluation()
        self._count = self._delivered = 0

    def _end_evaluation(self) -> None:
        self._relabel(_PHASES, "eval")
        self._evaluated()

    def _looked_at(self) -> None:
        self._relabel(("forward",), "idle")

    def _relabel(self, phases: tuple[str, ...], name: str) -> None:
        """The batches are no step's; ``phases`` since they were fetched become ``name``."""
        tracker, notes = self._tracker, self._tracker.notes
        if notes is not self._notes or tracker.marks is not self._marks:
            return
        for index in range(self._first, len(tracker.marks)):
            if tracker.marks[index].phase in phases:
                tracker.relabel(index, name)
        notes.restore_batches(self._before)
        notes.fetches.pop(self._key, None)
