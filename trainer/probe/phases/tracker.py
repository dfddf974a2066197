"""The phase machine: the training thread's present phase, and a mark at every phase boundary.

Only the training thread calls the methods; the publisher reads attributes. Nothing here waits, and nothing is
computed that the publisher could compute.
"""

import contextlib
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from statistics import median
from time import perf_counter_ns, thread_time_ns, time, time_ns
from typing import Any, NamedTuple

from ....protocol.messages.telemetry import STEP_PHASES
from ..device.memory import MemoryBackend, Reading
from ..guard import Guard, nothing
from .budget import Budget


def wall_offset_ns() -> int:
    """Return what to add to ``time.perf_counter_ns`` for nanoseconds since the epoch.

    A pause between the two clocks' readings would shift all marks: of five pairs the fastest counts.
    """
    looks = [(perf_counter_ns(), time_ns(), perf_counter_ns()) for _ in range(5)]
    before, now, after = min(looks, key=lambda look: look[2] - look[0])
    return now - (before + after) // 2


class Mark(NamedTuple):
    """The beginning of a phase (``ns`` of ``time.perf_counter_ns``), which ends the previous one."""

    phase: str
    """Empty: the previous phase continues, and only the peak in ``memory`` counts (the script reset its counters)."""
    ns: int
    memory: Any
    """The memory back end's raw sample, with peaks since the previous mark; None: use the next mark's figures (in a
    coarse step: nothing was read here). The same object as in an earlier mark: nothing was measured in between."""
    event: Any  # A recorded CUDA event, or None; if ``memory`` is None too, use the next mark's event
    collectives: int
    collective_ns: int


class BatchCounts(NamedTuple):
    """Counts of one micro-batch, by the training loop."""

    tokens: int
    label_tokens: int
    pairs: int  # Pairs of query and key that attention computes within documents; 0: not known
    longest: int  # Tokens of the longest document; 0: not known
    samples: int | None = None  # Rows; None: as many as the forward's batch has


class BatchesNoted(NamedTuple):
    """State of the notes on batches: samples, tokens, lengths of ``tokens``, ``labels`` and ``seen``, the shape."""

    samples: int = 0
    padded_tokens: int = 0
    tokens: int = 0
    labels: int = 0
    seen: int = 0
    shape: list[int] = []  # noqa: RUF012


@dataclass(slots=True)
class Part:
    """The updates that one of several engines or optimizers made in a step; the latest figures count."""

    name: str
    count: int = 0
    losses: list[list[Any]] = field(default_factory=list)
    accumulation: int = 0
    lr: Any = None
    grad_norm: Any = None
    loss_scale: Any = None
    overflow: Any = False


