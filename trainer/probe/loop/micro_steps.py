"""Follows micro-steps: the forward of a batch, and the backward of its loss."""

import sys
from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any

import torch

from ..device import device_values
from ..guard import guarded
from ..phases.forwards import Forwards
from ..phases.marks import BatchesNoted, Notes
from ..phases.outbox import Outbox
from ..phases.rounds import LIBRARIES, call_site, went_back
from ..phases.tracker import Tracker
from ..phases.updaters import Updaters
from ..rank.context import RankContext
from ..rank.hello import Introduction
from ..rank.model import dtype_name
from ..rank.trained import Trained
from ..values import batch
from ..values.losses import LossNotes
from .loading import Loading
from .one_each import OneEach
from .phases import Phases
from .state import LoopState


class MicroSteps:
    """Follows micro-steps, on the training thread alone.

    Args:
        rank: this rank.
        introduction: receives the data type in which autocast computes the forward.
        trained: engine, model and optimizer that the rank trains.
        outbox: receives another hello once a forward was seen.
        tracker: the phase machine.
        phases: moves between its phases.
        forwards: judges whether a forward is training.
        loading: follows the dataloaders.
        updaters: the engines and optimizers that update.
        state: state of the training loop.
    """

    def __init__(
        self,
        rank: RankContext,
        introduction: Introduction,
        trained: Trained,
        outbox: Outbox,
        tracker: Tracker,
        phases: Phases,
        forwards: Forwards,
        loading: Loading,
        updaters: Updaters,
        state: LoopState,
    ) -> None:
        self.guard = rank.guard
        self._device = rank.device
        self._introduction = introduction
        self._trained = trained
        self._outbox = outbox
        self._tracker = tracker
        self._phases = phases
        self._forwards = forwards
        self._loading = loading
        self._updaters = updaters
        self._state = state
        self._loss_notes = LossNotes()
        self._divisors: set[int] = set()
        """Numbers of micro-batches that the script has divided losses by; for the publisher thread."""
        self._unscaled: tuple[int, Any] | None = None
        self._seen_forward = False
        self._before: tuple[Notes, int, int, int] | None = None
        """During a backward: the step's notes, and their counts of micro-steps and both kinds of losses before it."""
        self._begun: tuple[Any, Notes, BatchesNoted] | None = None
        """From a forward to its backward: the id of its model, the step's notes, and their batches before it."""
        self._forwards_begun = 0
        """Forwards of that model in this step that had no backward: with a pipeline, several are under way."""
        self._counted_in: Notes | None = None
        """The notes of that step."""
        self._is_reported = False
        """Whether a forward was reported since the last backward."""
        self._one_each = OneEach()
        self._trained_on = Notes(), BatchesNoted()
        """Notes of the latest backward's step, and their batches at its end."""

    @guarded
    def forwarding(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the start of a model's forward.

        Args:
            module: the model, in its wrappers; None: a framework has reported that a micro-step begins.
            args: positional arguments of the forward.
            kwargs: its keyword arguments.
        """
        tracker, state = self._tracker, self._state
        self._is_reported = True
        if state.calls_module:
            state.calls_module = False
            self._forget_untrained()
        if module is None:
            self._forwards.settle(training=True)
        else:
            if not self._device.settled:
                self._phases.settle()
            if not self._seen_forward:
                self._see_forward()
            before = tracker.phase
            knew = self._forwards.recomputes
            kind = self._forwards.judge(module)
            if self._forwards.recomputes and not knew:
                self._loading.train_on_evaluated()
            if kind == "eval" and before in ("data", "forward"):
                self._loading.note_evaluated()
            if kind != "train":
                return
        self._phases.enter("forward")
        notes = tracker.notes
        if state.evaluations > 1 or self._is_same_batch():
            return
        start = perf_counter_ns()
        fetched = self._loading.take()
        self._leave_out(id(module))
        batch.note(notes, (args, kwargs), True, self._device.events is not None, fetched, self._trained.shifts_labels)
        if state.normalised_over_ranks:
            notes.labels = []
        tracker.cost_ns += perf_counter_ns() - start

    @guarded
    def failed_forward(self) -> None:
        """Remove the batch of a forward that raised; the script may continue with the next one."""
        begun, self._begun = self._begun, None
        self._forwards_begun = max(0, self._forwards_begun - 1)
        if begun is not None and begun[1] is self._tracker.notes:
            begun[1].restore_batches(begun[2])

    @guarded
    def expect_forward(self, by: str) -> None:
        """Expect ``by`` to report each forward from now on; a batch noted at its fetch will be noted there instead."""
        self._state.forward_by = by
        notes = self._tracker.notes
        notes.shape, notes.tokens, notes.samples, notes.padded_tokens = [], [], 0, 0
        notes.labels = []

    @guarded
    def going_backward(self, losses: Sequence[Any], scaled: bool = False, owner: Any = None) -> bool:
        """Record the start of a backward; return whether it is an outermost one.

        Args:
            losses: tensors that it starts from, all of one micro-batch.
            scaled: whether the losses are known to add up to the step's; otherwise their graphs are read.
            owner: the engine whose backward it is.
        """
        tracker, state = self._tracker, self._state
        if state.in_backward:
            return False
        self._begin_backward()
        notes = tracker.notes
        if self._is_same_batch():
            notes.repeats += 1
            return True
        if state.evaluations > 1:
            return True
        start = perf_counter_ns()
        notes.micro_steps += 1
        unscaled, self._unscaled = self._unscaled, None
        loss = losses[0] if losses else None
        original = unscaled[1] if unscaled is not None and unscaled[0] == id(loss) else None
        notes.sum_losses, notes.divisors = state.sum_losses or scaled, self._divisors
        notes.added_ranks = state.added_ranks
        if loss is not None:
            is_divided = notes.sum_losses or owner is not None or (state.engine_steps and self._updaters.is_sole)
            self._loss_notes.note(notes, loss, owner, original, is_divided)
            for place, other in enumerate(losses[1:], 1):
                self._loss_notes.note(notes, other, owner, None, is_divided, place)
        tracker.cost_ns += perf_counter_ns() - start
        return True

    @guarded
    def taking_gradients(self, loss: Any) -> bool:
        """Record the start of ``autograd.grad`` of a loss by parameters; return whether no backward is under way."""
        state = self._state
        if state.in_backward:
            return False
        self._begin_backward()
        if state.evaluations <= 1 and not self._is_same_batch():
            self._loss_notes.note_gradients(self._tracker.notes, loss)
        return True

    @guarded
    def went_backward(self) -> None:
        """Record the end of an outermost backward."""
        state, notes = self._state, self._tracker.notes
        state.in_backward, self._before = False, None
        self._trained_on = notes, notes.batches()
        if self._tracker.phase == "backward":
            self._phases.enter("optimizer" if state.in_update and not state.closures else "idle")

    @guarded
    def failed_backward(self) -> None:
        """Record that a backward raised; the phase stays, for the report of the failure.

        Its loss belongs to no step; the script may continue with the next batch.
        """
        self._state.in_backward = False
        notes, before = self._tracker.notes, self._before
        if before is not None and before[0] is notes:
            notes.micro_steps, losses, gradients = before[1:]
            del notes.losses[losses:], notes.gradient_losses[gradients:]
            self._forget_untrained()
        self._before = None

    @guarded
    def note_scaling(self, scaled: Any, original: Any) -> None:
        """Record that a loss was multiplied by a loss scale: the backward of ``scaled`` is that of ``original``."""
        self._unscaled = (id(scaled), original)

    @guarded
    def trained_micro_step(self, loss: Any) -> None:
        """Record the normalised loss of a micro-step that a Trainer's ``training_step`` returned."""
        self._tracker.notes.trainer_losses.append(device_values.fetch(loss))

    def _begin_backward(self) -> None:
        tracker, state, notes = self._tracker, self._state, self._tracker.notes
        state.in_backward = True
        is_unreported = not self._is_reported and not self._forwards_begun and state.forward_by != "parallel"
        self._one_each.trained(self._forwards_begun)
        self._begun, self._forwards_begun = None, max(0, self._forwards_begun - 1)
        self._before = notes, notes.micro_steps, len(notes.losses), len(notes.gradient_losses)
        is_forward = self._loading.going_backward() or tracker.phase == "idle"
        if (is_unreported or not state.forward_by) and not tracker.depth and is_forward:
            tracker.rename("forward")
        self._is_reported = False
        # The start of that forward is not known; of later ones it will be.
        state.calls_module |= is_unreported and bool(state.forward_by) and tracker.phase == "data"
        self._phases.enter("backward")

    def _leave_out(self, model: int) -> None:
        """Begin a forward of ``model``; discard the batch of its previous one if that batch should have had a backward.

        It should in loops where most batches have a backward of their own.
        """
        notes = self._tracker.notes
        if self._counted_in is not notes:
            self._counted_in, self._forwards_begun = notes, 0
        again = self._begun is not None and self._begun[0] == model and self._begun[1] is notes
        if self._begun is not None and again and self._one_each:
            notes.restore_batches(self._begun[2])
        elif again or self._begun is None or self._begun[1] is not notes:
            self._forwards_begun += 1
        self._begun = model, notes, notes.batches()

    def _forget_untrained(self) -> None:
        """Remove the batches noted since the latest backward."""
        trained, batches = self._trained_on
        notes = self._tracker.notes
        notes.restore_batches(batches if trained is notes else BatchesNoted())

    def _is_same_batch(self) -> bool:
        """Return whether the batch whose gradients were set to zero is used again: no loop has advanced since."""
        notes = self._tracker.notes
        if notes.discarded is None:
            return False
        if not went_back(notes.discarded, call_site(sys._getframe(2), LIBRARIES)):
            return True
        notes.drop_batch()
        if self._before is not None:
            self._before = notes, 0, 0, len(notes.gradient_losses)
        return False

    def _see_forward(self) -> None:
        """Record once whether autocast computes the forward, and its data type."""
        self._seen_forward = True
        kind = self._device.info.kind
        enabled = torch.is_autocast_enabled(kind)
        self._introduction.forward_dtype = dtype_name(torch.get_autocast_dtype(kind)) if enabled else ""
        self._outbox.send_hello()
