"""Makes the two messages of one captured step from a single replay of its trace.

Positions on the trace count entries: position ``p`` is the state after the first ``p`` of them. Phase boundaries are
known by time, to some microseconds. The counters that the probe read there are exact, so a boundary is moved to the
nearest position at which the trace has the same figure.

A block that is allocated at the moment of a phase's peak belongs to the part of the storage found in it by walking.
Without a storage its lifetime decides: from a forward into the backward it is an activation, within one phase a
temporary. The remainder of the peak is ``unattributed``.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from ...messages.memory import PARTS, Composition, PhaseComposition, StepMark, StepTrace
from ...messages.telemetry import AllocatorEvents, AllocatorPhase
from ...snapshot.columns import (
    ALLOC,
    ALLOCATED,
    FREE,
    FREE_COMPLETED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Snapshot,
)
from .allocations import BEFORE, Allocations, columns, reserved_curve

SLACK_US = 300  # maximum shift of a boundary to a position at which the figures agree
UNCOMPOSED = frozenset(("init", "idle"))  # phases without a composition: the time between the other phases
LARGEST = 5


def block_figures(snapshot: Snapshot) -> dict[str, int]:
    """Return the sums over the blocks of a reading, bytes, as fields of ``AllocatorEvents``.

    ``free_bytes`` is reserved memory that is neither allocated nor pending (freed by the program, but in use by a
    stream); ``rounding_bytes`` is what allocated blocks have beyond the requested size.
    """
    allocated = free = largest = rounding = pending = 0
    sizes, asked = columns(snapshot.block_sizes, "q"), columns(snapshot.block_requested, "q")
    for state, size, requested in zip(snapshot.block_states, sizes, asked, strict=True):
        if state == ALLOCATED:
            allocated += size
            rounding += size - requested
        elif state == FREE:
            free += size
            largest = max(largest, size)
        else:
            pending += size
    return {
        "allocated_bytes": allocated,
        "reserved_bytes": sum(segment.size for segment in snapshot.segments),
        "free_bytes": free,
        "largest_free_block_bytes": largest,
        "rounding_bytes": rounding,
        "pending_bytes": pending,
        "segments": len(snapshot.segments),
    }


class Occurrence(NamedTuple):
    """One occurrence of a phase between two marks, with the probe's counters there."""

    name: str
    first: int
    last: int
    peak_bytes: int
    us: int


class Span(NamedTuple):
    """An occurrence on the trace: from the state at ``begin`` to that at ``end``."""

    name: str
    begin: int
    end: int
    peak_bytes: int
    covered: bool  # whether the trace reaches back to its start
    begin_us: int
    us: int = 0


def occurrences(marks: list[StepMark]) -> list[Occurrence]:
    """Return a step's phases in order of time, each with its highest allocated bytes."""
    found: list[Occurrence] = []
    start = 0
    for end in range(1, len(marks)):
        if marks[end].phase in ("", marks[start].phase) and end + 1 < len(marks):
            continue  # the script reset its own peaks here, or the label was corrected; the phase continues
        first, last = marks[start], marks[end]
        peak = max(first.allocated, last.allocated, *(mark.peak for mark in marks[start + 1 : end + 1]))
        found.append(Occurrence(first.phase, start, end, peak, last.us - first.us))
        start = end
    return found


class Timeline:
    """Allocated and reserved bytes of one device after every entry of its trace."""

    def __init__(self, snapshot: Snapshot, allocations: Allocations) -> None:
        self.allocations = allocations
        self.snapshot = snapshot
        self.times = columns(allocations.trace.times, "q")
        self.allocated = allocations.curve(allocations.freed, allocations.sizes)  # one value more than entries
        self.reserved = reserved_curve(allocations.trace, sum(segment.size for segment in snapshot.segments))

    def position(self, us: int, allocated: int | None) -> int:
        """Return the position of a boundary; ``allocated`` is the counter's value there, None: not read."""
        times, curve = self.times, self.allocated
        at = bisect_right(times, us)
        if allocated is None or curve[at] == allocated:
            return at
        low, high = bisect_left(times, us - SLACK_US), bisect_right(times, us + SLACK_US)
        for away in range(1, max(at - low, high - at) + 1):
            for place in (at + away, at - away):
                if low <= place <= high and curve[place] == allocated:
                    return place
        return at

    def positions(self, marks: list[StepMark]) -> list[int]:
        """Return the positions of a step's marks, in non-decreasing order."""
        found: list[int] = []
        for mark in marks:
            here = self.position(mark.us, mark.allocated if mark.measured else None)
            found.append(max(here, found[-1]) if found else here)
        return found

    def spans(self, marks: list[StepMark], whole: bool) -> list[Span]:
        """Return a step's phases with their positions on the trace.

        With ``whole`` the ring has lost no entries since before the step started.
        """
        places = self.positions(marks)
        oldest = self.times[0] if len(self.times) else 0
        found: list[Span] = []
        for name, first, last, peak, us in occurrences(marks):
            begin_us = marks[first].us
            covered = whole or 0 < oldest <= begin_us
            found.append(Span(name, places[first], places[last], peak, covered, begin_us, us))
        return found


