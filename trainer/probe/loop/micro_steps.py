"""Follows micro-steps: the forward of a batch, and the backward of its loss."""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import torch

from ..device import cuda
from ..guard import guarded
from ..phases.tracker import BatchesNoted, Notes
from ..rank.model import dtype_name
from ..values import batch
from ..values.signs import gradient_of, has_lost_weights
from .loading import Loading
from .state import Loop, OneEach


class MicroSteps:
    """Follows micro-steps, on the training thread alone."""

    def __init__(self, loop: Loop, loading: Loading, saw_forward: Callable[[str], None]) -> None:
        self.guard, self._device, self._trained = loop.rank.guard, loop.rank.device, loop.trained
        self._tracker, self._phases = loop.tracker, loop.phases
        self._forwards, self._state = loop.forwards, loop.state
        self._loading, self._saw_forward = loading, saw_forward
        self.unscaled: tuple[int, Any] | None = None
        """The scaled loss's id and the loss before its scaling, until the backward."""
        self.overwrites = False
        """Whether the script overwrites losses after their backward."""
        self._watched: list[cuda.Kept] = []
        """Losses of the latest judged backward."""
        self._seen_forward = False
        self._before: tuple[Notes, int, int] | None = None
        """During a backward: the step's notes, and their counts of micro-steps and losses before it."""
        self._begun: tuple[Any, Notes, BatchesNoted] | None = None
        """From a forward to its backward: the id of its model, the step's notes, and their batches before it."""
        self._undecided: tuple[Notes, tuple[Any, ...], dict[str, Any]] | None = None
        """The step's notes and the batch of a forward that counts as evaluation unless a backward follows."""
        self._forwards_begun = 0
        """Forwards of that model in this step that had no backward: with a pipeline, several are under way."""
        self._counted_in: Notes | None = None
        self._is_finite = True
        """Whether the latest loss was finite, where it is known at once."""
        self._is_reported = False
        """Whether a forward was reported since the last backward."""
        self._is_apart = True
        """Whether no forward since the latest backward was one of a wrapper that reduces its gradients."""
        self._one_each = OneEach()
        self._trained_on = Notes(), BatchesNoted()
        """Notes of the latest backward's step, and their batches at its end."""

    def begin(self) -> None:
        """Forget how an earlier training combined forwards and backwards."""
        self._begun, self._forwards_begun, self._is_reported, self._one_each = None, 0, False, OneEach()
        self._seen_forward = False

    @guarded
    def forwarding(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the start of a model's forward; without a model a framework has reported that a micro-step begins."""
        tracker, state = self._tracker, self._state
        self._is_reported = True
        if state.calls_module:
            state.calls_module = False
            self._forget_untrained()
        if module is None:
            self._is_apart = False
            self._forwards.settle(training=True)
        else:
            self._phases.check_device()
            if not self._seen_forward:
                self._see_forward()
            before = tracker.phase
            kind = self._forwards.judge(module)
            if kind == "eval" and before in ("data", "forward"):
                self._loading.note_evaluated()
            is_open = kind == "eval" and torch.is_grad_enabled()
            self._undecided = (tracker.notes, args, kwargs) if is_open else None
            if kind != "train":
                return
            self._is_apart = getattr(module, "require_backward_grad_sync", True) is False
        self._phases.enter("forward")
        notes = tracker.notes
        if state.evaluations > 1 or notes.discarded:
            return
        self._leave_out(id(module))
        self.note_batch(args, kwargs)

    def note_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the batch of a forward of the training."""
        notes, fetched, later = self._tracker.notes, self._loading.take(), self._device.events is not None
        batch.note(notes, (args, kwargs), True, later, fetched, self._trained.shifts_labels)
        if self._state.normalised_over_ranks:
            notes.labels = []

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
    def going_backward(self, losses: Sequence[Any], scaled: bool = False) -> bool:
        """Record the start of a backward from the losses of one micro-batch; return whether it is an outermost one.

        ``scaled``: the losses are known to add up to the step's although an engine updates.
        """
        tracker, state = self._tracker, self._state
        if state.in_backward:
            return False
        self._begin_backward()
        notes = tracker.notes
        if notes.discarded:
            notes.repeats += 1
            return True
        if state.evaluations > 1:
            return True
        self.note_losses(losses, scaled)
        return True

    def note_losses(self, losses: Sequence[Any], scaled: bool) -> None:
        """Note a micro-step and its losses."""
        notes, state = self._tracker.notes, self._state
        notes.micro_steps += 1
        notes.apart += self._is_apart
        self._is_apart = True
        notes.sum_losses, notes.added_ranks = state.sum_losses or scaled, state.added_ranks
        if not self.overwrites:
            self.overwrites = any(each.is_overwritten() for each in self._watched)
            on_device = [loss for loss in losses if type(loss) is torch.Tensor and loss.is_cuda]
            self._watched = [cuda.Kept(loss) for loss in on_device if cuda.can_be_kept(loss)]
        notes.losses += self.fetch_losses(losses)

    def fetch_losses(self, losses: Sequence[Any], scalar: Callable[[Any], Any] | None = None) -> list[Any]:
        """Return the losses before their scaling, on their way from the device; ``scalar`` keeps one there."""
        if len(losses) == 1 and self.unscaled is None:  # the usual case, with as few functions as can be
            loss = losses[0]
            if type(loss) is torch.Tensor and loss.is_cuda and loss.numel() == 1:
                return [cuda.fetch_scalar(loss) if scalar is None else scalar(loss)]
        if self.unscaled is not None:
            unscaled, self.unscaled = self.unscaled, None
            losses = [unscaled[1] if unscaled[0] == id(loss) else loss for loss in losses]
        return [self._fetch(loss, scalar) for loss in losses]

    def _fetch(self, loss: Any, scalar: Callable[[Any], Any] | None) -> Any:
        """Begin to fetch a loss; where it is known at once, and the first that is not finite, look at the weights."""
        value = cuda.fetch_values(loss, scalar)
        if type(value) is float and isfinite(value) is not self._is_finite:
            self._is_finite = not self._is_finite
            if not self._is_finite:
                self._tracker.notes.weights_lost = has_lost_weights(self._trained)
        return value

    @guarded
    def went_backward(self) -> None:
        """Record the end of an outermost backward."""
        state, notes = self._state, self._tracker.notes
        state.in_backward, self._before = False, None
        self._trained_on = notes, notes.batches()
        if notes.zeroed:
            notes.gradient = gradient_of(self._trained.primary())
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
            notes.micro_steps, losses = before[1:]
            del notes.losses[losses:]
            self._forget_untrained()
        self._before = None

    @guarded
    def note_scaling(self, scaled: Any, original: Any) -> None:
        """Record that a loss was multiplied by a loss scale: the backward of ``scaled`` is that of ``original``."""
        self.unscaled = id(scaled), original

    @guarded
    def trained_micro_step(self, loss: Any) -> None:
        """Record the normalised loss of a micro-step that a Trainer's ``training_step`` returned."""
        self._tracker.notes.trainer_losses.append(cuda.fetch_values(loss))

    def _begin_backward(self) -> None:
        tracker, state, notes = self._tracker, self._state, self._tracker.notes
        state.in_backward = True
        is_unreported = not self._is_reported and not self._forwards_begun and state.forward_by != "parallel"
        self._one_each.trained(self._forwards_begun)
        self._begun, self._forwards_begun = None, max(0, self._forwards_begun - 1)
        self._before = notes, notes.micro_steps, len(notes.losses)
        undecided, self._undecided = self._undecided, None
        if undecided is not None and undecided[0] is notes:
            self.note_batch(*undecided[1:])
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
        trained, batches = self._trained_on
        notes = self._tracker.notes
        notes.restore_batches(batches if trained is notes else BatchesNoted())

    def _see_forward(self) -> None:
        """Record once whether autocast computes the forward, and its data type."""
        self._seen_forward = True
        kind = self._device.info.kind
        enabled = torch.is_autocast_enabled(kind)
        self._saw_forward(dtype_name(torch.get_autocast_dtype(kind)) if enabled else "")
