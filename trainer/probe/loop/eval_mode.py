"""An evaluation from ``model.eval()`` to ``model.train()``, in loops of the script itself."""

from typing import Any

from ..phases.forwards import Forwards
from ..phases.marks import BatchesNoted, Notes
from ..phases.tracker import Tracker
from ..rank.trained import Trained
from ..values import batch
from .phases import Phases
from .state import LoopState


class EvalMode:
    """Whether the phase is ``eval`` because of the model's mode; for the training thread alone.

    Args:
        tracker: the phase machine.
        phases: moves between its phases.
        forwards: knows which models are trained.
        trained: the engine, whose optimizer may hold other parameters than the model.
        state: state of the training loop.
    """

    def __init__(
        self, tracker: Tracker, phases: Phases, forwards: Forwards, trained: Trained, state: LoopState
    ) -> None:
        self._tracker = tracker
        self._phases = phases
        self._forwards = forwards
        self._trained = trained
        self._state = state
        self._is_on = False
        self._back_to = "idle"
        self._notes: Notes | None = None
        self._before = BatchesNoted()
        """Notes of the step in which it began, and what they had of batches."""
        self._first: list[int] = []
        """The marks at which a batch was asked for and fetched that may be the first of the training again."""

    def __bool__(self) -> bool:
        return self._is_on and self._tracker.phase == "eval"

    def begin(self, model: Any) -> bool:
        """A module was put into evaluation mode; return whether an evaluation begins.

        That is so for a whole trained model between two steps, or between a batch and its forward. A loop may also
        train in that mode: then the backward will tell.
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
        """The batch fetched before the evaluation began is evaluated as well; it has been removed from the notes."""
        if self and self._tracker.notes is self._notes:
            self._back_to, self._before = "idle", self._tracker.notes.batches()

    def fetching(self, may_train: bool) -> None:
        """A batch is asked for; ``may_train``: it is the first of another pass over the data that is trained on."""
        self._first = []
        if may_train:
            self._note_mark()

    def fetched(self) -> None:
        """A batch was fetched."""
        if self._first:
            self._note_mark()

    def note(self, found: Any, fetched: batch.OnHost | None, later: bool) -> None:
        """Note a batch, which is the step's if a backward follows, and the only one."""
        notes = self._tracker.notes
        if notes is self._notes and not self._state.forward_by:
            notes.restore_batches(self._before)
            batch.note(notes, found, False, later, fetched)

    def end_after_fetch(self) -> tuple[int, BatchesNoted] | None:
        """The model is put into training mode again after the batch that may be the first of the training.

        Returns:
            The mark at which that batch was asked for, and what was noted of batches before; None: there is no such
            batch, and the evaluation goes on.
        """
        first, self._first = self._first, []
        if len(first) < 2 or not self or self._tracker.notes is not self._notes:
            return None
        self._is_on = False
        self._forwards.settle(training=False)
        self._tracker.relabel(first[0], "data")
        self._tracker.relabel(first[1], "data" if self._state.forward_by else "forward")
        return first[0], self._before

    def end(self, trains: bool = True) -> bool:
        """Return whether an evaluation ends; ``trains``: what it interrupted in the training goes on."""
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
        """A backward begins, so the script trains in that mode; return whether it was an evaluation until now."""
        was_on, self._is_on = bool(self), False
        return was_on

    def _note_mark(self) -> None:
        self._tracker.begin("eval")
        self._first.append(len(self._tracker.marks) - 1)
