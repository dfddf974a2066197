"""Judges, as a forward begins, whether it belongs to the training step or to an evaluation.

A forward with gradients of a model in training mode is training. Otherwise:

- A model that no optimizer updates (a reference, a teacher, a reward model) changes nothing: in an evaluation its
  forward is evaluation, in a training step it is part of that step's ``forward``.
- A trained model in evaluation mode is an evaluation; in training mode without gradients (a LoRA policy that is its own
  reference, old log-probabilities) it is part of the step, unless it began between two steps.

Later events decide uncertain cases: a forward with gradients or a backward makes the stretch since the last fetch part
of the training step; another fetch from the same dataloader makes it an evaluation.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..guard import nothing
from ..rank.model import own_model, parameters_of
from .tracker import Tracker

_is_grad_enabled = torch.is_grad_enabled


def updates_parameters(engine: Any) -> bool:
    """Return whether a DeepSpeed engine has an optimizer of parameters; for inference ZeRO's wrapper is empty."""
    return getattr(engine, "basic_optimizer", getattr(engine, "optimizer", None)) is not None


def _first_parameter(optimizer: Any) -> Any:
    return next(iter(parameters_of(optimizer)), None)


class Seen(NamedTuple):
    """Facts of a module whose forward was seen."""

    inner: Any
    trained: bool
    version: int


