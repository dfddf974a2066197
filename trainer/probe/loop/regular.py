"""Follows a step that goes like the ones before at a fraction of the cost: its events are only compared with theirs.

Most of the probe's time is spent on judging what a script does: which forward trains, where an evaluation begins. Once
the events of some steps have come in the same order and made the same phases, a coarse step (``phases.budget``) is
followed by that order. Between two events the training fills all caches, so what an event costs is the number of
functions and objects that it touches: it only takes its place in the order and appends its time, and what must be read
at that moment. The publisher makes a ``StepRaw`` of that (``Followed``). Any other event is *replayed*: the parts that
judge get the events of the unfinished step, with their times and samples, and go on from there.
"""

import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import partial
from itertools import islice, pairwise
from threading import Lock, get_ident
from time import perf_counter_ns, thread_time_ns
from typing import Any, NamedTuple

from ..device import cuda
from ..device.memory import MemoryBackend
from ..guard import nothing
from ..phases.tracker import COARSE, BatchesNoted, Mark, Moment, Notes, Outbox, StepRaw, wall_offset_ns
from ..rank.model import learning_rate, own_model
from ..values import batch
from .loading import Loading
from .micro_steps import MicroSteps
from .state import Loop
from .updates import Updates

LIKE = 3
"""Steps in the same order before one is followed by it."""
MOST_EVENTS = 2_000
"""Events of a step beyond which it is not compared."""
SPARE_NOTES = 24
"""Empty notes that the publisher keeps ready for followed steps."""


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
_CODES = 16
"""More than there are codes: an object's address, which is a multiple of it, and a code make one number."""
_SCOPES = {
    Code.FORWARD: ("forward", True),
    Code.FORWARD_ENDS: ("forward", False),
    Code.BACKWARD: ("backward", True),
    Code.BACKWARD_ENDS: ("backward", False),
    Code.UPDATE: ("update", True),
    Code.UPDATE_ENDS: ("update", False),
    Code.STEPPING: ("update", True),
    Code.STEPPED: ("update", False),
}
"""What begins and ends with an event."""

_new: Any = tuple.__new__


class _Event(NamedTuple):
    """An event of a judged step."""

    key: int
    ns: int
    code: int
    owner: Callable[[], Any]
    """Weak reference to the iterator, module, engine or optimizer; returns None for an event of none."""
    inner: bool
    """The event is a part of another one, which goes on."""


class _Place(NamedTuple):
    """One event of the order."""

    key: int
    code: int
    owner: Callable[[], Any]
    inner: bool
    phase: str
    """Phase that begins with it; empty: none."""
    read: bool
    """Whether memory is read there."""
    timed: bool
    """Whether a device event is recorded there."""


class Order(NamedTuple):
    """The events of a regular step, and what is the same in all steps in that order."""

    places: list[_Place]
    keys: list[int]
    phases: list[str]
    """Of the step's marks."""
    inside: list[frozenset[str]]
    """What is under way after so many events: ``forward``, ``backward``, ``update``."""
    counts: bool
    """Whether there are collective calls to count."""
    timed: bool
    """Whether the device's times are taken, by which ranks are compared."""
    fetched: int
    """Key of the dataloader in ``Notes.fetches``."""
    sum_losses: bool
    added_ranks: float
    without_labels: bool
    """Ranks count alike in the mean of the loss."""
    shifts_labels: bool


