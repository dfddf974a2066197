"""Detects an evaluation from ``model.eval()`` to ``model.train()`` in the script's own loops."""

from typing import Any

from ..phases.marks import BatchesNoted, Mark, Notes
from ..values import batch
from .state import Loop


class EvalMode:
    """Whether the phase is ``eval`` because of the model's mode; for the training thread alone."""

    def __init__(self, loop: Loop) -> None:
        self._tracker = loop.tracker
        self._phases = loop.phases
        self._forwards = loop.forwards
        self._trained = loop.trained
        self._state = loop.state
        self._is_on = False
        self._back_to = "idle"
        self._notes: Notes | None = None
        self._before = BatchesNoted()
        """Notes of the step in which the evaluation began, and the batches in them at that time."""
        self._first: list[int] = []
        """The marks at which a batch was asked for and fetched that may be the first of the training again."""
        self._marks: list[Mark] = []
        """The tracker's list with these marks."""

    def __bool__(self) -> bool:
        return self._is_on and self._tracker.phase == "eval"

    def begin(self, model: Any) -> bool:
        """Handle a module's switch to evaluation mode; return whether an evaluation begins.

        It does for a whole trained model between two steps, or between a batch and its forward. A loop may also train
        in that mode: a backward shows that.
        """
        tracker, state = self._tracker, self._state
        if tracker.depth or state.forward_by == "trainer":
            return False
        is_fetched = tracker.phase == "forward" and not state.forward_by
        if not (is_fetched or tracker.phase == "idle"):
            return False
        if model is not self._trained.engine() and not self._forwards.is_whole(model):
            return False
        self._is_on, self._back_to = True, tracker.phase
        self._notes, self._before = tracker.notes, tracker.notes.batches()
        self._phases.enter("eval")
        return True

    def began_before_batch(self) -> None:
        """Count the batch fetched before the evaluation as evaluated; it has been removed from the notes."""
        if self and self._tracker.notes is self._notes:
            self._back_to, self._before = "idle", self._tracker.notes.batches()

    def fetching(self, may_train: bool) -> None:
        """Handle a request for a batch; ``may_train``: it is the first of another pass over the training data."""
        self._first = []
        if may_train:
            self._note_mark()

    def fetched(self) -> None:
        """Handle the delivery of a batch."""
        if self._first:
            self._note_mark()

    def note(self, found: Any, fetched: batch.OnHost | None, later: bool) -> None:
        """Note a batch in place of earlier ones: if a backward follows, it is the step's only batch."""
        notes = self._tracker.notes
        if notes is self._notes and not self._state.forward_by:
            notes.restore_batches(self._before)
            batch.note(notes, found, False, later, fetched)

    def end_after_fetch(self) -> tuple[int, BatchesNoted] | None:
        """End the evaluation before the batch that may be the first of the training; the model trains again.

        Returns:
            The mark of the request for that batch, and the batches noted before it; None: there is no such batch, and
            the evaluation continues.
        """
        first, self._first = self._first, []
        if len(first) < 2 or not self or self._tracker.notes is not self._notes:
            return None
        if self._tracker.marks is not self._marks:
            return None
        self._is_on = False
        self._forwards.settle(training=False)
        self._tracker.relabel(first[0], "data")
        self._tracker.relabel(first[1], "data" if self._state.forward_by else "forward")
        return first[0], self._before

    def end(self, trains: bool = True) -> bool:
        """End the evaluation; return whether there was one. ``trains``: the interrupted training continues."""
        ends = bool(self)
        self._is_on, self._first = False, []
        if ends:
            self._forwards.settle(training=False)
            notes = self._tracker.notes
            if notes is self._notes:
                notes.restore_batches(self._before)
            self._phases.interrupt(self._back_to if trains else "idle")
        return ends

    def going_backward(self) -> bool:
        """Handle a backward: the script trains in that mode. Return whether it was an evaluation until now."""
        was_on, self._is_on = bool(self), False
        return was_on

    def _note_mark(self) -> None:
        self._tracker.begin("eval")
        if self._tracker.marks is not self._marks:
            self._marks, self._first = self._tracker.marks, []
        self._first.append(len(self._marks) - 1)