@dataclass(slots=True, eq=False)
class Notes:
    """Notes of an unfinished step. Numbers may still be in transfer from the device (see ``values``)."""

    losses: list[Any] = field(default_factory=list)  # Scalars that went ``backward`` since any optimizer's last update
    sum_losses: bool = False  # Whether losses add up to the step's although an engine updates (a Trainer divided them)
    reported: list[Any] = field(default_factory=list)  # Losses of micro-steps as the script reported them
    trainer_losses: list[Any] = field(default_factory=list)
    """Results of a Trainer's ``training_step``; they add up to the step's loss."""
    accumulation: int = 0  # Micro-steps by which the engine, or a pipeline's schedule, divides losses; 0: neither does
    added_ranks: float = 1.0
    """Number of ranks whose losses add up; a rank's loss is multiplied by it, so that their mean is the sum."""
    fetches: dict[int, int] = field(default_factory=dict)
    fetch_ns: int = 0
    parts: dict[int, Part] = field(default_factory=dict)
    """With several engines or optimizers: the updates of each, by its ``id``, in the order of their first ones."""
    owner: int = 0  # Key of the engine or optimizer whose figures are the step's
    labels: list[Any] = field(default_factory=list)
    """Label tensors of the micro-batches whose loss is a mean over them."""
    reported_loss: float | None = None
    lr: Any = None
    grad_norm: Any = None
    loss_scale: Any = None
    overflow: Any = False
    micro_steps: int = 0
    discarded: bool = False
    """Gradients were set to zero after a backward and before any update. The next backward is of the same batch
    (SAM's second pass), or of another one if a batch was fetched."""
    repeats: int = 0  # Further evaluations of a closure (line search): of the same batch, so no micro-steps
    shape: list[int] = field(default_factory=list)
    counts: list[BatchCounts] = field(default_factory=list)
    """Counts of micro-batches from the loop itself; they replace the hooks' counts."""
    flops: float | None = None
    samples: int = 0
    padded_tokens: int = 0
    tokens: list[Any] = field(default_factory=list)
    """Token count of each micro-batch, or its mask, which the publisher counts."""
    waits: list[tuple[str, Any, Any]] = field(default_factory=list)
    """Waits of the stream for other ranks: the phase, and the CUDA events at both ends."""
    seen: list[Any] = field(default_factory=list)
    """The tensors of each micro-batch (``values.batch.Seen``), which the publisher examines."""
    received: list[Any] = field(default_factory=list)  # The same of forwards: of batches without labels, or not noted
    targets: list[Any] = field(default_factory=list)
    """Rows of token ids of a micro-batch, in one tensor or several, and the labels of its loss, flat."""
    attended: list[Any] = field(default_factory=list)
    """What models made their attention masks from (``values.signs.Attended``)."""
    weights: Any = None  # Sampled weights after the update (``values.signs.WeightSampler``)
    clipped_before: bool = False  # Gradients were clipped before the first backward of the step, and not since
    gradients: Any = None
    """Sampled gradients at the update before, and the same before the first backward since, at the beginning."""
    weights_before: Any = None  # The same before the training's first update
    left_out: tuple[int, str] = 0, ""
    """Then, or later: how many parameters with gradients no optimizer updates, and the name of the first."""
    detached: tuple[int, str] = 0, ""  # The same of most of an optimizer's parameters, which have had no gradient
    clipped: str = ""
    """How gradients were lost by mistake: clipped to a norm of ``zero``, or while they were ``scaled``, or
    ``discarded``: set to zero before the update; ``replaced``: so those of all but the last micro-batch; in judged
    steps."""
    zeroed: bool = False  # Gradients of a micro-batch of this update were zeroed, and the same dataloader gave another
    gradient: Callable[[], Any] = nothing
    """Weak reference to a gradient of the last backward, if some were ``zeroed`` before; of the last zeroing."""
    evaluating: bool = False  # The trained model was in evaluation mode at the update, which changes its layers
    no_gradients: bool = False  # No parameter of the optimizer had a gradient at the update; looked at in full steps
    apart: int = 0  # Micro-steps of this update whose gradients no wrapper reduced; looked at in judged steps
    never_reduced: bool = False  # None of its gradients was reduced over the ranks; looked at in full steps
    evaluating_part: str = ""  # Name of a part that was, though the model was not; in full steps
    unloaded: bool = False  # An engine loaded the weights of a checkpoint before it, and has those that it had
    weights_lost: bool = False  # Weights were not finite at the backward of a loss that was not
    unfetched: int = 0  # Backwards without a batch of the DataLoader that the training uses
    applied: int = 0  # Micro-steps before the latest update of another engine or optimizer than the owner of the steps
    pending: int = 0  # Micro-batches of this update that are of an earlier pass over the data
    dropped: int = 0  # Micro-batches at the end of an earlier pass whose gradients were set to zero before an update
    complete: bool = False  # What was kept of a followed step's events (``loop.regular``) was added

    def end_part(self, key: int, name: str) -> None:
        """Move the figures since the last update to the part of the engine or optimizer that has now updated."""
        part = self.parts.setdefault(key, Part(name))
        part.count += 1
        self.applied = self.micro_steps
        part.losses.append(self.losses)
        part.lr, part.accumulation = self.lr, self.accumulation
        part.grad_norm, part.loss_scale, part.overflow = self.grad_norm, self.loss_scale, self.overflow
        self.losses, self.accumulation, self.overflow = [], 0, False
        self.lr = self.grad_norm = self.loss_scale = None

    def batches(self) -> BatchesNoted:
        """Return the state of the notes on batches, for ``restore_batches``."""
        lengths = len(self.tokens), len(self.labels), len(self.seen)
        return BatchesNoted(self.samples, self.padded_tokens, *lengths, self.shape)

    def restore_batches(self, before: BatchesNoted) -> None:
        """Remove the batches noted since ``before``: they are not trained on."""
        self.samples, self.padded_tokens, tokens, labels, seen, self.shape = before
        del self.tokens[tokens:], self.labels[labels:], self.seen[seen:]

    def drop_batch(self) -> None:
        """Remove a batch whose gradients were set to zero after its backward: the script left it out."""
        self.zeroed |= len(self.fetches) == 1
        self.discarded, self.micro_steps, self.losses = False, 0, []
        self.restore_batches(BatchesNoted())