class Followed(NamedTuple):
    """One finished step as the training thread recorded it; ``raw`` is for another thread."""

    number: int
    first: Mark
    end: Mark
    order: Order
    times: list[int]
    kept: list[Any]
    """What was read at the events, in their order."""
    notes: Notes
    cost_ns: int
    cpu_ns: int
    every: int

    def raw(self) -> StepRaw:
        """Return the step as the parts that judge would have recorded it; any thread, any number of times."""
        marks = self._marks()
        with _filling:
            if not self.notes.complete:
                self.notes.complete = True
                self._complete(self.notes)
        ended = (self.end.ns + wall_offset_ns()) / 1e9
        return StepRaw(
            self.number, marks, ended, self.notes, self.cost_ns, self.cpu_ns, self.every, coarse=True, followed=True
        )

    def _marks(self) -> list[Mark]:
        marks = [self.first]
        for place, ns, figures, _ in self._events():
            if place.phase:
                marks.append(Mark(place.phase, ns, *figures))
        return [*marks, self.end]

    def _events(self) -> Iterator[tuple[_Place, int, tuple[Any, ...], tuple[Any, ...]]]:
        """Yield each event's place, time, figures of a mark, and what else was kept of it."""
        kept, first = iter(self.kept), self.first
        for place, ns in zip(self.order.places, self.times, strict=False):
            counted, sample, event = (first.collectives, first.collective_ns), None, None
            if place.phase:
                counted = (next(kept), next(kept)) if self.order.counts else counted
                sample = next(kept) if place.read else None
                event = next(kept) if place.timed else None
            yield place, ns, (sample, event, *counted), tuple(islice(kept, 0 if place.inner else _KEPT[place.code]))

    def _complete(self, notes: Notes) -> None:
        order, before = self.order, 0
        for place, ns, _, kept in self._events():
            if place.inner:
                pass
            elif place.code == Code.FETCHED:
                notes.fetch_ns += ns - before
                notes.fetches[order.fetched] = notes.fetches.get(order.fetched, 0) + 1
                if kept[0] is not None:
                    batch.note(notes, kept[0], False, True, shifted=order.shifts_labels)
                    if order.without_labels:
                        notes.labels = []
            elif place.code == Code.BACKWARD:
                fetched, scaled = kept
                notes.sum_losses, notes.added_ranks = order.sum_losses or scaled, order.added_ranks
                notes.losses += fetched
            elif place.code in (Code.UPDATE, Code.STEPPING):
                notes.lr = kept[0]
            elif place.code == Code.CLIPPED:
                notes.grad_norm = kept[0]
            before = ns
        for name, value in (self.kept[-1] or {}).items():
            setattr(notes, name, value)


_KEPT = [0] * _CODES
"""Number of items that are kept of an event; of the last one there is one more."""
for _code, _items in {Code.FETCHED: 1, Code.UPDATE: 1, Code.STEPPING: 1, Code.CLIPPED: 1, Code.BACKWARD: 2}.items():
    _KEPT[_code] = _items
