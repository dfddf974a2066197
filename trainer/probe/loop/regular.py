"""Follows a step that goes like the ones before at a fraction of the cost: its events are only compared with theirs.

Most of the probe's time is spent on judging what a script does: which forward trains, where an evaluation begins. Once
the events of some steps have come in the same order and made the same phases, a coarse step (``phases.budget``) is
followed by that order. Between two events the training fills all caches, so what an event costs is the number of
functions and objects that it touches: it only takes its place in the order and appends its time, and what must be read
at that moment, to the log of a block of steps; losses and norms stay on the device until the block's end. The publisher
makes a ``StepRaw`` of each step (``Followed``). Any other event is *replayed*: the parts that judge get the events of
the unfinished step, with their times and samples, and go on from there.
"""

import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from itertools import islice, pairwise
from threading import Lock, get_ident
from time import perf_counter_ns, thread_time_ns
from typing import Any, NamedTuple

from torch import Tensor

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

    def width(self) -> int:
        """Return the number of items of a step in a log, with the one of its end."""
        return 1 + sum(1 + _figures(each, self.counts) + _kept(each) for each in self.places)

    def events(self, log: list[Any], first: Mark) -> "list[_Noted]":
        """Return the events of one step's log, which may be unfinished; ``first`` is its first mark."""
        items, found = iter(log), list[_Noted]()
        for place in self.places:
            ns = next(items, None)
            if ns is None:
                break
            counted, sample, event = (first.collectives, first.collective_ns), None, None
            if place.phase:
                counted = (next(items, 0), next(items, 0)) if self.counts else counted
                sample = next(items, None) if place.read else None
                event = next(items, None) if place.timed else None
            found.append(_Noted(place, ns, (sample, event, *counted), tuple(islice(items, _kept(place)))))
        return found


class _Noted(NamedTuple):
    """An event of a followed step."""

    place: _Place
    ns: int
    figures: tuple[Any, ...]
    """Of a mark: sample, device event, collectives and their time."""
    kept: tuple[Any, ...]
    """What else was kept of it."""


class _End(NamedTuple):
    """The end of a followed step, the last item of its log."""

    sample: Any
    event: Any
    collectives: int
    collective_ns: int
    number: int
    spent_ns: int
    """What the probe has cost by then (``Guard``)."""
    notes: Notes | None = None
    """None: the step has no other notes than the log."""
    found: dict[str, Any] | None = None
    """Figures that an engine reported."""


class Followed:
    """A block of steps in a row as the training thread records them; ``steps`` is for another thread."""

    __slots__ = (
        *("before", "cpu_ns", "evaluating", "every", "first", "kept", "log", "number", "order", "spent_ns", "stream"),
    )

    def __init__(self, order: Order, number: int, first: Mark, spent_ns: int, every: int, before: int) -> None:
        self.order, self.number, self.first, self.log = order, number, first, list[Any]()
        """``number`` is that of the step before it."""
        self.spent_ns, self.evaluating, self.every = spent_ns, False, every
        """``evaluating``: the trained model is in evaluation mode at its end."""
        self.cpu_ns: int | None = None
        """CPU time of the training thread; None until the block is given to the publisher."""
        self.before = before
        """Items of the blocks before it, since a step was judged."""
        self.kept: list[cuda.Kept] = []
        """Losses and norms that are still on the device, for ``Regular.fetch``."""
        self.stream: Any = None
        """The CUDA stream on which they were computed."""

    def steps(self) -> list[StepRaw]:
        """Return its finished steps as the parts that judge would have recorded them; any thread, and again."""
        log, first, spent, offset = list(self.log), self.first, self.spent_ns, wall_offset_ns()
        found: list[StepRaw] = []
        width = self.order.width()
        cpu_ns = (self.cpu_ns or 0) // max(1, len(log) // width)
        for begin in range(0, len(log) - width + 1, width):
            last = self._end(log[begin + width - 1], len(found))
            events = self.order.events(log[begin : begin + width - 1], first)
            ending: Mark = _new(Mark, ("idle", events[-1].ns, *last[:4]))
            marks = [first, *(Mark(each.place.phase, each.ns, *each.figures) for each in events if each.place.phase)]
            notes = Notes() if last.notes is None else last.notes
            with _filling:
                if not notes.complete:
                    notes.complete = True
                    notes.evaluating = self.evaluating
                    _complete(notes, self.order, events, last)
            found.append(
                StepRaw(
                    *(last.number, [*marks, ending], (ending.ns + offset) / 1e9, notes, last.spent_ns - spent, cpu_ns),
                    *(self.every, True, True),
                )
            )
            first, spent = ending, last.spent_ns
        return found

    def present(self) -> tuple[Mark, list[_Noted], int]:
        """Return the unfinished step: its first mark, its events, and its place in the log."""
        log, first, width = list(self.log), self.first, self.order.width()
        begin = len(log) // width * width
        if begin:
            first = _new(Mark, ("idle", log[begin - 2], *self._end(log[begin - 1], 0)[:4]))
        return first, self.order.events(log[begin:], first), begin

    def _end(self, end: Any, place: int) -> _End:
        """Return the end of the step at a place in the block, of which there may be two figures alone."""
        if type(end) is _End:
            return end
        sample, spent_ns = end
        return _End(sample, None, self.first.collectives, self.first.collective_ns, self.number + place + 1, spent_ns)