class ClosingRaw(NamedTuple):
    """Phases of the training thread after its last step, for the rank's closing record; no update."""

    raw: "StepRaw"


class StepRaw(NamedTuple):
    """One finished optimizer update as the training thread recorded it."""

    number: int
    marks: list[Mark]  # Marks of the step; the last one is also the next step's first
    ended: float  # Seconds since the epoch at the last mark
    notes: Notes
    cost_ns: int
    cpu_ns: int = 0  # CPU time of the training thread in this step
    every: int = 1  # Every how many steps memory is read at each boundary of phases (``Budget``)
    coarse: bool = False  # Memory was read at the step's ends and around the optimizer's phase alone
    followed: bool = False  # The step was followed by the order of earlier ones: it has no device times


class Moment(NamedTuple):
    """Where the training thread is."""

    phase: str
    since_ns: int  # When that phase began (``time.perf_counter_ns``)
    progress: int
    micro_steps: int


FETCHING: frozenset[str] = frozenset(("data",))
"""Phases whose beginning is marked by its time alone: a sample of CUDA's figures costs 25 us, and the next full mark's
figures are used. Memory that a script frees after its update, above all by zero_grad, belongs to ``idle`` in any case.
"""

DRIVEN: frozenset[str] = frozenset(("data", "idle"))
"""The same if a framework drives the steps: between backward and update it does not change memory, and gradients are
freed inside the update. So a step's first forward begins with the figures of the step's beginning, unless something was
measured in between: device memory of the batch counts as the forward's."""

COARSE: frozenset[str] = frozenset(("data", "forward", "backward", "idle"))
"""Phases between which a coarse step reads no memory."""

RECENT = 400  # Number of collectives whose names and sizes are kept, to compare ranks that are stuck in different ones

MOST_MARKS = 8_000  # Marks of an unfinished step beyond which the oldest are merged: a job may only generate

SLIVER_NS = 100_000  # A phase that lasted no longer than this before a nested one is merged with the previous phase

_new: Any = tuple.__new__  # Makes a named tuple without its Python constructor, half a microsecond faster


class Counts:
    """Collective calls, counted by the wrappers around torch.distributed."""

    def __init__(self) -> None:
        self.entered = self.host_ns = 0
        self.in_flight = self.last = ""
        self.world = ""  # The default process group's name; empty until it is needed
        self.group = ""
        """Process group of the latest collective, its number within the group, and the elements of its tensor
        argument."""
        self.sequence = self.size = 0
        self.gathers = 0  # Number of times that DeepSpeed's ``GatheredParameters`` was entered
        self.groups: dict[str, int] = {}
        self.recent: deque[tuple[str, int, str, int]] = deque(maxlen=RECENT)
        """The last collectives: group, number within it, name, elements."""

    def elements(self, since: int) -> int | None:
        """Return the elements of the collectives entered since ``since`` were; None if they are more than are kept."""
        count = max(0, self.entered - since)
        return None if count > RECENT else sum(each[3] for each in islice(reversed(self.recent), count))

    def forget_groups(self) -> None:
        """Reset the counts for a new default group: names of groups are assigned again."""
        self.world = ""
        self.groups.clear()
        self.recent.clear()