_filling = Lock()


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
    """Follows regular steps; for the training thread alone, but for ``now`` and ``marks``."""

    __slots__ = (
        *("_acts", "_guard", "_kept", "_times", "keys"),
        *(
            "_budget",
            "_counts",
            "_is_timed",
            "_cpu_ns",
            "_device",
            "_first",
            "_held",
            "_left",
            "_notes_later",
            "_order",
            "_outbox",
            "_sample",
        ),
        *("_alike", "_arrays", "_costs", "_done", "_events", "_is_odd", "_loading", "_micro_steps", "_spent_ns"),
        *("_evaluates", "_model", "_trained", "_trains"),
        *("_state", "_tracker", "_unlabelled", "_updates", "handlers", "spare"),
    )

    def __init__(
        self,
        loop: Loop,
        outbox: Outbox,
        loading: Loading,
        micro_steps: MicroSteps,
        updates: Updates,
        unlabelled: Callable[[], bool] = bool,
    ) -> None:
        self._guard, self._tracker, self._state = loop.rank.guard, loop.tracker, loop.state
        self._device, self._budget, self._counts = loop.rank.device, loop.tracker.budget, loop.tracker.counts
        self._loading, self._micro_steps, self._updates = loading, micro_steps, updates
        self._outbox, self._unlabelled = outbox, unlabelled
        self._is_timed, self._trained = loop.rank.world_size > 1, loop.trained
        self.handlers: dict[int, Callable[..., Any]] = {}
        """The methods that judge an event, which a replay calls with its arguments."""
        self.keys: list[int] = []
        """Keys of the events of the order that the present step is followed by; empty: it is judged."""
        self.spare: deque[Notes] = deque()
        """Empty notes for the next steps, which the publisher makes."""
        self._order: Order | None = None
        self._acts: list[Callable[[Any, Any], object] | None] = []
        """What is done at each event of the order, with its owner and argument."""
        self._alike = 0
        self._events: list[_Event] = []
        """The present step's events, while it is judged."""
        self._is_odd = False
        """Whether the present step had an event that is no ``Code``."""
        self._times: list[int] = []
        self._kept: list[Any] = []
        self._held: list[Any] = []
        """Batches of the present step that were noted at once; for a replay."""
        self._first: Any = None
        """The mark at which the followed step began."""
        self._left = self._done = 0
        """Followed steps until the next decision, and events of those since the last one."""
        self._costs: list[tuple[int, int]] = []
        """The probe's cost and the time of these steps."""
        self._spent_ns = self._cpu_ns = self._arrays = 0
        self._sample: Callable[[], Any] = nothing
        self._model: Callable[[], Any] = nothing
        self._notes_later = False
        """Whether a batch is noted at its fetch, and its tensors are counted later."""
        self._trains = self._evaluates = False
        """Mode of the model, and whether that of its layers is evaluation."""
        loop.tracker.followed, loop.tracker.followed_marks = self.now, self.marks

    def follows(self, code: int, owner: Any = None, what: Any = None) -> bool:
        """Handle an event of a followed step; return False if it is to be judged. Any thread."""
        keys = self.keys
        if not keys:
            return False
        guard = self._guard
        if guard.thread != get_ident() or not guard.enabled:
            return False
        now = perf_counter_ns()
        times = self._times
        at = len(times)
        if keys[at] != id(owner) + code:
            self._differs(code)
            return False
        times.append(now)
        act = self._acts[at]
        if act is not None:
            try:
                act(owner, what)
            except Exception as error:
                guard.disable(error)
        guard.spent_ns += perf_counter_ns() - now
        return True

    def goes_on(self, code: int, owner: Any = None, what: Any = None) -> bool:
        """As ``follows``; an event that is to be judged is noted for the order of later steps."""
        if self.follows(code, owner, what):
            return True
        self.note(code, owner)
        return False

    def note(self, code: int, owner: Any = None, *, inner: bool = False) -> None:
        """Note a judged event, or one that is a part of another one (``inner``)."""
        if not self.keys and len(self._events) < MOST_EVENTS:
            reference = nothing if owner is None else weakref.ref(owner)
            self._events.append(_Event(id(owner) + code, self._tracker.clock(), code, reference, inner))

    def leave(self) -> None:
        """Handle an event that is no ``Code``: judge the step from here on."""
        self._is_odd = True
        if self.keys:
            self._replay()

    def is_inside(self, scope: str) -> bool:
        """Return whether a ``forward``, ``backward`` or ``update`` of a followed step is under way."""
        order = self._order
        return bool(self.keys) and order is not None and scope in order.inside[len(self._times)]

    def end_step(self, raw: StepRaw) -> None:
        """Handle the end of a judged step: compare it with the one before, and decide about the next one."""
        order, known, is_like = None, self._order, False
        if not self._is_odd and len(self._events) < MOST_EVENTS and not _is_odd(raw):
            keys, phases = [event.key for event in self._events], [mark.phase for mark in raw.marks]
            # A pause that is sometimes too short for a mark is one, so that its time is not another phase's.
            is_like = known is not None and known.keys == keys and _without_idle(known.phases) == _without_idle(phases)
            keeps = known is not None and is_like and len(known.phases) >= len(phases)
            order = known if keeps else self._order_of(raw, keys)
        self._alike = self._alike + 1 if order is not None and is_like else 0
        self._events, self._is_odd = [], False
        if order is not known:
            self._order, self._acts = (
                order,
                [] if order is None else [self._act_of(each, order) for each in order.places],
            )
        if self._alike >= LIKE and self._may_follow():
            self._begin(raw.marks[-1])

    def now(self) -> Moment | None:
        """Return where a followed step is; None: the present one is judged. Any thread."""
        order, times, first, tracker = self._order, self._times, self._first, self._tracker
        if not self.keys or order is None:
            return None
        phase, since, micro_steps = first.phase, first.ns, 0
        for place, ns in zip(order.places, list(times), strict=False):
            micro_steps += place.code == Code.BACKWARD
            if place.phase:
                phase, since = place.phase, ns
        return Moment(phase, since, tracker.progress + self._done + len(times), micro_steps)

    def marks(self) -> list[Mark] | None:
        """Return the marks of a followed step so far; None: the present one is judged. Any thread."""
        order, first = self._order, self._first
        if not self.keys or order is None:
            return None
        found = [first]
        for place, ns in zip(order.places, list(self._times), strict=False):
            if place.phase:
                found.append(first._replace(phase=place.phase, ns=ns, memory=None, event=None))
        return found

    def _may_follow(self) -> bool:
        tracker = self._tracker
        return not (self._budget.full or tracker.watchers or tracker.depth or self._unlabelled())

    def _begin(self, first: Mark) -> None:
        tracker, order = self._tracker, self._order
        assert order is not None
        self._first, self._sample = first, tracker.memory.sample
        self._spent_ns, self._cpu_ns = tracker.spent_ns, tracker.cpu_ns
        self._left = self._budget.ahead()
        self._arrays = cuda.arrays
        state = self._state
        self._notes_later = self._device.events is not None and (not state.forward_by or state.calls_module)
        model = own_model(self._trained.any_model())
        self._model = nothing if model is None else weakref.ref(model)
        self._see_mode(model)
        self.keys = order.keys

    def _see_mode(self, model: Any) -> None:
        self._trains, self._evaluates = getattr(model, "training", True), self._updates.in_evaluation()

    def _order_of(self, raw: StepRaw, keys: list[int]) -> Order | None:
        """Return the order of a judged step's events; None: it is none to follow another step by."""
        events, marks, light, state = self._events, raw.marks, self._tracker.light, self._state
        if not events or events[-1].code not in _ENDS or marks[0].phase != "idle" or marks[-1].phase != "idle":
            return None
        times = [event.ns for event in events]
        phases: dict[int, tuple[str, bool, bool]] = {}
        timed = self._is_timed and self._device.events is not None
        for before, mark in pairwise(marks[:-1]):
            at = bisect_right(times, mark.ns) - 1
            if at < 0 or at in phases or not mark.phase or at == len(events) - 1:
                return None
            is_measured, name = mark.phase not in light, mark.phase
            phases[at] = name, is_measured and not (name in COARSE and before.phase in COARSE), is_measured and timed
        places = [
            _Place(event.key, event.code, event.owner, event.inner, *phases.get(at, ("", False, False)))
            for at, event in enumerate(events)
        ]
        # A forward that begins no phase of that name is another model's: its batch is not the step's.
        others = any(each.code == Code.FORWARD and not each.inner and each.phase != "forward" for each in places)
        loaders = {one.owner() for one, after in pairwise(places) if after.code == Code.FETCHED}
        fetches = all(one.code == Code.FETCHING for one, after in pairwise(places) if after.code == Code.FETCHED)
        if not fetches or others or len(loaders) > 1:
            return None
        facts = state.sum_losses, state.added_ranks, state.normalised_over_ranks, self._trained.shifts_labels
        fetched = id(next(iter(loaders), None))
        names = [mark.phase for mark in marks]
        return Order(places, keys, names, _insides(places), self._counts.host_ns > 0, timed, fetched, *facts)

    def _act_of(self, place: _Place, order: Order) -> Callable[[Any, Any], object] | None:
        """Return what is done at an event."""
        own: dict[int, Callable[[Any, Any], object]] = {
            Code.FETCHED: self._fetched,
            Code.FORWARD: self._forward,
            Code.BACKWARD: self._backward,
            Code.UPDATE: self._update,
            Code.STEPPING: self._stepping,
            Code.CLIPPED: self._clipped,
        }
        act = None if place.inner else own.get(place.code)
        if place is order.places[-1]:
            return self._updated
        if not place.phase or not (place.read or place.timed or order.counts):
            return act
        if not (order.counts or place.timed) and act in (None, self._stepping):
            return self._read if act is None else self._stepping_read
        return partial(self._boundary, place, order.counts, act)

    def _read(self, _owner: Any, _what: Any) -> None:
        self._kept.append(self._sample())

    def _stepping_read(self, owner: Any, _what: Any) -> None:
        self._kept.append(self._sample())
        self._stepping(owner, None)

    def _boundary(
        self, place: _Place, counted: bool, act: Callable[[Any, Any], object] | None, owner: Any, what: Any
    ) -> None:
        counts, kept = self._counts, self._kept
        if counted:
            kept.append(counts.entered)
            kept.append(counts.host_ns)
        if place.read:
            kept.append(self._sample())
        if place.timed:
            kept.append(self._tracker.mark_event())
        if act is not None:
            act(owner, what)

    def _fetched(self, _owner: Any, found: Any) -> None:
        kept = batch.snapshot(found) if self._notes_later else None
        self._kept.append(kept)
        if kept is None:
            self._held.append(found)
            self._loading.note_fetched(found)

    def _forward(self, _owner: Any, what: tuple[Any, ...]) -> None:
        self._held.append(what)
        self._micro_steps.note_batch(what[0], what[1])

    def _backward(self, _owner: Any, what: tuple[Any, bool]) -> None:
        kept = self._kept
        self._tracker.notes.micro_steps += 1
        kept.append(self._micro_steps.fetch_losses(what[0]))
        kept.append(what[1])

    def _update(self, _owner: Any, lr: Any) -> None:
        rate = lr() if callable(lr) else lr
        self._kept.append(rate if rate is None else cuda.fetch_values(rate))

    def _stepping(self, owner: Any, _what: Any) -> None:
        rate = owner.param_groups[0]["lr"]
        self._kept.append(rate if type(rate) is float and rate else _rate_of(owner))

    def _clipped(self, _owner: Any, norm: Any) -> None:
        self._kept.append(cuda.fetch_values(norm))

    def _updated(self, _owner: Any, figures: Callable[[], dict[str, Any]] | None) -> None:
        """End the step."""
        tracker, guard, counts, kept, first = self._tracker, self._guard, self._counts, self._kept, self._first
        times, notes, order = self._times, tracker.notes, self._order
        assert order is not None
        number = found = None
        if figures is not None:
            found = {name: cuda.fetch_values(value) for name, value in figures().items() if value is not None}
            number = found.pop("number", None)
        kept.append(found)
        model = self._model()
        if model is not None and model.training is not self._trains:
            self._see_mode(model)
            self._budget.suspect()
        if self._evaluates:
            notes.evaluating = True
        left = self._left = self._left - 1
        now = times[-1]
        sample = tracker.sample = self._sample()
        ends = left <= 0 or self._budget.left > 0 or tracker.watchers
        # A full step has device times, from its beginning on; and the device may still copy more than numbers.
        timed = ends or order.timed or (self._held and cuda.arrays != self._arrays)
        event = tracker.mark_event() if timed else None
        step = tracker.step = number if number is not None and number > 0 else tracker.step + 1
        end = self._first = _new(Mark, ("idle", now, sample, event, counts.entered, counts.host_ns))
        cpu, spent = thread_time_ns(), guard.spent_ns
        cost, cpu_ns = spent - self._spent_ns, max(0, cpu - self._cpu_ns)
        self._spent_ns, self._cpu_ns = spent, cpu
        record = (step, first, end, order, times, kept, notes, cost, cpu_ns, self._budget.every)
        self._times, self._kept, spare = [], [], self.spare
        tracker.notes = spare.popleft() if spare else Notes()
        self._costs.append((cost, now - first.ns))
        self._done += len(times)
        if self._held:
            self._held.clear()
        self._outbox.hand_over_step(_new(Followed, record))
        if ends:
            self._decide()

    def _decide(self) -> None:
        """Decide whether to follow the next steps, too."""
        tracker, order = self._tracker, self._order
        self._count_costs()
        for watcher in tracker.watchers:
            watcher(order.phases[-2] if order is not None else "idle", "end")
        if self._may_follow():
            self._left = self._budget.ahead()
            self._arrays = cuda.arrays
        else:
            self._rest()

    def _rest(self) -> None:
        """Judge events again; the tracker is at the end of the step before, or where a replay begins."""
        tracker, first = self._tracker, self._first
        self.keys = []
        tracker.marks, tracker.phase, tracker.phase_ns = [first], first.phase, first.ns
        tracker.progress += self._done + 1
        tracker.spent_ns, tracker.cpu_ns = self._spent_ns, self._cpu_ns
        tracker.step_collectives = first.collectives
        self._done = 0
        self._count_costs()

    def _count_costs(self) -> None:
        costs, self._costs = self._costs, []
        for number, (cost, step_ns) in enumerate(costs, self._tracker.step - len(costs) + 1):
            self._budget.end_step(number, cost, step_ns)

    def _differs(self, code: int) -> None:
        """Handle an event that is not the next one: a part of the one before, which is ignored, or of another step."""
        begun = _SCOPES.get(Code(code))
        if begun is None or not begun[1] or not self.is_inside(begun[0]):
            self._replay()

    def _replay(self) -> None:
        """Give the events of the unfinished step to the parts that judge."""
        tracker, order, times = self._tracker, self._order, self._times
        kept, held = self._kept, deque(self._held)
        self._rest()
        self._times, self._kept, self._alike = [], [], 0
        self._held.clear()
        if not times or order is None:
            return
        notes = tracker.notes
        notes.micro_steps = 0
        notes.restore_batches(BatchesNoted())
        done = Followed(0, tracker.marks[0], tracker.marks[0], order, times, kept, notes, 0, 0, 1)
        memory, mark_event, clock = tracker.memory, tracker.mark_event, tracker.clock
        events = list(done._events())
        tracker.memory = _Given(memory, [figures[0] for _, _, figures, _ in events if figures[0] is not None])
        marked = deque(figures[1] for _, _, figures, _ in events if figures[1] is not None)
        tracker.mark_event = lambda: marked.popleft() if marked else mark_event()
        fetched_ns = sum(after[1] - one[1] for one, after in pairwise(events) if after[0].code == Code.FETCHED)
        try:
            with self._loading.repeating():
                for place, ns, _, own in events:
                    tracker.clock = lambda ns=ns: ns  # type: ignore[misc]
                    self._events.append(_Event(place.key, ns, place.code, place.owner, place.inner))
                    if not place.inner:
                        self.handlers[place.code](*_arguments(place, own, held))
        finally:
            tracker.memory, tracker.mark_event, tracker.clock = memory, mark_event, clock
        tracker.notes.fetch_ns = fetched_ns


