"""The engines and optimizers that update, and the steps that their updates make up.

With a single updater every update ends a step. If it trains for ``TRAINING_NS`` and is then freed with its parameters,
the next updater begins another training, whose steps count from 1.

With several updaters, a step is one round of the loop (``rounds``). An update ends a part. The parts of a round become
one step once the round is known to be finished: when the next one begins, or at once after similar rounds.
"""

import sys
import weakref
from collections.abc import Callable, Sequence, Set
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch

from .marks import Notes, PartNotes, StepRaw
from .rounds import LIBRARIES, Entry, Rounds, call_site
from .tracker import Tracker
from .updater_names import name_of

WAITED_PARTS = 8
WAITED_NS = 30_000_000_000
"""Limits, by number and by time, of the first updater's updates held back until the second one's first update, which
shows which updates are one round."""
TRAINING_NS = 5_000_000_000
"""Minimum duration of a training. Federated learning and meta-learning make a short-lived copy of the model, with an
optimizer, per client or task."""
WAITED_ROUNDS = 200
"""Number of rounds that are not closed at once while an optimizer has never updated."""
MEASURED_UPDATERS = 8
"""Limit above which a round (as of one optimizer for each parameter) has no memory sample at every update."""


class _Part(NamedTuple):
    """A finished update, and the step's marks since the previous one."""

    key: int
    """Key of the engine or optimizer."""
    raw: StepRaw
    name: str


