"""Follows updates: an optimizer, an engine or a loss scaler ends or skips a step, if it owns the steps.

The owner is the engine or optimizer passed to ``ftmon.watch``; else a DeepSpeed engine; else the first optimizer that
was seen stepping. Updates of others are parts of the owner's step: a GAN has one row for each step of the watched
optimizer, and both losses if both are scalars that ``backward`` was called on.
"""

import os
import weakref
from collections.abc import Callable
from itertools import chain, count
from math import isfinite
from time import perf_counter_ns
from typing import Any

import torch

from ..device import cuda
from ..guard import guarded, nothing
from ..phases.tracker import Notes, Tracker
from ..rank.context import of_optimizer
from ..rank.model import learning_rate, own_class, own_model, parameters_of, parameters_of_engine, steps_done
from ..values.signs import PUT_BACK, WeightSampler, gradient_of, has_gradients, left_out
from .state import Loop

OTHERS = 100
"""Updates of another optimizer since the owner's last one, after which it owns the steps: another stage of a training
whose first optimizer still exists."""
TRAINING_NS = 5_000_000_000
"""Minimum duration of a training. Federated learning and meta-learning make a short-lived copy of the model, with an
optimizer, per client or task."""
IDLE = 100
"""Steps after which parameters that no optimizer updates are looked for again: some may have been unfrozen. An
optimizer without a step until then is not counted."""
LOOKS = 4
"""Updates at the beginning in which parameters without a gradient are looked for; one after ``IDLE`` steps follows."""
LAST_LOOK = 10 * IDLE
"""Steps after which none is looked for in a further optimizer."""
DETACHED = 0.5
"""Share of the optimizer's elements that are no accident: models have small parts that a loss leaves out."""
DETACHED_ONES = 0.9
"""The same of the number of its parameters: adapters are small beside a head."""
MEASURED_UPDATERS = 8
"""Limit above which a step (as of one optimizer for each parameter) has no memory sample at every update."""


def _may_reduce(model: Any, parameters: list[Any]) -> bool:
    """Return whether a part of a model, or how its parameters are distributed, may reduce gradients over ranks.

    A model that is not known may; so may one whose parameters are not the optimizer's (fp32 copies).
    """
    modules = [] if model is None else list(model.modules())
    names = {kind.__name__ for each in modules for kind in type(each).__mro__}
    own = set() if model is None else set(map(id, model.parameters()))
    return (
        own.isdisjoint(map(id, parameters))
        or any(word in name for name in names for word in ("Parallel", "FSDP", "DDP"))
        or any("composable" in name for each in modules for name in vars(each))
        or any(hasattr(each, "device_mesh") or hasattr(each, "ds_id") for each in parameters)
    )


class Updaters:
    """Ends steps; for the training thread alone."""

    def __init__(self, tracker: Tracker, met: Callable[[list[Any]], None]) -> None:
        self._tracker = tracker
        self._met = met
        self._owner: Callable[[], Any] = nothing
        self._is_named = False
        self._others: dict[int, int] = {}
        """Updates of others since the owner's last one, by id."""
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._parameters: list[Any] = []
        self._since = 0
        self.updates = 0

    def watch(self, updater: Any) -> None:
        """Make this engine or optimizer the owner of the steps for as long as it exists."""
        self._own(updater)
        self._is_named = True

    def made_engine(self) -> None:
        """Handle the creation of an engine: the next update makes an owner, unless the present one was named."""
        if not self._is_named:
            self._owner = nothing

    def end(self, updater: Any, number: int | None, after: str = "idle") -> None:
        """Handle the end of an update by an engine or optimizer; None: by a framework that makes all updates.

        ``number`` is the step's, where the framework counts steps itself; ``after`` the phase that follows.
        """
        self.updates += 1
        tracker, notes = self._tracker, self._tracker.notes
        if updater is None or self._owns(updater):
            if notes.parts:
                notes.owner = id(updater)
                notes.end_part(id(updater), self._name(updater))
            tracker.crowded = False
            tracker.end_step(number, after)
            return
        notes.end_part(id(updater), self._name(updater))
        tracker.crowded = len(notes.parts) > MEASURED_UPDATERS and not tracker.watchers
        tracker.enter(after)

    def _owns(self, updater: Any) -> bool:
        owner = self._owner()
        if owner is updater:
            self._others.clear()
            return True
        if owner is not None:
            key = id(updater)
            others = self._others[key] = self._others.get(key, 0) + 1
            outranks = _is_engine(updater) and not _is_engine(owner)
            if self._is_named or not (outranks or others >= OTHERS):
                return False
        self._own(updater)
        return True

    def _own(self, updater: Any) -> None:
        """Make this one the owner; reset the step number if it begins another training on a single rank."""
        now, before = perf_counter_ns(), self._parameters
        self._owner, self._is_named = weakref.ref(updater), False
        self._name(updater)  # the first of several has the first name
        self._parameters = list(map(weakref.ref, parameters_of(updater)))
        self._others.clear()
        if any(reference() is not None for reference in before):
            return  # the same training, with a new optimizer
        since, self._since = self._since, now
        if before and self._parameters and now - since >= TRAINING_NS and _is_alone():
            self._tracker.step = 0

    def _name(self, updater: Any) -> str:
        """Return the class of an engine's model, or of an optimizer, with a number if there are several."""
        found = self._names.get(updater)
        if found is not None:
            return found
        kind = own_class(own_model(updater.module)) if _is_engine(updater) else type(updater)
        taken = set(self._names.values())
        names = chain((kind.__name__,), (f"{kind.__name__} {number}" for number in count(2)))
        found = self._names[updater] = next(name for name in names if name not in taken)
        modules = [each.module for each in self._names if _is_engine(each)]
        if _is_engine(updater) and len(modules) > 1:
            self._met(modules)
        return found