def _complete(notes: Notes, order: Order, events: list[_Noted], last: _End) -> None:
    before = 0
    notes.micro_steps = sum(each.place.code == Code.BACKWARD and not each.place.inner for each in events)
    for place, ns, _, kept in events:
        if place.inner:
            pass
        elif place.code == Code.FETCHED:
            notes.fetch_ns += ns - before
            notes.fetches[order.fetched] = notes.fetches.get(order.fetched, 0) + 1
            if kept[0] is not None and batch.snapshot(kept[0]) is not None:
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
    for name, value in (last.found or {}).items():
        setattr(notes, name, value)


_KEPT = [0] * _CODES
"""Number of items that are kept of an event."""
for _code, _items in {Code.FETCHED: 1, Code.UPDATE: 1, Code.STEPPING: 1, Code.CLIPPED: 1, Code.BACKWARD: 2}.items():
    _KEPT[_code] = _items
_filling = Lock()


def _kept(place: _Place) -> int:
    return 0 if place.inner else _KEPT[place.code]


def _figures(place: _Place, counts: bool) -> int:
    return 2 * counts + place.read + place.timed if place.phase else 0


class _Given:
    """The memory back end during a replay: the samples that were taken already, then new ones."""

    def __init__(self, real: MemoryBackend, samples: list[Any]) -> None:
        self._real, self._samples = real, deque(samples)
        self.measure, self.device_index = real.measure, real.device_index
        self.tidy, self.read = real.tidy, real.read

    def sample(self) -> Any:
        """Return the next sample."""
        return self._samples.popleft() if self._samples else self._real.sample()


class _Next:
    """The event that is expected next in a followed step."""

    __slots__ = ("act", "after", "inside", "key")

    def __init__(self, place: _Place, inside: frozenset[str], act: Callable[[Any, Any], object] | None) -> None:
        self.key, self.inside, self.act = place.key, inside, act
        self.after: _Next | None = None


