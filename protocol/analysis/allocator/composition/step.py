"""Makes the two messages of one captured step from a single replay of its trace."""

from array import array
from bisect import bisect_left, bisect_right

from ....messages.memory import PARTS, Composition
from ....messages.step_trace import StepTrace
from ....messages.telemetry import AllocatorEvents
from ....snapshot.model import ALLOC, FREE_COMPLETED
from ..snapshot.allocations import Allocations, columns
from . import events
from .attribution import Attribution, Seen, parts_of
from .fragmentation import fragmentation
from .timeline import Timeline, occurrences


def messages_of(trace: StepTrace) -> list[AllocatorEvents | Composition]:
    """Return the messages of a step; messages without phases are omitted.

    Raises:
        ValueError: its columns are inconsistent.
    """
    if not 0 <= trace.first < len(trace.marks):
        raise ValueError(f"a step that begins at mark {trace.first} of {len(trace.marks)}")
    snapshot, marks, begun = trace.snapshot, trace.marks, trace.marks[trace.first]
    allocations = Allocations(snapshot, trace.device)
    timeline = Timeline(snapshot, allocations)
    spans = timeline.spans(marks, whole=allocations.entries < trace.room)
    attribution = Attribution(
        timeline, spans, parts_of(allocations, _seen(trace, timeline)), _recomputed(trace, timeline), begun.us
    )
    phases = attribution.phases()
    notes = list(attribution.notes)
    if not trace.hooked:
        notes.append("compiled code runs here: what is recomputed or gathered within a phase was not watched")
    kept = fragmentation(snapshot)
    counted = AllocatorEvents(
        rank=trace.rank,
        step=trace.step,
        time=trace.time,
        phases=events.count(timeline, spans, occurrences(marks)),
        entries=allocations.entries,
        read_us=trace.read_us,
        host_us=marks[-1].us - begun.us,
        retries=max(0, marks[-1].retries - marks[0].retries),
        allocated_bytes=kept.allocated,
        reserved_bytes=kept.reserved,
        reserved_growth_bytes=kept.reserved - trace.reserved_before if trace.reserved_before else 0,
        free_bytes=kept.free,
        largest_free_block_bytes=kept.largest_free,
        rounding_bytes=kept.rounding,
        pending_bytes=kept.pending,
        segments=kept.segments,
    )
    composition = Composition(
        rank=trace.rank,
        step=trace.step,
        time=trace.time,
        measure="cuda",
        phases=phases,
        reason=trace.reason,
        known=trace.known,
        allocated_bytes=kept.allocated,
        reserved_bytes=kept.reserved,
        entries=allocations.entries,
        walk_us=trace.walk_us,
        note="; ".join(notes),
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


def _recomputed(trace: StepTrace, timeline: Timeline) -> list[tuple[int, int]]:
    return [(timeline.position(begin, None), timeline.position(end, None)) for begin, end in trace.recomputed]