class Updaters:
    """Ends steps; for the training thread alone."""

    def __init__(self, tracker: Tracker, finish: Callable[[StepRaw], None], met: Callable[[], None]) -> None:
        """Begin with none.

        Args:
            tracker: the training thread's phases.
            finish: called with each finished step.
            met: called at the first update of each of several engines.
        """
        self._tracker = tracker
        self._finish = finish
        self._met = met
        self._made: dict[int, Any] = {}
        """Weak references to optimizers and engines, by id."""
        self._unseen: set[int] = set()
        """Ids of updaters without an update since there are several."""
        self._names: dict[int, str] = {}
        """Names, by id, of the engines or optimizers that have updated since there are several."""
        self._only = self._first = 0
        """Id of the updater that makes all steps; of several, the first that updated, whose figures are the steps'."""
        self._parameters: list[Any] = []
        """Weak references to the parameters of the single updater."""
        self._since = 0
        """Time of the first update of the current training, ``perf_counter_ns``."""
        self._counted = 0
        """Number of the last step; the tracker's differs if a framework has set the number of the next step."""
        self._several = False
        self._rounds: Rounds | None = None
        self._parts: list[_Part] = []
        self._entry: Entry | None = None
        self._exhausted = False
        self._held_since = 0
        self._closed = 0
        self._ended: tuple[int, ...] = ()
        """Keys of the last step's updates, if it was closed at its last update."""
        self.updates = 0
        """Number of finished updates."""

    @property
    def known(self) -> list[Any]:
        """Living engines and optimizers that have updated, if there are several; else empty."""
        references = [self._made.get(key) for key in list(self._names)]
        found = [reference() for reference in references if reference is not None]
        return [updater for updater in found if updater is not None]

    @property
    def is_sole(self) -> bool:
        """Whether every update is a step."""
        return self._rounds is None

    def made(self, updater: Any) -> None:
        """Register an optimizer or engine; with two alive, steps are rounds."""
        key = id(updater)
        self._made[key] = weakref.ref(updater, lambda _: self._forget(key))
        if key not in self._names:
            self._unseen.add(key)
        if len(self._made) > 1 and self._rounds is None:
            self._rounds = Rounds()

    def belongs(self, optimizers: Sequence[Any]) -> None:
        """Register optimizers that an engine or another optimizer drives: their updates are parts of its own."""
        for optimizer in optimizers:
            self._made.pop(id(optimizer), None)
            self._unseen.discard(id(optimizer))
        if len(self._made) < 2 and not self._names and not self._parts:
            self._rounds = None

    def _forget(self, key: int) -> None:
        """Remove a freed updater, on any thread: another one may get its address."""
        self._made.pop(key, None)
        self._unseen.discard(key)
        self._names.pop(key, None)
        if self._only == key:
            self._only = 0

    def exhausted(self) -> None:
        """Record that a dataloader is exhausted."""
        self._exhausted = True

    def begin(self, updater: Any) -> None:
        """Handle the start of an update; close the rounds that it shows to be finished."""
        start = perf_counter_ns()
        key = id(updater)
        if len(self._made) < 2 and not self._parts and key in self._made:
            self._rounds = None  # the others are freed
            if self._only != key:
                self._make_sole(key, updater)
        if self._rounds is None:
            if self._only in (0, key):
                self._only = key
                return
            self._rounds = Rounds()
        if key not in self._made:
            self.made(updater)
        frame = sys._getframe(1)
        if key not in self._names:
            self._names[key] = _unique(name_of(updater, frame), set(self._names.values()))
            self._unseen.discard(key)
            self._first = self._first or (self._ended or (key,))[0]
            self._several |= len(self._names) > 1
            if self._several and hasattr(updater, "module"):
                self._met()
        freed = bool(self._parts) and self._parts[-1].key not in self._made
        fetched = bool(self._tracker.notes.fetches)
        self._entry = entry = self._rounds.note(key, call_site(frame, LIBRARIES), self._exhausted, freed, fetched)
        self._exhausted = False
        over = self._rounds.over(entry, self._waits())
        self._tracker.cost_ns += perf_counter_ns() - start
        if over:
            self._close(over)

    def end(self, number: int | None, after: str = "idle") -> None:
        """Handle the end of an update.

        Args:
            number: the step's number where the framework counts steps itself; with several, rounds are counted.
            after: the phase that follows.
        """
        self.updates += 1
        entry, self._entry = self._entry, None
        if self._rounds is None or entry is None:
            self._tracker.end_step(number, after)
            self._counted = self._tracker.step
            self._ended = (self._only,)
            return
        if not self._parts:
            if self._is_late(entry):
                self._rounds.extend(self._ended, entry.key)
                self._ended = (*self._ended, entry.key)
                self._tracker.enter(after)
                return
            self._held_since = perf_counter_ns()
        start = perf_counter_ns()
        tracker, rounds = self._tracker, self._rounds
        rounds.add(entry)
        whole = not self._waits_for_unseen() and rounds.is_whole()
        tracker.crowded = rounds.width > MEASURED_UPDATERS and not whole and not tracker.watchers
        tracker.cost_ns += perf_counter_ns() - start
        self._parts.append(_Part(entry.key, tracker.end_part(after), self._names.get(entry.key, "")))
        self._ended = ()
        if whole:
            self._ended = rounds.keys
            self._close([len(self._parts)])

    def flush(self) -> None:
        """Finish the updates held back, at the end of the process."""
        if self._rounds is not None and self._parts:
            self._close(self._rounds.rest(self._exhausted))

    def _is_late(self, entry: Entry) -> bool:
        """Return whether an update belongs to the last step: of another updater, without a backward in between.

        So does the first update of an optimizer that is created just before it. Its time counts as the next step's.
        """
        notes = self._tracker.notes
        has_backward = notes.micro_steps or notes.repeats or notes.gradient_losses
        return bool(self._ended) and not has_backward and entry.key not in self._ended

    def _make_sole(self, key: int, updater: Any) -> None:
        """Make this updater the single one; reset the step number if it begins another training."""
        now, before = perf_counter_ns(), self._parameters
        groups = updater.param_groups if isinstance(updater, torch.optim.Optimizer) else []
        self._only, self._parameters = key, [weakref.ref(each) for group in groups for each in group["params"]]
        if any(reference() is not None for reference in before):
            return  # the same training, with a new optimizer
        since, self._since = self._since, now
        lasted = bool(before) and now - since >= TRAINING_NS
        if lasted and self._parameters and self._tracker.step == self._counted and _is_alone():
            self._tracker.step = 0

    def _waits(self) -> bool:
        """Return whether to hold updates back until the second updater's first update."""
        if len(self._names) > 1 or not self._waits_for_unseen() or len(self._parts) >= WAITED_PARTS or self._closed:
            return False
        return not self._parts or perf_counter_ns() - self._held_since < WAITED_NS

    def _waits_for_unseen(self) -> bool:
        return bool(self._unseen) and self._closed < WAITED_ROUNDS

    def _close(self, lengths: Sequence[int]) -> None:
        """Finish the steps of finished rounds, by the number of parts of each."""
        assert self._rounds is not None
        self._rounds.close(lengths)
        tracker, start = self._tracker, 0
        tracker.crowded = False
        closed, self._parts = self._parts, self._parts[sum(lengths) :]
        for length in lengths:
            parts = closed[start : start + length]
            start += length
            self._closed += 1
            tracker.step += 1
            if length == 1 and not self._several:
                self._finish(parts[0].raw._replace(number=tracker.step))
            else:
                begun = perf_counter_ns()
                merged = _merge(parts, tracker.step, self._first)
                tracker.cost_ns += perf_counter_ns() - begun
                self._finish(merged)


def _merge(parts: Sequence[_Part], number: int, first: int) -> StepRaw:
    """Merge parts into one step; the last mark of a part is the first of the next one."""
    marks = list(parts[0].raw.marks)
    for part in parts[1:]:
        marks += part.raw.marks[1:]
    notes = Notes()
    for part in parts:
        own = part.raw.notes
        notes.micro_steps += own.micro_steps
        notes.samples += own.samples
        notes.padded_tokens += own.padded_tokens
        notes.tokens += own.tokens
        notes.fetch_ns += own.fetch_ns
        notes.fetches |= own.fetches
        notes.overflow |= own.overflow
        notes.waits += own.waits
        notes.shape = max(notes.shape, own.shape, key=_size)
        notes.parts.append(PartNotes(part.key, part.name, own))
    notes.first = first
    cost_ns, cpu_ns = sum(part.raw.cost_ns for part in parts), sum(part.raw.cpu_ns for part in parts)
    return StepRaw(number, marks, parts[-1].raw.ended, notes, cost_ns, cpu_ns)


def _is_alone() -> bool:
    """Return whether there is one rank; several may free an optimizer at different steps, so that numbers differ."""
    dist = torch.distributed
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def _size(shape: list[int]) -> int:
    size = 1 if shape else 0
    for length in shape:
        size *= length
    return size


def _unique(name: str, taken: Set[str]) -> str:
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name} {number}"
    return found
