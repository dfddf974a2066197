"""Follows a step that goes like the ones before at a fraction of the cost: its events are only compared with theirs.

Most of the probe's time is spent on judging what a script does: which forward trains, where an evaluation begins. Once
the events of some steps have come in the same order and made the same phases, a coarse step (``phases.budget``) is
followed by that order: an event takes the next place in it, begins the phase that belongs to the place and notes its
figures. Anything else, and every event that is not one of ``Code``, is *replayed*: the parts that judge get the
events of the unfinished step, with their times and samples, and go on from there.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from itertools import pairwise
from time import perf_counter_ns
from typing import Any, NamedTuple

from ..device import cuda
from ..device.memory import MemoryBackend
from ..phases.tracker import COARSE, BatchesNoted, Mark, StepRaw
from ..rank.model import learning_rate
from .loading import Loading
from .micro_steps import MicroSteps
from .state import Loop
from .updates import Updates

LIKE = 3
"""Steps in the same order before one is followed by it."""
MOST_EVENTS = 2_000
"""Events of a step beyond which it is not compared."""


class Code(IntEnum):
    """An event of a training loop that steps may be followed by."""

    FETCHING = 0
    FETCHED = 1
    FORWARD = 2
    FORWARD_ENDS = 3
    BACKWARD = 4
    BACKWARD_ENDS = 5
    UPDATE = 6
    UPDATED = 7
    UPDATE_ENDS = 8
    STEPPING = 9
    STEPPED = 10
    ZEROING = 11
    CLIPPED = 12


_ENDS = (Code.UPDATED, Code.STEPPED)


class _Place(NamedTuple):
    """One event of the order."""

    code: int
    owner: int
    """``id`` of the iterator, module, engine or optimizer; 0: any."""
    phase: str
    """Phase that begins with it; empty: none."""
    read: bool
    """Whether memory is read there."""
    timed: bool
    """Whether a device event is recorded there."""


class _Given:
    """The memory back end during a replay: the samples that were taken already, then new ones."""

    def __init__(self, real: MemoryBackend, samples: list[Any]) -> None:
        self._real, self._samples = real, deque(samples)
        self.measure, self.device_index = real.measure, real.device_index
        self.tidy, self.read = real.tidy, real.read

    def sample(self) -> Any:
        """Return the next sample."""
        return self._samples.popleft() if self._samples else self._real.sample()


class Regular:
    """Follows regular steps; for the training thread alone."""

    def __init__(self, loop: Loop, loading: Loading, micro_steps: MicroSteps, updates: Updates) -> None:
        self._guard, self._tracker, self._state = loop.rank.guard, loop.tracker, loop.state
        self._loading, self._micro_steps, self._updates = loading, micro_steps, updates
        self.handlers: dict[int, Callable[..., Any]] = {}
        """The methods that judge an event, which a replay calls with its arguments."""
        self._notes: list[Callable[..., None] | None] = [None] * len(Code)
        """What notes the figures of an event, with its owner and arguments."""
        for code, note in (
            (Code.FETCHED, self._fetched),
            (Code.FORWARD, self._forward),
            (Code.FORWARD_ENDS, self._forward_ends),
            (Code.BACKWARD, self._backward),
            (Code.BACKWARD_ENDS, self._backward_ends),
            (Code.UPDATE, self._update),
            (Code.UPDATED, self._stepped),
            (Code.STEPPING, self._stepping),
            (Code.STEPPED, self._stepped),
            (Code.CLIPPED, self._clipped),
        ):
            self._notes[code] = note
        self.on = False
        """Whether the present step is followed by the order."""
        self._order: list[_Place] | None = None
        self._place = self._alike = 0
        self._log: list[tuple[int, int, tuple[Any, ...]]] = []
        """The present step's events, while it is followed: code, time and arguments."""
        self._events: list[tuple[int, int, int]] = []
        """The present step's events, while it is judged: code, time and owner."""
        self._is_odd = False
        """Whether the present step had an event that is no ``Code``."""

    def goes_on(self, code: int, owner: Any = None, *what: Any) -> bool:
        """Handle an event; return whether it is done with, because the step goes like the ones before."""
        now = perf_counter_ns()
        if not self.on:
            if len(self._events) < MOST_EVENTS:
                self._events.append((code, now, 0 if owner is None else id(owner)))
            return False
        tracker, place = self._tracker, self._order[self._place]  # type: ignore[index]
        if place.code != code or (place.owner and place.owner != id(owner)):
            self._replay()
            self._events.append((code, now, 0 if owner is None else id(owner)))
            return False
        self._place += 1
        if place.phase:
            counts = tracker.counts
            sample = event = None
            if place.read:
                tracker.sample = sample = tracker.memory.sample()
            if place.timed:
                event = tracker.mark_event()
            tracker.marks.append(Mark(place.phase, now, sample, event, counts.entered, counts.host_ns))
            tracker.phase, tracker.phase_ns = place.phase, now
            tracker.progress += 1
        self._log.append((code, now, what if owner is None else (owner, *what)))
        note = self._notes[code]
        if note is not None:
            try:
                note(owner, *what)
            except Exception as error:
                self._guard.disable(error)
        self._guard.spent_ns += perf_counter_ns() - now
        return True

    def leave(self) -> None:
        """Handle an event that is no ``Code``: judge the step from here on."""
        self._is_odd = True
        if self.on:
            self._replay()

    def end_step(self, raw: StepRaw) -> None:
        """Handle the end of a step: compare it with the one before, and decide about the next one."""
        tracker = self._tracker
        if self.on:
            self._log.clear()
            self._place = 0
        else:
            order = None if self._is_odd or len(self._events) >= MOST_EVENTS else self._order_of(raw)
            self._alike = self._alike + 1 if order is not None and order == self._order else 0
            self._order = order
        self._events, self._is_odd = [], False
        regular = self._order is not None and self._alike >= LIKE
        self.on = regular and not tracker.budget.full and not tracker.watchers and not tracker.depth

    def _order_of(self, raw: StepRaw) -> list[_Place] | None:
        """Return the order of a judged step's events; None: it is none to follow another step by."""
        events, marks, notes, light = self._events, raw.marks, raw.notes, self._tracker.light
        skipped = notes.overflow == 1  # a flag on its way from the device is not waited for
        odd = notes.parts or notes.repeats or notes.discarded or skipped or notes.pending
        if odd or not events or events[-1][0] not in _ENDS or marks[0].phase != "idle" or marks[-1].phase != "idle":
            return None
        times = [event[1] for event in events]
        phases: dict[int, _Place] = {}
        for before, mark in pairwise(marks[:-1]):
            at = bisect_right(times, mark.ns) - 1
            if at < 0 or at in phases or not mark.phase:
                return None
            read = mark.phase not in light and not (mark.phase in COARSE and before.phase in COARSE)
            code, _, owner = events[at]
            phases[at] = _Place(code, owner, mark.phase, read, mark.phase not in light)
        order = [phases.get(at) or _Place(code, owner, "", False, False) for at, (code, _, owner) in enumerate(events)]
        # A forward that begins no phase of that name is another model's: its batch is not the step's.
        others = any(each.code == Code.FORWARD and each.phase != "forward" for each in order)
        fetches = all(one.code == Code.FETCHING for one, after in pairwise(order) if after.code == Code.FETCHED)
        return order if fetches and not others else None

    def _fetched(self, _owner: Any, found: Any) -> None:
        self._tracker.notes.fetch_ns += self._log[-1][1] - self._log[-2][1]
        self._loading.note_fetched(found)

    def _forward(self, _owner: Any, args: Any, kwargs: Any, *_: Any) -> None:
        self._state.in_forward = True
        self._micro_steps.note_batch(args, kwargs)

    def _forward_ends(self, _owner: Any) -> None:
        self._state.in_forward = False

    def _backward(self, _owner: Any, losses: Any, scaled: bool) -> None:
        self._state.in_backward = True
        fetched = self._micro_steps.note_losses(losses, scaled)
        self._log[-1] = *self._log[-1][:2], (fetched, scaled)  # the losses themselves would keep the graph

    def _backward_ends(self, _owner: Any) -> None:
        self._state.in_backward = False

    def _update(self, owner: Any, lr: Any) -> None:
        self._state.in_update, self._updates.updater = True, owner
        rate = lr() if callable(lr) else lr
        self._tracker.notes.lr = None if rate is None else cuda.fetch_values(rate)

    def _stepping(self, owner: Any) -> None:
        self._update(owner, learning_rate([group.get("lr") for group in owner.param_groups]))

    def _stepped(self, _owner: Any, figures: Callable[[], dict[str, Any]] = dict) -> None:
        if self._order is not None and self._place == len(self._order):
            self._updates.end_regular(**figures())

    def _clipped(self, _owner: Any, norm: Any) -> None:
        self._tracker.notes.grad_norm = cuda.fetch_values(norm)

    def _replay(self) -> None:
        """Give the events of the unfinished step to the parts that judge."""
        tracker, state, log = self._tracker, self._state, self._log
        self.on, self._log, self._place = False, [], 0
        self._alike = 0
        if not log:
            return
        marks, notes = tracker.marks, tracker.notes
        state.in_forward = state.in_backward = state.in_update = False
        self._updates.updater = None
        tracker.marks, tracker.phase = marks[:1], marks[0].phase
        notes.restore_batches(BatchesNoted())
        notes.losses, notes.micro_steps, notes.fetches = [], 0, {}
        memory, mark_event, clock = tracker.memory, tracker.mark_event, tracker.clock
        events = deque(mark.event for mark in marks[1:] if mark.event is not None)
        tracker.memory = _Given(memory, [mark.memory for mark in marks[1:] if mark.memory is not None])
        tracker.mark_event = lambda: events.popleft() if events else mark_event()
        fetched_ns = notes.fetch_ns
        try:
            for code, now, what in log:
                tracker.clock = lambda now=now: now  # type: ignore[misc]
                self._events.append((code, now, id(what[0]) if what and self._has_owner(code) else 0))
                self.handlers[code](*what)
        finally:
            tracker.memory, tracker.mark_event, tracker.clock = memory, mark_event, clock
        tracker.notes.fetch_ns = fetched_ns

    @staticmethod
    def _has_owner(code: int) -> bool:
        return code in (Code.FETCHING, Code.FORWARD, Code.UPDATE, Code.STEPPING, Code.STEPPED)
