"""Determines which engine or optimizer owns the steps: each of its updates ends one.

The owner is the engine or optimizer passed to ``ftmon.watch``; else a DeepSpeed engine; else the first optimizer that
was seen stepping. Updates of others are parts of the owner's step: a GAN has one row for each step of the watched
optimizer, and both losses if both are scalars that ``backward`` was called on.
"""

import weakref
from collections.abc import Callable
from itertools import chain, count
from time import perf_counter_ns
from typing import Any

import torch

from ..guard import nothing
from ..rank.model import own_class, own_model, parameters_of
from .tracker import Tracker

OTHERS = 100
"""Updates of another optimizer since the owner's last one, after which it owns the steps: another stage of a training
whose first optimizer still exists."""
TRAINING_NS = 5_000_000_000
"""Minimum duration of a training. Federated learning and meta-learning make a short-lived copy of the model, with an
optimizer, per client or task."""
MEASURED_UPDATERS = 8
"""Limit above which a step (as of one optimizer for each parameter) has no memory sample at every update."""


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
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