def _arguments(place: _Place, own: tuple[Any, ...], held: "deque[Any]") -> tuple[Any, ...]:
    """Return the arguments of the method that judges an event; ``own`` is what was kept of it."""
    owner = place.owner()
    match place.code:
        case Code.FETCHED:
            return (held.popleft() if own[0] is None else own[0],)
        case Code.FORWARD:
            return owner, *held.popleft()
        case Code.BACKWARD:
            return own
        case Code.UPDATE:
            return owner, own[0]
        case Code.CLIPPED:
            return own
        case Code.FETCHING | Code.STEPPING | Code.ZEROING:
            return (owner,)
        case _:
            return ()


def _is_odd(raw: StepRaw) -> bool:
    notes = raw.notes
    skipped = notes.overflow == 1  # a flag on its way from the device is not waited for
    return bool(notes.parts or notes.repeats or notes.discarded or skipped or notes.pending or notes.dropped)


def _without_idle(phases: list[str]) -> list[str]:
    return [phase for phase in phases if phase != "idle"]


def _insides(places: list[_Place]) -> list[frozenset[str]]:
    found, inside = [frozenset[str]()], frozenset[str]()
    for place in places:
        name, begins = _SCOPES.get(Code(place.code), ("", False))
        if name and not place.inner:
            inside = inside | {name} if begins else inside - {name}
        found.append(inside)
    return found


def _rate_of(optimizer: Any) -> Any:
    rate = learning_rate([group.get("lr") for group in optimizer.param_groups])
    return None if rate is None else cuda.fetch_values(rate)