def _is_engine(updater: Any) -> bool:
    return isinstance(getattr(updater, "module", None), torch.nn.Module)


def _is_alone() -> bool:
    """Return whether there is one rank; several may free an optimizer at different steps, so that numbers differ."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() == 1
    return os.environ.get("WORLD_SIZE", "1") == "1"


FIGURES = 4_096
"""Elements that a step's collectives may have for losses and figures alone; activations have more."""


class Updates:
    """Follows updates, on the training thread alone."""

    def __init__(self, loop: Loop, updaters: Updaters) -> None:
        self.guard = loop.rank.guard
        self.updater: Any = None
        self._trained, self._tracker, self._phases = loop.trained, loop.tracker, loop.phases
        self._forwards, self._state, self._updaters = loop.forwards, loop.state, updaters
        self._since = self._depth = 0
        self._weights = WeightSampler(loop.trained)
        self._sampled = 0
        """Updates before which weights were sampled."""
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers whose creation was seen."""
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._replaces = True
        """Whether in each update so far only the last micro-batch had its gradients left."""
        self._zeroed_at = -1
        """Further backwards of the step before which its gradients were set to zero last."""
        self._looks: weakref.WeakKeyDictionary[Any, tuple[int, set[int]]] = weakref.WeakKeyDictionary()
        """By optimizer: updates in which gradients were looked for, and ids of the parameters that had none in any."""
        self._is_left_out = self._looked_again = False
        """Whether parameters that no optimizer updates were found, and were looked for once more."""
        self.learned: dict[int, Callable[[], Any]] = {}
        """By id: weak references to the parameters that the first backwards had gradients of."""
        self.gradients: Any = None
        """Sampled ones of the latest update, at the beginning, until the next backward."""
        self._updated = set[int]()
        """Ids of the parameters of the first optimizers, which may be gone in another stage of the training."""

    @guarded
    def found_optimizer(self, optimizer: Any) -> None:
        """Handle the creation of an optimizer."""
        self._made.add(optimizer)
        self._forwards.add_optimizer(optimizer)

    @guarded
    def zeroing(self, owner: Any) -> None:
        """Record that an optimizer or a module sets its gradients to zero, perhaps after a backward.

        If the script has seen that their norm is not finite, it skips the update.
        """
        notes = self._tracker.notes
        if not notes.micro_steps or notes.discarded or self._state.engine_steps:
            return
        is_module = isinstance(owner, torch.nn.Module)
        notes.discarded = bool(self._forwards.has_sole(owner) if is_module else self._forwards.is_sole(owner))
        self._zeroed_at = notes.repeats
        is_next = len(notes.fetches) == 1 and sum(notes.fetches.values()) > notes.micro_steps
        notes.zeroed |= bool(notes.discarded) and is_next
        updater = self._trained.primary()
        notes.gradient = gradient_of(updater if is_module else owner)
        norm = cuda.arrived_value(notes.grad_norm)
        if notes.discarded and updater is not None and norm is not None and not isfinite(norm):
            notes.discarded = False
            self.skipped_update(updater)

    @guarded
    def begin_update(self, optimizer: Any) -> bool:
        """Handle the start of a bare optimizer's step; return whether an update begins, rather than a part of one."""
        state = self._state
        if state.making_engine or (state.in_update and self.updater is not optimizer):
            return False
        if state.in_update and self._since == self._tracker.progress:
            self._depth += 1  # a step method that calls its base class's
            return False
        self._stepped.add(optimizer)
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
    def see_kept(self) -> None:
        """Note, as a backward begins, what is left of the gradients of the update before."""
        before, self.gradients = self.gradients, None
        if not self._state.in_update:  # a closure adds the last of an accumulation
            self._tracker.own_notes().gradients = before, self._weights.gradients()

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
        """Record a step that a loss scaler, at ``loss_scale``, or the script itself skipped."""
        if self._state.rehearsing:
            return
        self._phases.enter("optimizer")
        notes = self._tracker.notes
        notes.overflow = True
        notes.lr = cuda.fetch_values(learning_rate([group.get("lr") for group in optimizer.param_groups]))
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
        notes = tracker.notes
        if (notes.discarded or notes.zeroed) and gradient_of(by)() is notes.gradient():  # else the script has set it
            if notes.discarded and notes.repeats == self._zeroed_at and has_gradients(by):
                notes.clipped = "discarded"
            elif self._replaces and notes.zeroed and not state.engine_steps:
                notes.clipped = "replaced"
        if notes.clipped_before and notes.micro_steps and not state.engine_steps:
            notes.clipped = "late"
        notes.clipped_before = False  # an update without a backward: that of the next optimizer after one backward
        self._replaces &= tracker.notes.zeroed
        if tracker.step < LAST_LOOK:
            self._see_gradients(by)
        if self._sampled < PUT_BACK:
            self._sampled += 1
            tracker.notes.weights_before = self._weights.take(by)
            is_alone = by is not None and not state.engine_steps and self._forwards.is_sole(by)
            self.gradients = self._weights.gradients(by) if is_alone else None
        if self._sampled == 1 and not state.engine_steps:  # after a resume
            tracker.step = max(tracker.step, steps_done(by))
        if self._sampled < PUT_BACK and not self._is_left_out:  # a closure's gradients are not there at the first one
            self._updated |= self._forwards.updated()
            self._note_left_out(by, self._updated)
        elif not self._looked_again and tracker.step >= IDLE:
            self._looked_again = True
            self._note_left_out(by, (self._updated | self._forwards.updated()) - self._idle())

    def _see_gradients(self, by: Any) -> None:
        """Note an optimizer's parameters that got no gradient in its first updates and one later.

        Those of an engine, and of a rank's part of a parameter, may be elsewhere. Those with a state had one between.
        """
        tracker, state = self._tracker, self._state
        if by is None or state.engine_steps or state.in_backward:
            return
        again, (looks, before) = tracker.step >= IDLE, self._looks.get(by, (0, set[int]()))
        if looks > LOOKS or (looks == LOOKS and not again):
            return
        trained = [each for each in parameters_of(by) if each.requires_grad and each.numel()]
        bare = {id(each) for each in trained if each.grad is None}
        bare = before & bare if looks else bare
        self._looks[by] = looks + 1, bare
        if looks < LOOKS:
            return
        states = getattr(by, "state", None)
        had = {id(each) for each, own in states.items() if own} if isinstance(states, dict) else set[int]()
        bare -= had
        detached = [each for each in trained if id(each) in bare]
        share = sum(each.numel() for each in detached) / max(1, sum(each.numel() for each in trained))
        are_most = share >= DETACHED or len(detached) >= DETACHED_ONES * len(trained) > 0
        if are_most and not (share == 1 and by is self._trained.primary()):  # that none has one is another finding
            model, first = self._trained.any_model(), detached[0]
            names = {id(each): name for name, each in model.named_parameters()} if model is not None else {}
            tracker.notes.detached = len(detached), names.get(id(first), f"a parameter {list(first.shape)}")

    def _idle(self) -> set[int]:
        """Return the ids of the parameters of optimizers that never stepped, nor does another one with some of them."""
        made, stepped = (
            {each: {id(one) for one in parameters_of(each)} for each in some} for some in (self._made, self._stepped)
        )
        updated = set().union(*stepped.values())
        return set().union(*(each for each in made.values() if each.isdisjoint(updated)))

    def _note_left_out(self, by: Any, updated: set[int]) -> None:
        """Note the parameters that no optimizer updates; where this one was made before the probe, others may be."""
        model, others = self._trained.any_model(), list[Any]()
        if self._state.engine_steps:
            model, updated = getattr(by, "module", None), set(map(id, parameters_of_engine(by)))
        elif by is None or by not in self._made:
            return
        else:
            others = [one for each in self.learned.values() if (one := each()) is not None]
        if model is not None and updated:
            self._tracker.notes.left_out = found = left_out(model, updated, others)
            self._is_left_out = found[0] > 0

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
            notes.evaluating_part = self._weights.part_in_evaluation(updater)
            notes.no_gradients = not has_gradients(updater)
            if notes.apart == notes.micro_steps > 0 and not (_is_engine(updater) or _is_alone()):
                parameters = parameters_of(updater)
                elements = sum(each.numel() for each in parameters)
                sent = tracker.counts.elements(tracker.step_collectives)
                few = sent is not None and sent < min(elements / 2, FIGURES)
                notes.never_reduced = few and not _may_reduce(self._trained.any_model(), parameters)

    def _end(self) -> None:
        state = self._state
        state.in_update = False
        self.updater = None
        state.closures = state.evaluations = self._depth = 0
