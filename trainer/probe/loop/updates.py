"""Follows updates: an optimizer, an engine or a loss scaler ends or skips a step."""

import weakref
from typing import Any

import torch

from ..device import cuda
from ..guard import guarded
from ..phases.tracker import Notes
from ..phases.updaters import Updaters
from ..rank.context import of_optimizer
from ..rank.model import learning_rate
from ..values.signs import WeightSampler
from .state import Loop


class Updates:
    """Follows updates, on the training thread alone."""

    def __init__(self, loop: Loop, updaters: Updaters) -> None:
        self.guard = loop.rank.guard
        self.updater: Any = None
        self._trained, self._tracker, self._phases = loop.trained, loop.tracker, loop.phases
        self._forwards, self._state, self._updaters = loop.forwards, loop.state, updaters
        self._since = self._depth = 0
        self._weights = WeightSampler(loop.trained)

    @guarded
    def found_optimizer(self, optimizer: Any) -> None:
        """Handle the creation of an optimizer."""
        self._forwards.add_optimizer(optimizer)

    @guarded
    def zeroing(self, owner: Any) -> None:
        """Record that an optimizer or a module sets its gradients to zero, perhaps after a backward."""
        notes = self._tracker.notes
        if not notes.micro_steps or notes.discarded or self._state.engine_steps:
            return
        is_module = isinstance(owner, torch.nn.Module)
        notes.discarded = bool(self._forwards.has_sole(owner) if is_module else self._forwards.is_sole(owner))

    @guarded
    def begin_update(self, optimizer: Any) -> bool:
        """Handle the start of a bare optimizer's step; return whether an update begins, rather than a part of one."""
        state = self._state
        if state.making_engine or (state.in_update and self.updater is not optimizer):
            return False
        if state.in_update and self._since == self._tracker.progress:
            self._depth += 1  # a step method that calls its base class's
            return False
        # If one is under way here, it raised and did not end.
        self._forwards.add_optimizer(optimizer)
        self._depth = state.closures = 0
        if self._trained.primary() is None:
            self._trained.primary = weakref.ref(optimizer)  # a strong reference would keep its states alive
            self._trained.tensor_parallel = of_optimizer(optimizer)
        self.updating(learning_rate([group.get("lr") for group in optimizer.param_groups]), optimizer)
        return True

    @guarded
    def end_update(self, optimizer: Any) -> None:
        """Handle the end of a bare optimizer's step, which ends the update unless it was a part of one."""
        if self.updater is not optimizer:
            return
        if self._depth:
            self._depth -= 1
        else:
            self._tracker.notes.overflow = False
            self._end_step(None)

    @guarded
    def open_closure(self) -> None:
        """Record a call of the update's closure: forward, backward and other work in it are phases of their own."""
        state = self._state
        state.evaluations += 1
        state.closures += 1
        if state.evaluations > 1:
            self._tracker.notes.repeats += 1
        if state.closures == 1 and not state.in_backward:
            # If a hook reports the start of the forward, the closure's work before it is no forward.
            self._tracker.interrupt("idle" if state.forward_by else "forward")

    @guarded
    def close_closure(self, failed: bool = False) -> None:
        """Record the return of a closure; ``failed``: it raised, and so will the update."""
        state = self._state
        state.closures = max(0, state.closures - 1)
        if failed:
            self.abandon_update()
        elif not state.closures and state.in_update:
            self._tracker.interrupt("optimizer")

    def in_evaluation(self) -> bool:
        """Return whether the model is in evaluation mode, and has layers that behave differently there."""
        return self._weights.in_evaluation()

    @guarded
    def note_grad_norm(self, norm: Any) -> None:
        """Record that the script has clipped its gradients, whose norm was ``norm``."""
        self._tracker.notes.grad_norm = cuda.fetch_values(norm)

    @guarded
    def updated(
        self, number: int | None = None, grad_norm: Any = None, loss_scale: Any = None, overflow: Any = False
    ) -> None:
        """Handle the end of an update, which ends the step."""
        notes = self._tracker.notes
        if self._state.rehearsing:
            self._end()
            self._forwards.end_step()
            return
        if grad_norm is not None:
            notes.grad_norm = cuda.fetch_values(grad_norm)
        if loss_scale is not None:
            notes.loss_scale = cuda.fetch_values(loss_scale)
        notes.overflow = cuda.fetch_values(overflow)
        self._end_step(number)

    @guarded
    def skipped_update(self, optimizer: Any, loss_scale: Any = None) -> None:
        """Record a step that a loss scaler, at ``loss_scale``, skipped."""
        if self._state.rehearsing:
            return
        self._phases.enter("optimizer")
        notes = self._tracker.notes
        notes.overflow = True
        notes.loss_scale = cuda.fetch_values(loss_scale)
        self._note_weights(optimizer)
        self._forwards.end_step()
        self._updaters.end(optimizer, None)

    @guarded
    def not_updated(self) -> None:
        """Undo an update of another optimizer than the one that makes the steps."""
        self._end()
        self._phases.enter("idle")

    @guarded
    def abandon_update(self) -> None:
        """Record that an update raised; the phase stays, for the report of the failure."""
        self._state.in_backward = False
        self._end()

    @guarded
    def end_rehearsal(self, before: str) -> None:
        """End a rehearsal; ``before`` is the phase it was opened in."""
        self._state.rehearsing = self._state.in_backward = False
        self._end()
        self._tracker.notes = Notes()
        self._forwards.end_step()
        self._phases.close(before)

    @guarded
    def updating(self, lr: Any, by: Any = None) -> None:
        """Handle the start of an update; ``by`` is the optimizer or engine that makes it."""
        tracker, state = self._tracker, self._state
        if tracker.phase == "forward" and tracker.notes.micro_steps and not state.forward_by and not tracker.depth:
            tracker.rename("idle")  # a batch fetched ahead, after the backward
        # Most loops update right after their backward: without an "idle" in between, a step has one mark less.
        # A capture of the step receives every phase.
        at_once = tracker.phase == "idle" and not tracker.watchers
        (self._phases.interrupt if at_once else self._phases.enter)("optimizer")
        state.in_update, self.updater = True, by
        state.evaluations = 0
        self._since = tracker.progress
        if lr is not None:
            tracker.notes.lr = cuda.fetch_values(lr)

    def _end_step(self, number: int | None) -> None:
        updater = self.updater
        self._end()
        self._forwards.end_step()
        if not self._state.rehearsing:
            self._note_weights(updater)
            # An optimizer may step inside the backward, which continues.
            self._updaters.end(updater, number, "backward" if self._state.in_backward else "idle")

    def _note_weights(self, updater: Any) -> None:
        tracker = self._tracker
        notes = tracker.notes
        notes.evaluating = self._weights.in_evaluation()
        if tracker.budget.full or tracker.watchers:  # with a watcher memory is read at each boundary, too
            notes.weights = self._weights.take(updater)

    def _end(self) -> None:
        state = self._state
        state.in_update = False
        self.updater = None
        state.closures = state.evaluations = self._depth = 0
