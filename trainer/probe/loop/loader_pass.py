"""Batches that a plain loop has fetched and not trained on: a validation, which only its end tells from training.

Where no hook sees the forward, a batch counts as training once it was fetched. If a dataloader comes to its end, or two
batches of it and then one of another are fetched, without any backward in between, they were evaluated: their phases
become ``eval``, and their samples and tokens are no step's.
"""

from typing import Any

from ..phases.marks import Notes
from ..phases.tracker import Tracker

_ENOUGH = 2
"""So many batches without a backward are no batch of a step with batches of several dataloaders."""
_PHASES = ("data", "forward", "idle")


class LoaderPass:
    """The batches since the last backward, on the training thread alone.

    Args:
        tracker: the phase machine.
    """

    __slots__ = ("_before", "_count", "_first", "_iterator", "_marks", "_notes", "_tracker")

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._iterator = 0
        """The ``id`` of the dataloader's iterator; 0: nothing was fetched since the last backward."""
        self._count = 0
        self._notes: Notes | None = None
        self._marks: Any = None
        self._first = 0
        self._before: tuple[int, int, int, int, list[int]] = (0, 0, 0, 0, [])

    def fetched(self, iterator: int) -> None:
        """A batch of that iterator was fetched, and is not in the notes yet."""
        tracker, notes = self._tracker, self._tracker.notes
        if iterator == self._iterator and notes is self._notes and tracker.marks is self._marks:
            self._count += 1
            return
        self._iterator, self._count, self._notes, self._marks = iterator, 1, notes, tracker.marks
        self._first = len(tracker.marks) - 1
        self._before = (notes.samples, notes.padded_tokens, len(notes.tokens), len(notes.labels), notes.shape)

    def trained(self) -> None:
        """A backward begins: what was fetched is trained on."""
        self._iterator = 0

    def fetching(self, iterator: int) -> None:
        """A batch of that iterator is asked for."""
        if self._iterator and iterator != self._iterator and self._count >= _ENOUGH:
            self._evaluated()

    def exhausted(self) -> None:
        """The dataloader that was asked for a batch has none left."""
        if self._iterator:
            self._evaluated()

    def _evaluated(self) -> None:
        tracker, notes = self._tracker, self._tracker.notes
        if notes is self._notes and tracker.marks is self._marks:
            for index in range(self._first, len(tracker.marks)):
                if tracker.marks[index].phase in _PHASES:
                    tracker.relabel(index, "eval")
            notes.samples, notes.padded_tokens, tokens, labels, notes.shape = self._before
            del notes.tokens[tokens:], notes.labels[labels:]
            notes.fetches.pop(self._iterator, None)
        self._iterator = 0