class Tracker:
    """Phases of the unfinished step."""

    def __init__(
        self,
        memory: MemoryBackend,
        mark_event: Callable[[], Any],
        counts: Counts,
        finish: Callable[[StepRaw], None],
        guard: Guard,
        budget: Budget,
    ) -> None:
        self.memory, self.mark_event, self.clock = memory, mark_event, perf_counter_ns
        self.counts, self._finish = counts, finish
        self._guard, self.budget = guard, budget
        self.spent_ns = 0  # The probe's cost until the step began
        self.followed: Callable[[], Moment | None] = nothing
        self.followed_marks: Callable[[], list[Mark] | None] = nothing
        """Return where a followed step is, and its marks (``loop.regular``); None: the present step is judged."""
        self.step = 0
        self.phase = "init"
        self.phase_ns = perf_counter_ns()
        self.progress = 1
        self.depth = 0  # Number of open explicit scopes; inside one, ``enter`` has no effect
        self._ended_in_scope = False
        self.light = FETCHING  # Phases whose beginning is marked by its time alone
        self.micro_steps = 0  # Micro-steps of the last finished step
        self.crowded = False  # Whether many optimizers update in a row; their marks reuse the previous memory sample
        self.cpu_ns = thread_time_ns()
        self.step_collectives = counts.entered
        self.watchers: tuple[Callable[[str, str], None], ...] = ()
        """Called on the training thread at every phase boundary, after its mark, with the phase that ends and the one
        that begins; at the end of a step with (its last phase, ``end``). Empty in ordinary steps: a capture of one
        step adds itself, from any thread, and removes itself again."""
        self.notes = Notes()
        self.touched = False  # Whether a followed step has notes of its own (``own_notes``)
        self.sample: Any = None
        self.marks = [self._mark("init", self.phase_ns)]

    def now(self) -> Moment:
        """Return where the training thread is; any thread."""
        notes = self.notes
        return self.followed() or Moment(self.phase, self.phase_ns, self.progress, notes.micro_steps + notes.repeats)

    def own_notes(self) -> Notes:
        """Return the present step's notes, to be changed by what is no event that a step may be followed by."""
        self.touched = True
        return self.notes

    def present_marks(self) -> list[Mark]:
        """Return the marks of the unfinished step; any thread."""
        return self.followed_marks() or list(self.marks)

    def enter(self, phase: str) -> None:
        """Move to ``phase``; no effect inside a scope, or if it is the present phase."""
        if self.depth or phase == self.phase:
            return
        self._move(phase)

    def open_scope(self, phase: str) -> str:
        """Move to ``phase`` and stay there until the scope is closed; return the phase to pass to ``close_scope``."""
        before = self.phase
        if not self.depth and phase != before:
            self._move(phase)
        self.depth += 1
        return before

    def close_scope(self, before: str) -> None:
        """Close a scope; the outermost one returns to ``before``, or to ``idle`` if a step ended inside it."""
        self.depth -= 1
        if self.depth:
            return
        if self._ended_in_scope:
            self._ended_in_scope, before = False, "idle"
        elif self.phase in ("generate", "eval") and before in ("init", "data"):
            # Start-up is over once a model generates or is evaluated; preparing a rollout's results is no loading.
            before = "idle"
        if self.phase != before:
            self._move(before)

    def rename(self, phase: str) -> None:
        """Rename the present phase to ``phase``."""
        marks = self.marks
        index = len(marks) - 1
        while index and not marks[index].phase:
            index -= 1  # the script has reset its peaks since
        if marks[index].phase:
            marks[index] = marks[index]._replace(phase=phase)
        self.phase = phase
        self.progress += 1

    def relabel(self, index: int, phase: str) -> bool:
        """Set the phase of a mark of the unfinished step; return whether it changed."""
        mark = self.marks[index]
        if not mark.phase or mark.phase == phase:
            return False
        self.marks[index] = mark._replace(phase=phase)
        if index == len(self.marks) - 1:
            self.phase = phase
            self.progress += 1
        return True

    def begin(self, phase: str) -> None:
        """Move to ``phase`` with a new mark, even if it is the present phase; no effect inside a scope."""
        if not self.depth:
            self._move(phase)

    def interrupt(self, phase: str) -> None:
        """Move to ``phase``; a present phase of at most ``SLIVER_NS`` is no occurrence of its own."""
        if self.depth or phase == self.phase:
            return
        marks = self.marks
        last = marks[-1]
        read = last.memory is not None or not self.budget.full
        sliver = last.phase == self.phase and read and self.clock() - last.ns <= SLIVER_NS
        if len(marks) < 2 or not sliver:
            self._move(phase)
            return
        if last.memory is None:
            self.sample = sample = self.memory.sample()
            last = last._replace(memory=sample)
        before = self.phase
        earlier = next((mark.phase for mark in reversed(marks[:-1]) if mark.phase), "")
        # The sample of the sliver's mark began a new peak, so the mark itself must stay.
        marks[-1] = last._replace(phase="" if earlier == phase else phase)
        self.phase = phase
        self.progress += 1
        for watcher in self.watchers:
            watcher(before, phase)

    def note_reset(self, sample: Any) -> None:
        """Keep the memory peaks of the present phase, as the script is about to reset them."""
        self.marks.append(self._unmeasured(sample, perf_counter_ns()))
        if len(self.marks) > MOST_MARKS:
            self._merge_oldest()

    def end_step(self, number: int | None = None, after: str = "idle") -> None:
        """End the step at the end of its update; the next one begins in ``after``, or in an open scope's phase.

        ``number``: the step's, where the framework counts steps itself.
        """
        start = perf_counter_ns()
        self.step = number if number is not None and number > 0 else self.step + 1
        marks, notes, before = self.marks, self.notes, self.phase
        if self.depth and before not in STEP_PHASES:
            after = before
        self._ended_in_scope = self.depth > 0
        self.micro_steps = notes.micro_steps
        mark = self._mark(after, start)
        marks.append(mark)
        self.marks = [mark]
        self.phase, self.phase_ns = after, start
        ended = time() - (perf_counter_ns() - start) / 1e9
        self.notes = Notes()
        self.progress += 1
        self.step_collectives = mark.collectives
        for watcher in self.watchers:
            watcher(before, "end")
        cpu, self.cpu_ns = self.cpu_ns, thread_time_ns()
        spent, self.spent_ns = self._guard.spent_ns - self.spent_ns, self._guard.spent_ns
        budget, coarse = self.budget, not self.budget.full
        every = budget.every
        budget.end_step(self.step, spent, start - marks[0].ns)
        cpu_ns = max(0, self.cpu_ns - cpu)
        self._finish(_new(StepRaw, (self.step, marks, ended, notes, spent, cpu_ns, every, coarse, False)))

    def pause(self) -> None:
        """Let a capture end here, within a step: what has run so far may be all that runs."""
        self.marks.append(self._mark(self.phase, perf_counter_ns()))
        for watcher in self.watchers:
            watcher(self.phase, "pause")

    def closing_step(self, measured: bool) -> StepRaw:
        """Return the marks after the last step, as a step of that number; no further step follows.

        ``measured``: sample memory (training thread only); otherwise the latest figures are used.
        """
        now = perf_counter_ns()
        marks = [*self.marks, self._mark("", now) if measured else self._unmeasured(self.sample, now)]
        ended = time() - (perf_counter_ns() - marks[-1].ns) / 1e9
        return StepRaw(self.step, marks, ended, self.notes, 0)

    def switch(self, memory: MemoryBackend, mark_event: Callable[[], Any], blank: Any) -> None:
        """Change the memory back end.

        The unfinished step keeps its first mark's time, with ``blank`` (nothing allocated yet) as its memory: figures
        of the old back end are not comparable.
        """
        self.memory, self.mark_event, self.sample = memory, mark_event, blank
        self.marks = [self.marks[0]._replace(phase=self.phase, memory=blank, event=None)]

    def _move(self, phase: str) -> None:
        start = self.clock()
        if phase in self.light:
            sample = event = None
        elif not self.budget.full and phase in COARSE and self.phase in COARSE and not self.watchers:
            sample, event = None, self.mark_event()
        elif (self.crowded and phase in ("optimizer", "idle")) or (
            phase == "forward" and self.light is DRIVEN and self._is_unmeasured()
        ):
            sample, event = self.sample, self.mark_event()
        else:
            self.sample = sample = self.memory.sample()
            event = self.mark_event()
        counts = self.counts
        marks = self.marks
        marks.append(_new(Mark, (phase, start, sample, event, counts.entered, counts.host_ns)))
        if len(marks) > MOST_MARKS:
            self._merge_oldest()
        before, self.phase, self.phase_ns = self.phase, phase, start
        self.progress += 1
        if self.watchers:
            for watcher in self.watchers:
                watcher(before, phase)

    def _merge_oldest(self) -> None:
        """Replace the older half of the marks, in a new list, by one for each phase with its host time and collectives.

        Their memory peaks and device times are lost.
        """
        if self.watchers:
            return
        marks, middle, phase = self.marks, len(self.marks) // 2, ""
        sums: dict[str, tuple[int, int, int]] = {}
        for mark, after in pairwise(marks[: middle + 1]):
            phase = mark.phase or phase
            spent, entered, host_ns = sums.get(phase, (0, 0, 0))
            sums[phase] = (
                spent + after.ns - mark.ns,
                entered + after.collectives - mark.collectives,
                host_ns + after.collective_ns - mark.collective_ns,
            )
        begin, merged = marks[0], list[Mark]()
        for name, (spent, entered, host_ns) in sums.items():
            merged.append(begin._replace(phase=name))
            totals = begin.collectives + entered, begin.collective_ns + host_ns
            begin = Mark("", begin.ns + spent, begin.memory, None, *totals)
        self.marks = [*merged, marks[middle]._replace(phase=marks[middle].phase or phase), *marks[middle + 1 :]]

    def _is_unmeasured(self) -> bool:
        """Return whether no figures were sampled since the last step's end, and no watcher needs exact ones."""
        first = self.marks[0]
        return len(self.marks) <= 2 and first.memory is self.sample and first.phase == "idle" and not self.watchers

    def _unmeasured(self, sample: Any, ns: int) -> Mark:
        return Mark("", ns, sample, None, self.counts.entered, self.counts.host_ns)

    def _mark(self, phase: str, ns: int) -> Mark:
        counts = self.counts
        if not self.crowded:
            self.sample = self.memory.sample()
        return _new(Mark, (phase, ns, self.sample, self.mark_event(), counts.entered, counts.host_ns))