class Seen(NamedTuple):
    """A storage found in a block at a position of the trace."""

    position: int
    address: int
    part: str


def parts_of(allocations: Allocations, seen: Iterable[Seen]) -> dict[int, str]:
    """Return the part of each allocation in which a storage was found, by the allocation's number."""
    sightings = list(dict.fromkeys(seen))
    of_address: dict[int, list[int]] = {sighting.address: [] for sighting in sightings}
    for number, address in enumerate(allocations.addresses):
        if address in of_address:
            of_address[address].append(number)
    begins, freed = allocations.begins, allocations.freed
    parts: dict[int, str] = {}
    for position, address, part in sightings:
        for number in of_address[address]:
            if begins[number] < position <= freed[number]:
                # A gradient may be part of a reduction bucket that was found as a gradient only.
                if part == "buckets" or number not in parts:
                    parts[number] = part
                break
    return parts


class Attribution:
    """The compositions of one step.

    ``parts`` are those of the allocations with known storages, by allocation; ``recomputed`` the intervals of positions
    in which layers were recomputed inside a backward.
    """

    def __init__(
        self,
        timeline: Timeline,
        spans: list[Span],
        parts: dict[int, str],
        recomputed: list[tuple[int, int]],
        origin_us: int,
    ) -> None:
        self._timeline, self._of, self._spans, self._parts = timeline, timeline.allocations, spans, parts
        self._recomputed, self._origin_us = recomputed, origin_us
        self._begins = [span.begin for span in spans]
        self.notes: list[str] = []

    def phases(self) -> list[PhaseComposition]:
        """Return the composition of each phase's highest peak covered by the trace, in order of first occurrence."""
        best: dict[str, int] = {}
        highest: dict[str, int] = {}
        for number, span in enumerate(self._spans):
            if span.name in UNCOMPOSED:
                continue
            highest[span.name] = max(highest.get(span.name, 0), span.peak_bytes)
            if span.covered and (span.name not in best or span.peak_bytes > self._spans[best[span.name]].peak_bytes):
                best[span.name] = number
        for name in highest:
            if name not in best:
                self.notes.append(f"{name}: its allocations had left the recorder's ring")
        return [self._phase(number, highest[name]) for name, number in best.items()]

    def _phase(self, number: int, highest: int) -> PhaseComposition:
        span, timeline = self._spans[number], self._timeline
        position = self._peak_position(span)
        parts = self._parts_at(position, number)
        found = timeline.allocated[position]
        rest = highest - sum(parts.values())
        if found != highest:
            self.notes.append(f"{span.name}: the trace has {found} bytes where the allocator counted {highest}")
        if rest < 0:  # the trace is above the counted peak during the whole phase
            parts, rest = {}, highest
        if rest:
            parts["unattributed"] = rest
        us = timeline.times[position - 1] if position > span.begin else span.begin_us
        return PhaseComposition(span.name, highest, parts, max(0, us - self._origin_us), timeline.reserved[position])

    def _peak_position(self, span: Span) -> int:
        """Return the first position of a span's peak; if the trace exceeds it, of the highest value below."""
        curve = self._timeline.allocated[span.begin : span.end + 1]
        top = max(curve)
        if top > span.peak_bytes:
            top = max((value for value in curve if value <= span.peak_bytes), default=min(curve))
        return span.begin + curve.index(top)

    def _parts_at(self, position: int, number: int) -> dict[str, int]:
        of, sums = self._of, dict[str, int]()
        lives = zip(of.begins, of.freed, strict=True)
        for allocation in [n for n, (begin, freed) in enumerate(lives) if begin < position <= freed]:
            part = self._parts.get(allocation) or self._by_life(allocation, number)
            sums[part] = sums.get(part, 0) + of.sizes[allocation]
        return sums

    def _by_life(self, allocation: int, peak: int) -> str:
        """Return the part of a block without a known storage, from the phases of its allocation and its free."""
        begin, freed = self._of.begins[allocation], self._of.freed[allocation]
        born = self._span_of(begin) if begin != BEFORE else -1
        if born < 0:
            return "other"
        gone = self._span_of(freed)
        name = self._spans[born].name
        if gone == born:
            return "activations" if name == "backward" and self._is_recomputed(begin, freed) else "temporaries"
        if name != "forward":
            return "other"
        if gone < len(self._spans) and self._spans[gone].name == "backward":
            return "activations"
        # Kept longer than a backward needs it (a script's ``outputs``): an activation until a backward has passed.
        passed = any(span.name == "backward" for span in self._spans[born:peak])
        return "other" if passed or self._spans[peak].name not in ("forward", "backward") else "activations"

    def _span_of(self, entry: int) -> int:
        """Return the index of an entry's span; -1 before the step, the number of spans after it."""
        if not self._spans or entry >= self._spans[-1].end:
            return len(self._spans)
        return bisect_right(self._begins, entry) - 1

    def _is_recomputed(self, begin: int, freed: int) -> bool:
        place = bisect_right(self._recomputed, (begin, 1 << 62)) - 1
        return place >= 0 and begin < self._recomputed[place][1] <= freed


