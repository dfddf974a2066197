"""State of the training loop, and what its parts share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..guard import guarded, nothing
from ..phases.forwards import Forwards
from ..phases.tracker import BatchesNoted, Mark, Notes, Outbox, Tracker
from ..rank.context import RankContext
from ..rank.model import Trained
from ..values import batch


class Phases:
    """Moves from phase to phase, and detects meanwhile the script's device; for the training thread alone."""

    def __init__(self, rank: RankContext, tracker: Tracker, outbox: Outbox) -> None:
        self.guard = rank.guard
        self.enter: Callable[[str], None] = self._enter_unsettled
        """Moves to a phase; the tracker's own method once the device is settled."""
        self.met_cuda: Callable[[], None] = nothing
        self.leave: Callable[[], None] = nothing
        """Called before something moves the phase that no step is followed by (``Regular.leave``)."""
        self._device, self._tracker, self._outbox = rank.device, tracker, outbox

    def interrupt(self, phase: str) -> None:
        """Move to a phase from one that may have begun only just now."""
        self._settle_device()
        self._tracker.interrupt(phase)

    @guarded
    def open(self, phase: str) -> str:
        """Begin an explicit phase; the result, None after an error, goes to ``close``."""
        self.leave()
        self._settle_device()
        return self._tracker.open_scope(phase)

    @guarded
    def close(self, before: str) -> None:
        """End an explicit phase."""
        self._tracker.close_scope(before)

    @guarded
    def check_device(self) -> None:
        """Check whether the script has CUDA running, unless the device is settled."""
        self._settle_device()

    def _settle_device(self) -> None:
        device = self._device
        if not device.settled and device.settle(self._note_script_reset):
            self._tracker.switch(device.memory, device.mark_event, device.blank)
            self.met_cuda()
            self._outbox.send_hello()

    def _enter_unsettled(self, phase: str) -> None:
        if self._device.settled:
            self.enter = self._tracker.enter
        self._settle_device()
        self._tracker.enter(phase)

    def _note_script_reset(self, stats: Any) -> None:
        guard = self.guard
        if guard.enabled and guard.is_training_thread():
            self.leave()
            self._tracker.note_reset(stats)


class LoopState:
    """Flags of the training thread; hooks, micro-steps and updates read and write them."""

    def __init__(self) -> None:
        self.begin()
        self.in_forward = False
        """A forward that a hook has seen is under way; forwards of modules inside it are parts of it."""
        self.in_backward = False
        self.in_update = False
        self.closures = 0
        self.evaluations = 0
        self.rehearsing = False
        self.making_engine = False
        """A DeepSpeed engine is being made; some optimizers step on zero gradients meanwhile."""

    def begin(self) -> None:
        """Set what is learned of a training: another one may be driven otherwise."""
        self.engine_steps = False
        """A DeepSpeed engine makes the updates, so a bare optimizer's step is a part of one."""
        self.forward_by = ""
        """Reporter of the forward's begin (``engine``, ``trainer``, ``parallel``), so that ``data`` lasts until
        then; empty: none does, and the forward is the time between a batch and its backward.
        """
        self.calls_module = False
        """The script calls the module inside its engine, so that no hook reports the forward."""
        self.sum_losses = False
        """The script is known to divide its micro-steps' losses itself."""
        self.normalised_over_ranks = False
        """The loss is divided by the label tokens of all ranks, so ranks count alike in its mean."""
        self.added_ranks = 1.0
        """Ranks whose gradients are added up without a division; their losses add up too. 1: it is their mean."""


@dataclass(frozen=True, slots=True)
class Loop:
    """What the parts that follow the training thread share."""

    rank: RankContext
    trained: Trained
    """Engine, model and optimizer that the rank trains."""
    tracker: Tracker
    phases: Phases
    forwards: Forwards
    state: LoopState = field(default_factory=LoopState)


class EvalMode:
    """Detects an evaluation from ``model.eval()`` to ``model.train()`` in the script's own loops.

    True while the phase is ``eval`` because of the model's mode; for the training thread alone.
    """

    def __init__(self, loop: Loop) -> None:
        self._tracker, self._phases = loop.tracker, loop.phases
        self._forwards, self._trained, self._state = loop.forwards, loop.trained, loop.state
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

    def fetched(self, found: Any, fetched: batch.OnHost | None, later: bool) -> None:
        """Note a delivered batch in place of earlier ones: if a backward follows, it is the step's only batch."""
        if self._first:
            self._note_mark()
        notes = self._tracker.notes
        if notes is self._notes and not self._state.forward_by:
            notes.restore_batches(self._before)
            batch.note(notes, found, False, later, fetched, self._trained.shifts_labels)

    def end_after_fetch(self) -> tuple[int, BatchesNoted] | None:
        """End the evaluation before the batch that may be the first of the training; the model trains again.

        Return the mark of the request for that batch, and the batches noted before it; None: there is no such batch,
        and the evaluation continues.
        """
        first, self._first = self._first, []
        same_step = self._tracker.notes is self._notes and self._tracker.marks is self._marks
        if len(first) < 2 or not self or not same_step:
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


class OneEach:
    """Counts backwards after one batch and after several; true while most followed one batch."""

    def __init__(self) -> None:
        self._one = self._several = 0

    def __bool__(self) -> bool:
        return self._one > self._several

    @property
    def known(self) -> bool:
        """Whether any backward was counted."""
        return bool(self._one or self._several)

    def trained(self, batches: int) -> None:
        """Count a backward, the first one after ``batches`` batches."""
        if batches == 1:
            self._one += 1
        elif batches:
            self._several += 1
