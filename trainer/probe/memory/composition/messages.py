"""From the capture of one step to its messages: the one read of the allocator's trace serves both."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from .....protocol.analysis.allocator.snapshot.allocations import Allocations
from .....protocol.memory import Composition
from .....protocol.telemetry import AllocatorEvents
from ...device.reading import Reading
from ...phases.readings import readings
from . import events, resident
from .attribution import Attribution, Seen, parts_of
from .fragmentation import fragmentation
from .step_capture import StepCapture
from .time_slices import Pulse
from .timeline import Timeline, occurrences, origin
from .trace import compact


class Made(NamedTuple):
    """What there is to send; either may be without phases, and then is not sent."""

    composition: Composition
    events: AllocatorEvents


def of_cuda(
    capture: StepCapture,
    take: Callable[[], dict[str, Any]],
    device: int,
    rank: int,
    read: Callable[[Any], Reading],
    room: int,
    reserved_before: int,
) -> Made:
    """Make the messages of a step on a GPU.

    Args:
        capture: the finished one.
        take: takes PyTorch's snapshot; called once, soon after the step.
        device: the device's index.
        rank: the rank.
        read: the memory back end's ``read``.
        room: how many entries the recorder's ring has room for.
        reserved_before: bytes that were reserved at the last capture; 0 for the first.
    """
    pulse = Pulse()
    snapshot = compact(take(), device, pulse)
    allocations = Allocations(snapshot, device)
    timeline = Timeline(snapshot, allocations, pulse)
    marks, figures = capture.marks, readings(capture.marks, read)
    spans = timeline.spans(marks, figures, capture.offset_ns, whole=allocations.entries < room)
    parts = parts_of(allocations, _seen(capture, timeline, figures), pulse)
    attribution = Attribution(
        timeline, spans, parts, _recomputed(capture, timeline), (origin(marks).ns + capture.offset_ns) // 1000, pulse
    )
    phases = attribution.phases()
    notes = list(attribution.notes)
    if not capture.hooked:
        notes.append("compiled code runs here: what is recomputed or gathered within a phase was not watched")
    now, kept = time.time(), fragmentation(snapshot)
    composition = Composition(
        rank=rank,
        step=capture.step,
        time=now,
        measure="cuda",
        phases=phases,
        reason=capture.reason,
        known=_known(capture),
        allocated_bytes=kept.allocated,
        reserved_bytes=kept.reserved,
        entries=allocations.entries,
        walk_us=capture.walk_ns // 1000,
        note="; ".join(notes),
        read_us=pulse.worked_us,
    )
    counted = AllocatorEvents(
        rank=rank,
        step=capture.step,
        time=now,
        phases=events.count(timeline, spans, marks, occurrences(marks, figures), pulse),
        entries=allocations.entries,
        read_us=pulse.worked_us,
        host_us=(marks[-1].ns - origin(marks).ns) // 1000,
        retries=max(0, figures[-1].retries - figures[0].retries),
        allocated_bytes=kept.allocated,
        reserved_bytes=kept.reserved,
        reserved_growth_bytes=kept.reserved - reserved_before if reserved_before else 0,
        free_bytes=kept.free,
        largest_free_block_bytes=kept.largest_free,
        rounding_bytes=kept.rounding,
        pending_bytes=kept.pending,
        segments=kept.segments,
    )
    return Made(composition, counted)


def of_cpu(capture: StepCapture, rank: int, read: Callable[[Any], Reading]) -> Made:
    """Make the composition of a step on the CPU; there are no allocator events."""
    pulse, now = Pulse(), time.time()
    figures = readings(capture.marks, read)
    phases = resident.compose(capture.marks, figures, capture.walks)
    composition = Composition(
        rank=rank,
        step=capture.step,
        time=now,
        measure="glibc",
        phases=phases,
        reason=capture.reason,
        known=_known(capture),
        allocated_bytes=figures[-1].allocated,
        reserved_bytes=figures[-1].reserved,
        walk_us=capture.walk_ns // 1000,
        read_us=pulse.worked_us,
        note=resident.NOTE,
    )
    return Made(composition, AllocatorEvents(rank, capture.step, now, []))


def _seen(capture: StepCapture, timeline: Timeline, figures: list[Reading]) -> list[Seen]:
    found: list[Seen] = []
    for walk in capture.walks:
        us = (capture.marks[walk.mark].ns + capture.offset_ns) // 1000
        allocated = figures[walk.mark].allocated if capture.marks[walk.mark].memory is not None else None
        position = timeline.position(us, allocated)
        found += [Seen(position, address, held.part) for address, held in walk.held.items()]
    for sighting in capture.sightings:
        position = timeline.position((sighting.ns + capture.offset_ns) // 1000, None)
        found.append(Seen(position, sighting.address, sighting.part))
    return found


def _recomputed(capture: StepCapture, timeline: Timeline) -> list[tuple[int, int]]:
    def position(ns: int) -> int:
        return timeline.position((ns + capture.offset_ns) // 1000, None)

    return [(position(begin), position(end)) for begin, end in capture.recomputed]


def _known(capture: StepCapture) -> dict[str, int]:
    sums: dict[str, int] = {}
    for size, part in capture.walks[-1].held.values() if capture.walks else ():
        sums[part] = sums.get(part, 0) + size
    return sums