def count(timeline: Timeline, spans: list[Span]) -> list[AllocatorPhase]:
    """Count a step's entries by phase, in order of first occurrence.

    Empty if the ring does not reach back to the start of the step's first phase.
    """
    if not spans or not spans[0].covered:
        return []
    phases: dict[str, tuple[list[tuple[int, int]], int]] = {}
    trace = timeline.allocations.trace
    actions, sizes = trace.actions, columns(trace.sizes, "q")
    for span in spans:
        if span.name == "init":
            continue  # the recorder was started during it
        entries, host_us = phases.get(span.name, ([], 0))
        entries += zip(actions[span.begin : span.end], sizes[span.begin : span.end], strict=True)
        phases[span.name] = entries, host_us + span.us
    return [_counted(name, entries, host_us) for name, (entries, host_us) in phases.items() if entries]


def _counted(name: str, entries: list[tuple[int, int]], host_us: int) -> AllocatorPhase:
    asked, freed, taken, given = (
        [size for action, size in entries if action in actions]
        for actions in ((ALLOC,), (FREE_COMPLETED,), (SEGMENT_ALLOC, SEGMENT_MAP), (SEGMENT_FREE, SEGMENT_UNMAP))
    )
    largest = sorted(asked, reverse=True)[:LARGEST]
    counts = len(asked), len(freed), sum(asked), sum(freed)
    return AllocatorPhase(name, *counts, largest, len(taken), len(given), sum(taken) - sum(given), host_us)


def messages_of(trace: StepTrace) -> list[AllocatorEvents | Composition]:
    """Return the messages of a step, omitting those without phases; raise ``ValueError`` for inconsistent columns."""
    if not 0 <= trace.first < len(trace.marks):
        raise ValueError(f"a step that begins at mark {trace.first} of {len(trace.marks)}")
    snapshot, marks, begun = trace.snapshot, trace.marks, trace.marks[trace.first]
    allocations = Allocations(snapshot, trace.device)
    timeline = Timeline(snapshot, allocations)
    spans = timeline.spans(marks, whole=allocations.entries < trace.room)
    recomputed = [(timeline.position(begin, None), timeline.position(end, None)) for begin, end in trace.recomputed]
    attribution = Attribution(timeline, spans, parts_of(allocations, _seen(trace, timeline)), recomputed, begun.us)
    phases = attribution.phases()
    if not trace.hooked:
        attribution.notes.append(
            "compiled code runs here: what is recomputed or gathered within a phase was not watched"
        )
    kept = block_figures(snapshot)
    counted = AllocatorEvents(
        rank=trace.rank,
        step=trace.step,
        time=trace.time,
        phases=count(timeline, spans),
        entries=allocations.entries,
        read_us=trace.read_us,
        host_us=marks[-1].us - begun.us,
        retries=max(0, marks[-1].retries - marks[0].retries),
        reserved_growth_bytes=kept["reserved_bytes"] - trace.reserved_before if trace.reserved_before else 0,
        **kept,
    )
    composition = Composition(
        rank=trace.rank,
        step=trace.step,
        time=trace.time,
        measure="cuda",
        phases=phases,
        reason=trace.reason,
        known=trace.known,
        allocated_bytes=kept["allocated_bytes"],
        reserved_bytes=kept["reserved_bytes"],
        entries=allocations.entries,
        walk_us=trace.walk_us,
        note="; ".join(attribution.notes),
        read_us=trace.read_us,
    )
    return [message for message in (counted, composition) if message.phases]


def entries_of_step(trace: StepTrace) -> int:
    """Return the number of allocations and frees between a step's first and last mark; 0 if the trace starts later."""
    [of_device] = trace.snapshot.traces or [None]
    times = columns(of_device.times, "q") if of_device is not None else array("q")
    begin_us = trace.marks[trace.first].us
    if of_device is None or not len(times) or (len(times) >= trace.room and times[0] > begin_us):
        return 0
    actions = of_device.actions[bisect_left(times, begin_us) : bisect_right(times, trace.marks[-1].us)]
    return actions.count(ALLOC) + actions.count(FREE_COMPLETED)


def _seen(trace: StepTrace, timeline: Timeline) -> list[Seen]:
    found: list[Seen] = []
    for one in trace.sightings:
        mark = trace.marks[one.mark] if one.mark >= 0 else None
        position = timeline.position(one.us, mark.allocated if mark is not None and mark.measured else None)
        pairs = zip(columns(one.addresses, "Q"), one.parts, strict=True)
        found += [Seen(position, address, PARTS[part]) for address, part in pairs]
    return found