def first_of_step(marks: list[Mark]) -> int:
    """Return the index of a step's first mark, or of the end of start-up.

    Checkpoints saved or loaded during start-up are part of ``init``.
    """
    starts = [place for place, mark in enumerate(marks[:-1]) if mark.phase == "init"]
    for place in range(starts[-1] + 1 if starts else 0, len(marks)):
        if marks[place].phase:
            return place
    return 0


def lend_events(marks: list[Mark]) -> list[Mark]:
    """Give marks without an event, and figures, the device event of the next mark: no kernel is launched in between."""
    found = list(marks)
    for place in range(len(found) - 2, -1, -1):
        event = found[place + 1].event
        if event is not None and found[place].memory is None and found[place].event is None:
            found[place] = found[place]._replace(event=event)
    return found


def readings(marks: list[Mark], read: Callable[[Any], Reading]) -> list[Reading]:
    """Return every mark's figures; a mark without figures has those of the next mark with figures.

    The peak since the mark before it belongs to the phase before it, not to the following one.
    """
    found: list[Reading] = []
    waiting = 0
    latest: Any = None
    for mark in marks:
        if mark.memory is None:
            waiting += 1
            continue
        reading = read(mark.memory)
        if mark.memory is latest:
            reading = reading.without_peaks()
        latest = mark.memory
        found += [reading, *[reading.without_peaks()] * waiting] if waiting else [reading]
        waiting = 0
    return found