class Forwards:
    """Judges forwards and relabels the marks of a stretch once its kind is certain."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._seen: weakref.WeakKeyDictionary[Any, Seen] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._latest: Any = nothing
        self._version = 0
        self._matched = False  # Whether a module was found whose parameters a known optimizer updates
        self._open: list[tuple[int, str]] = []
        """Undecided marks: index into ``_marks``, and the mark's phase if the stretch is training (else ``eval``)."""
        self._marks: Any = None
        self._has_graph = False  # Whether the trained model had a forward with gradients and no backward since
        self._trains_in_eval_mode = False
        """Whether a backward followed a forward in evaluation mode, which then is no evidence (frozen batch norms)."""

    def add_optimizer(self, optimizer: Any) -> None:
        """Add an optimizer: the models whose parameters it updates are trained."""
        if self._latest() is optimizer:
            return  # a lookup in a weak set creates a reference
        self._latest = weakref.ref(optimizer)
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._version += 1

    @property
    def knows_optimizer(self) -> bool:
        """Whether an optimizer exists."""
        return bool(self._optimizers)

    def is_sole(self, optimizer: Any) -> bool:
        """Return whether all optimizers update the same parameters as this one (one wraps another)."""
        mine = _first_parameter(optimizer)
        return mine is not None and all(_first_parameter(other) is mine for other in self._optimizers)

    def has_sole(self, module: Any) -> bool:
        """Return whether all optimizers update the same parameters, and ``module`` has them."""
        optimizer = next(iter(self._optimizers), None)
        if optimizer is None or not self.is_sole(optimizer):
            return False
        mine = _first_parameter(optimizer)
        return any(parameter is mine for parameter in module.parameters())

    def is_whole(self, module: Any) -> bool:
        """Return whether ``module`` has all parameters of an optimizer: it is a trained model, not a layer of one."""
        own = {id(parameter) for parameter in module.parameters()}
        return any(own.issuperset(map(id, parameters_of(optimizer))) for optimizer in self._optimizers)

    def updates_any(self, parameters: Sequence[Any]) -> bool:
        """Return whether a known optimizer updates one of these parameters."""
        return not self.updated().isdisjoint(map(id, parameters))

    def updated(self) -> set[int]:
        """Return the ids of the parameters that known optimizers update."""
        return {id(each) for optimizer in self._optimizers for each in parameters_of(optimizer)}

    def is_trained(self, module: Any) -> bool:
        """Return whether an optimizer updates this module's parameters; without one, whether any requires gradients."""
        return self._see(module).trained

    def judge(self, module: Any) -> str:
        """Handle the start of a module's forward: move to its phase.

        Return ``train`` (the trained model's own forward of a micro-step), ``part`` (another forward of the training
        step) or ``eval``.
        """
        seen, tracker, grad = self._see(module), self._tracker, _is_grad_enabled()
        inner = seen.inner()
        training = inner is None or bool(inner.training)
        if not seen.trained:
            if tracker.phase in ("data", "idle"):
                self._enter_undecided("forward")
            return "eval" if tracker.phase == "eval" else "part"
        if grad and training:
            self.settle(training=True)
            self._has_graph = True
            return "train"
        if tracker.depth:
            return "eval" if tracker.phase == "eval" else "part"
        if grad and self._trains_in_eval_mode:
            self._enter_undecided("forward")
            return "train"
        return self._without_training(training, grad)

    def settle(self, training: bool) -> bool:
        """Relabel the marks of the undecided stretch, if there is one; return whether any label changed."""
        if not self._open:
            return False
        opened, self._open = self._open, []
        tracker = self._tracker
        if self._marks is not tracker.marks:
            return False
        changed = False
        for index, if_training in opened:
            changed |= tracker.relabel(index, if_training if training else "eval")
        return changed

    def fetching(self, again: bool) -> bool:
        """Handle a fetch (``again``: from the last dataloader); return whether the stretch before was an evaluation."""
        self._has_graph = False
        if not self._open or not (again or self._tracker.phase == "eval"):
            return False
        self.settle(training=False)
        return True

    def going_backward(self) -> bool:
        """Handle a backward: the undecided stretch is training. Return whether its phase was ``eval``."""
        self._has_graph = False
        if not self._open:
            return False
        was_eval = self._tracker.phase == "eval"
        changed = self.settle(training=True)
        if was_eval and changed:
            self._trains_in_eval_mode = True
        return was_eval and changed

    def end_step(self) -> None:
        """Handle the end of a step: clear everything undecided."""
        self._open = []
        self._has_graph = False

    def _without_training(self, training: bool, grad: bool) -> str:
        tracker = self._tracker
        phase = tracker.phase
        if phase == "eval":
            if grad:
                self._note_undecided("forward")
            return "eval"
        if phase == "forward" and self._has_graph:
            return "part"
        if training and self._in_step():
            self._enter_undecided("forward")
            return "part"
        if phase in ("data", "forward"):
            self._note_undecided(phase)
            for index, _ in self._open:
                tracker.relabel(index, "eval")
        if grad or (self._open and self._marks is tracker.marks):
            self._enter_undecided("eval")
        else:
            tracker.enter("eval")
        return "eval"

    def _in_step(self) -> bool:
        """Return whether the present step has begun: something was fetched or generated for it."""
        if self._tracker.phase in ("data", "forward"):
            return True
        return any(mark.phase in ("data", "generate", "forward") for mark in self._tracker.marks)

    def _enter_undecided(self, phase: str) -> None:
        tracker = self._tracker
        if tracker.depth:
            return
        if tracker.phase == "data":
            self._note_undecided("data")
        if tracker.phase != phase or phase == "eval":
            tracker.begin(phase)
        self._note_undecided("forward")

    def _note_undecided(self, if_training: str) -> None:
        marks = self._tracker.marks
        if self._marks is not marks:
            self._marks, self._open = marks, []
        index = len(marks) - 1
        if not self._open or self._open[-1][0] != index:
            self._open.append((index, if_training))

    def _see(self, module: Any) -> Seen:
        seen = self._seen.get(module)
        if seen is None or seen.version != self._version:
            matched = self._is_updated(module)
            if matched and not self._matched:
                self._matched = True
                self._version += 1  # modules judged by ``requires_grad`` are judged again
            trained = matched or (not self._matched and any(each.requires_grad for each in module.parameters()))
            seen = self._seen[module] = Seen(weakref.ref(own_model(module)), trained, self._version)
        return seen

    def _is_updated(self, module: Any) -> bool:
        if any(kind.__name__ == "DeepSpeedEngine" for kind in type(module).__mro__):
            return updates_parameters(module)  # ZeRO's optimizers hold partitions, not the model's parameters
        known = self.updated()
        return any(id(parameter) in known for parameter in module.parameters())