class Regular:
    """Follows regular steps; for the training thread alone, but for what says that any thread may call it."""

    __slots__ = (
        *("_guard", "_kept", "_left", "_log", "_sample", "_scalar", "_steps", "place"),
        *("_block", "_budget", "_chain", "_counts", "_held", "_keeps", "_model", "_run", "_timed", "_tracker"),
        *("_arrays", "_cpu_ns", "_done", "_evaluates", "_made_for", "_notes_later", "_outbox", "_spent_ns", "_trains"),
        *("_alike", "_events", "_is_odd", "_is_timed", "_loading", "_micro_steps", "_order", "_state", "_trained"),
        *("_awaited", "_device", "_has_kept", "_is_plain", "_unlabelled", "_updates", "handlers", "spare"),
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
        self.place: _Next | None = None
        """The next event of a followed step; None: the present step is judged."""
        self.spare: deque[Notes] = deque()
        """Empty notes for the next steps, which the publisher makes."""
        self._order: Order | None = None
        self._chain: _Next
        """First event of a step."""
        self._made_for: tuple[Any, ...] = ()
        """What it depends on."""
        self._alike = 0
        self._events: list[_Event] = []
        """The present step's events, while it is judged."""
        self._is_odd = False
        """Whether the present step had an event that is no ``Code``."""
        self._block: Followed | None = None
        self._log: list[Any] = []
        """That of the block."""
        self._timed = False
        """Whether each step's end is timed on the device."""
        self._kept: list[cuda.Kept] = []
        """Losses and norms of the block that are still on the device."""
        self._keeps = True
        """Whether they may stay there: no script has overwritten one. The publisher finds that."""
        self._has_kept = False
        """Whether a loss of the block was kept, and the next ones need not be looked at."""
        self._scalar: Callable[[Any], Any] | None = None
        """Keeps one; None: each is copied at once."""
        self._awaited: Any = None
        """A lock on which the publisher waits for the next backward."""
        self._steps = self._left = self._run = 0
        """Steps of the block, those of them that have not ended, and further ones until a full step."""
        self._done = 0
        """Events and items of the blocks since a step was judged."""
        self._held: list[Any] = []
        """Batches of the present step that were noted at once; for a replay."""
        self._spent_ns = self._cpu_ns = self._arrays = 0
        self._sample: Callable[[], Any] = nothing
        self._model: Callable[[], Any] = nothing
        self._notes_later = False
        """Whether a batch is noted at its fetch, and its tensors are counted later."""
        self._is_plain = False
        """Whether the latest batch that was looked at can be: it has tensors of the host alone."""
        self._trains = self._evaluates = False
        """Mode of the model, and whether that of its layers is evaluation."""
        loop.tracker.followed, loop.tracker.followed_marks = self.now, self.marks
        outbox.under_way, outbox.ended = self.unsent, self.ended

    def follows(self, code: int, owner: Any = None, what: Any = None) -> bool:
        """Handle an event of a followed step; return False if it is to be judged. Any thread."""
        place = self.place
        if place is None:
            return False
        guard = self._guard
        if guard.thread != get_ident() or not guard.enabled:
            return False
        now = perf_counter_ns()
        if place.key != id(owner) + code:
            self._differs(code)
            return False
        self._log.append(now)
        self.place = place.after
        act = place.act
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
        if self.place is None and len(self._events) < MOST_EVENTS:
            reference = nothing if owner is None else weakref.ref(owner)
            self._events.append(_Event(id(owner) + code, self._tracker.clock(), code, reference, inner))

    def leave(self) -> None:
        """Handle an event that is no ``Code``: judge the step from here on."""
        self._is_odd = True
        if self.place is not None:
            self._replay()

    def is_inside(self, scope: str) -> bool:
        """Return whether a ``forward``, ``backward`` or ``update`` of a followed step is under way."""
        place = self.place
        return place is not None and scope in place.inside

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
        self._order = order
        if self._alike >= LIKE and self._may_follow():
            self._begin(raw.marks[-1])

    def now(self) -> Moment | None:
        """Return where a followed step is; None: the present one is judged. Any thread."""
        block = self._block
        if self.place is None or block is None:
            return None
        first, events, *_ = block.present()
        phase, since, micro_steps = first.phase, first.ns, 0
        for place, ns, *_ in events:
            micro_steps += place.code == Code.BACKWARD
            if place.phase:
                phase, since = place.phase, ns
        return Moment(phase, since, self._tracker.progress + block.before + len(block.log), micro_steps)

    def marks(self) -> list[Mark] | None:
        """Return the marks of a followed step so far; None: the present one is judged. Any thread."""
        block = self._block
        if self.place is None or block is None:
            return None
        first, events, *_ = block.present()
        unread = first._replace(memory=None, event=None)
        return [first, *(unread._replace(phase=each.phase, ns=ns) for each, ns, *_ in events if each.phase)]

    def ended(self) -> int:
        """Return the number of finished steps of the block under way; any thread."""
        block = self._block
        return 0 if block is None or block.cpu_ns is not None else self._steps - self._left

    def unsent(self) -> list[StepRaw]:
        """Return the finished steps of the block under way; any thread."""
        block = self._block
        return [] if block is None or block.cpu_ns is not None else block.steps()

    def _may_follow(self) -> bool:
        tracker = self._tracker
        return not (self._budget.full or tracker.watchers or tracker.depth or self._unlabelled())

    def _begin(self, first: Mark) -> None:
        tracker, order, state = self._tracker, self._order, self._state
        assert order is not None
        self._sample, tracker.touched = tracker.memory.sample, False
        self._spent_ns, self._cpu_ns = tracker.spent_ns, tracker.cpu_ns
        self._arrays, self._timed = cuda.arrays, order.timed
        self._notes_later = self._device.events is not None and (not state.forward_by or state.calls_module)
        model = own_model(self._trained.any_model())
        self._model = nothing if model is None else weakref.ref(model)
        self._see_mode(model)
        made_for = order, self._notes_later
        if made_for != self._made_for:
            self._made_for, self._chain = made_for, self._chain_of(order)
        self._run = self._budget.ahead()
        self._begin_block(order, first)

    def _begin_block(self, order: Order, first: Mark) -> None:
        budget, step = self._budget, self._tracker.step
        steps = self._steps = self._left = min(budget.block - step % budget.block, self._run)
        self._run -= steps
        self._is_plain = self._has_kept = False  # the first batch and loss of each block are looked at
        self._scalar = self._keep if steps > 1 and self._keeps and not self._micro_steps.overwrites else None
        block = self._block = Followed(order, step, first, self._spent_ns, budget.every, self._done)
        self._log = block.log
        self.place = self._chain

    def _chain_of(self, order: Order) -> _Next:
        """Return the first event of a step in that order; each has the one after it."""
        found = [
            _Next(each, inside, self._act_of(each, order))
            for each, inside in zip(order.places, order.inside, strict=False)
        ]
        for one, after in pairwise(found):
            one.after = after
        return found[0]

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
        own: dict[int, Callable[[Any, Any], object] | None] = {
            Code.FETCHED: self._keep_batch,
            Code.FORWARD: self._forward,
            Code.BACKWARD: self._backward,
            Code.UPDATE: self._update,
            Code.STEPPING: self._stepping,
            Code.CLIPPED: self._clipped,
        }
        act = None if place.inner else own.get(place.code)
        if place is order.places[-1]:
            is_bare = self._notes_later and not order.timed and place.code == Code.STEPPED
            return self._end_within if is_bare else self._updated
        if not place.phase or not (place.read or place.timed or order.counts):
            return act
        if not (order.counts or place.timed) and act in (None, self._stepping):
            return self._read if act is None else self._stepping_read
        return partial(self._boundary, place, order.counts, act)

    def _read(self, _owner: Any, _what: Any) -> None:
        self._log.append(self._sample())

    def _stepping_read(self, owner: Any, _what: Any) -> None:
        self._log.append(self._sample())
        self._stepping(owner, None)

    def _boundary(
        self, place: _Place, counted: bool, act: Callable[[Any, Any], object] | None, owner: Any, what: Any
    ) -> None:
        counts, log = self._counts, self._log
        if counted:
            log.append(counts.entered)
            log.append(counts.host_ns)
        if place.read:
            log.append(self._sample())
        if place.timed:
            log.append(self._tracker.mark_event())
        if act is not None:
            act(owner, what)

    def _fetched(self, _owner: Any, found: Any) -> None:
        kept = batch.snapshot(found) if self._notes_later else None
        self._log.append(kept)
        self._is_plain = kept is not None
        if kept is None:
            self._held.append(found)
            self._loading.note_fetched(found)

    def _keep_batch(self, owner: Any, found: Any) -> None:
        kind = type(found)
        if self._is_plain and (kind is dict or kind is list or kind is tuple):
            self._log.append(found.copy() if kind is dict else tuple(found))
        else:
            self._fetched(owner, found)

    def _forward(self, _owner: Any, what: tuple[Any, ...]) -> None:
        self._held.append(what)
        self._micro_steps.note_batch(what[0], what[1])

    def _backward(self, _owner: Any, what: tuple[Any, bool]) -> None:
        log = self._log
        if not self._notes_later:  # a forward takes the batch of its micro-step
            self._tracker.notes.micro_steps += 1
        losses, micro_steps = what[0], self._micro_steps
        is_plain = len(losses) == 1 and type(losses[0]) is Tensor and micro_steps.unscaled is None
        if self._has_kept and is_plain and not cuda.has_captured:
            kept = cuda.Kept(losses[0])
            self._kept.append(kept)
            log.append([kept])
        else:
            found = micro_steps.fetch_losses(losses, self._scalar)
            self._has_kept = len(found) == 1 and type(found[0]) is cuda.Kept
            log.append(found)
        log.append(what[1])
        awaited = self._awaited
        if awaited is not None:
            self._awaited = None
            awaited.release()

    def await_backward(self, seconds: float) -> bool:
        """Wait so long for a backward: autograd runs it without the interpreter's lock. For the publisher.

        Returns whether one is under way; False at once where steps are judged.
        """
        if self.place is None or self.is_inside("backward"):
            return self.place is not None
        awaited = Lock()
        awaited.acquire()
        self._awaited = awaited
        has_begun = awaited.acquire(timeout=seconds)
        self._awaited = None
        return has_begun

    def _keep(self, scalar: Any) -> Any:
        """Leave a loss or norm on the device until the block's end, or a replay."""
        if not cuda.can_be_kept(scalar):
            return cuda.fetch_scalar(scalar)
        kept = cuda.Kept(scalar)
        self._kept.append(kept)
        return kept

    def fetch(self, block: Followed) -> bool:
        """Begin to copy what a block's steps left on the device; False: a graph is captured. For the publisher."""
        found = cuda.fetch_kept_on(block.stream, block.kept) if block.kept else True
        if found is False:
            self._keeps = False
        return found is not None

    def _update(self, _owner: Any, lr: Any) -> None:
        rate = lr() if callable(lr) else lr
        self._log.append(rate if rate is None else cuda.fetch_values(rate))

    def _stepping(self, owner: Any, _what: Any) -> None:
        rate = owner.param_groups[0]["lr"]
        self._log.append(rate if type(rate) is float and rate else _rate_of(owner))

    def _clipped(self, _owner: Any, norm: Any) -> None:
        self._log.append(cuda.fetch_values(norm, self._scalar))

    def _updated(self, _owner: Any, figures: Callable[[], dict[str, Any]] | None) -> None:
        """End the step; in few functions, as all code is cold here."""
        tracker, counts, log = self._tracker, self._counts, self._log
        left = self._left = self._left - 1
        number = found = own = event = None
        if figures is not None:
            found = figures()
            number = found.pop("number", None)
            scalar = self._scalar
            found = {name: cuda.fetch_values(value, scalar) for name, value in found.items() if value is not None}
        if not left:
            model = self._model()
            if model is not None and model.training is not self._trains:
                self._see_mode(model)
                self._budget.suspect()
        step = tracker.step = number if number is not None and number > 0 else tracker.step + 1
        sample = tracker.sample = self._sample()
        # A full step has device times, from its beginning on; and the device may still copy more than numbers.
        ends = not left and (self._run <= 0 or self._budget.left > 0 or bool(tracker.watchers))
        held, notes = self._held, tracker.notes
        if ends or self._timed or (held and cuda.arrays != self._arrays):
            event = tracker.mark_event()
        if held or tracker.touched:
            own, spare, tracker.touched = notes, self.spare, False
            tracker.notes = spare.popleft() if spare else Notes()
            if held:
                held.clear()
        spent = self._guard.spent_ns
        log.append(_new(_End, (sample, event, counts.entered, counts.host_ns, step, spent, own, found)))
        if left:
            self.place = self._chain
        else:
            self._end_block(ends)

    def _end_within(self, owner: Any, figures: Any) -> None:
        """End a step in the middle of a block, of a rank that trains alone."""
        tracker = self._tracker
        if self._left == 1 or self._held or tracker.touched:
            self._updated(owner, figures)
            return
        self._left -= 1
        tracker.step += 1
        self._log.append((self._sample(), self._guard.spent_ns))
        self.place = self._chain

    def _end_block(self, ends: bool) -> None:
        """Hand the block over, and begin the next one; ``ends``: decide whether to follow the next steps, too."""
        block, order, tracker = self._block, self._order, self._tracker
        assert block is not None
        assert order is not None
        log = block.log
        first: Mark = _new(Mark, ("idle", log[-2], *log[-1][:4]))
        self._hand_over(block)
        if ends:
            self._budget.passed(tracker.step)
            for watcher in tracker.watchers:
                watcher(order.phases[-2], "end")
            if not self._may_follow():
                self._rest(first)
                return
            self._run = self._budget.ahead()
            self._arrays = cuda.arrays
        self._begin_block(order, first)

    def _hand_over(self, block: Followed) -> None:
        """Give a block of finished steps to the publisher."""
        if self._kept:
            block.kept, self._kept, block.stream = self._kept, [], self._device.events.stream()
        log, cpu = block.log, thread_time_ns()
        block.cpu_ns, self._cpu_ns = max(0, cpu - self._cpu_ns), cpu
        end = log[-1]
        self._spent_ns = end.spent_ns if type(end) is _End else end[1]
        block.evaluating = self._evaluates
        self._done += len(log)
        self._outbox.hand_over_steps(block, self._steps - self._left)

    def _rest(self, first: Mark) -> None:
        """Judge events again; the tracker is at the end of the step before, or where a replay begins."""
        tracker = self._tracker
        tracker.marks, tracker.phase, tracker.phase_ns = [first], first.phase, first.ns
        self.place = self._block = None
        tracker.progress += self._done + 1
        tracker.spent_ns, tracker.cpu_ns = self._spent_ns, self._cpu_ns
        tracker.sample, tracker.step_collectives = first.memory, first.collectives
        self._done = 0

    def _differs(self, code: int) -> None:
        """Handle an event that is not the next one: a part of the one before, which is ignored, or of another step."""
        begun = _SCOPES.get(Code(code))
        if begun is None or not begun[1] or not self.is_inside(begun[0]):
            self._replay()

    def _replay(self) -> None:
        """Give the events of the unfinished step to the parts that judge."""
        tracker, block = self._tracker, self._block
        assert block is not None
        held = deque(self._held)
        first, events, begin = block.present()
        if self._kept and not cuda.fetch_kept(self._kept, at_once=True):
            self._keeps = False
        if begin:
            del block.log[begin:]
            self._hand_over(block)
        self._rest(first)
        self._budget.passed(tracker.step)
        self._alike = 0
        self._held.clear()
        if not events:
            return
        notes = tracker.notes
        notes.micro_steps = 0
        notes.restore_batches(BatchesNoted())
        memory, mark_event, clock = tracker.memory, tracker.mark_event, tracker.clock
        tracker.memory = _Given(memory, [each.figures[0] for each in events if each.figures[0] is not None])
        marked = deque(each.figures[1] for each in events if each.figures[1] is not None)
        tracker.mark_event = lambda: marked.popleft() if marked else mark_event()
        fetched_ns = sum(after.ns - one.ns for one, after in pairwise(events) if after.place.code == Code.FETCHED)
        try:
            with self._loading.repeating():
                for place, ns, _, kept in events:
                    tracker.clock = lambda ns=ns: ns  # type: ignore[misc]
                    self._events.append(_Event(place.key, ns, place.code, place.owner, place.inner))
                    if not place.inner:
                        self.handlers[place.code](*_arguments(place, kept, held))
        finally:
            tracker.memory, tracker.mark_event, tracker.clock = memory, mark_event, clock
        tracker.notes.fetch_ns = fetched_ns


def _arguments(place: _Place, own: tuple[Any, ...], held: "deque[Any]") -> tuple[Any, ...]:
    """Return the arguments of the method that judges an event; ``own`` was kept of it."""
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