class Reads:
    """The figures of a coarse step's marks: of those at which memory was read."""

    def __init__(self, marks: list[Mark], read: Callable[[Any], Reading]) -> None:
        self._places: list[int] = []
        self._figures: list[Reading] = []
        self._stretches: dict[tuple[int, int], list[Reading]] = {}
        latest: Any = None
        for place, mark in enumerate(marks):
            if mark.memory is not None:
                reading = read(mark.memory)
                self._figures.append(reading.without_peaks() if mark.memory is latest else reading)
                self._places.append(place)
                latest = mark.memory

    @property
    def last(self) -> Reading:
        """The figures at the step's end."""
        return self._figures[-1]

    def around(self, start: int, end: int) -> tuple[list[Reading], bool]:
        """Return the readings around two marks, the same list for the same stretch; whether they reach beyond them."""
        places = self._places
        first, last = ends = bisect_right(places, start) - 1, bisect_left(places, end)
        found = self._stretches.get(ends)
        if found is None:
            found = self._stretches[ends] = self._figures[first : last + 1]
        return found, places[first] < start or places[last] > end


LIMIT = 20_000
"""Limit of queued items; further ones are dropped and counted, so that a stuck publisher costs no memory."""


class Outbox:
    """Queue from the training thread to the publisher: raw steps, messages, and ``hello`` for the rank's hello."""

    __slots__ = ("_handed_over", "ended", "items", "overflowed", "pending", "under_way")

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.pending: deque[StepRaw] = deque()
        """Steps that the publisher has received and not sent: the device has not passed their ends."""
        self.overflowed = 0  # Items dropped because the queue was full
        self._handed_over = 0
        self.under_way: Callable[[], list[StepRaw]] = list
        """Returns the finished steps of an unfinished block (``loop.regular.Followed``)."""
        self.ended: Callable[[], int] = int  # Returns their number

    @property
    def steps_done(self) -> int:
        """Number of steps this process has finished, independent of their numbering."""
        return self._handed_over + self.ended()

    def hand_over(self, item: Any) -> None:
        """Queue an item for the publisher."""
        if len(self.items) < LIMIT:
            self.items.append(item)
        else:
            self.overflowed += 1

    def hand_over_steps(self, raw: Any, count: int = 1) -> None:
        """Queue a finished step (``StepRaw``), or ``count`` of them (``loop.regular.Followed``), for the publisher."""
        self._handed_over += count
        if len(self.items) < LIMIT:  # not by ``hand_over``: runs on the training thread, where every cache is cold
            self.items.append(raw)
        else:
            self.overflowed += count

    def send_hello(self) -> None:
        """Make the publisher send this rank's hello again."""
        self.hand_over("hello")

    def unsent_steps(self) -> list[StepRaw]:
        """Return the finished steps without a message yet, oldest first; any thread."""
        for _ in range(5):
            with contextlib.suppress(RuntimeError):  # the publisher removed one meanwhile
                found = [item.steps() if hasattr(item, "steps") else [item] for item in list(self.items)]
                return [
                    *self.pending,
                    *(each for each in chain(*found) if isinstance(each, StepRaw)),
                    *self.under_way(),
                ]
        return []


_STEPS = 9


class Pace:
    """Median time of the last steps, the unit of stop proposals, stack captures and time limits.

    A first step that compiles, or a last one with half a batch, has no effect.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self.usual = 0.0  # Seconds a step; 0.0 before the first

    def note(self, seconds: float) -> None:
        """Record the time of a step."""
        self._seconds.append(seconds)
        self.usual = median(self._seconds)


class StopRequest:
    """A request to save and end; the publisher sets it, the training thread reads it."""

    def __init__(self) -> None:
        self.supported = False  # Whether the script checks for requests
        self.after: int | None = None  # The step to stop after; None: no stop is requested
        self.asked: Callable[[], object] = nothing  # Called at each request, on the publisher thread

    def ask(self, after: int) -> None:
        """Request to end after that step."""
        self.after = after
        self.asked()

    def is_due(self, step: int) -> bool:
        """Return whether to end after step ``step``; the call shows that the script supports requests."""
        self.supported = True
        return self.after is not None and step >= self.after
