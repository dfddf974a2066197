"""From raw marks to a ``Step`` message: occurrences of a phase in all micro-steps become one record. Pure functions."""

from collections.abc import Callable
from typing import Any

from ...protocol.telemetry import PhaseRecord, Span, Step
from . import pinned, values
from .events import elapsed_us
from .raw import Mark, Notes, StepRaw
from .reading import Reading

IDLE_SHARE = 0.05
IDLE_BYTES = 16 * 2**20
"""Time between phases gets a record of its own when it is this share of the step, or moved this much memory."""


_FIGURES = (0, 2, 4, 6, 8)
"""Where ``Reading`` has allocated, reserved, active, requested and resident; the peak of each is next to it."""


class _Folded:
    """One phase under construction. ``figures``: start, end and peak of allocated, reserved, active and so on."""

    __slots__ = (
        "allocated_bytes",
        "allocations",
        "collective_ns",
        "collectives",
        "count",
        "device_us",
        "figures",
        "frees",
        "host_ns",
        "name",
        "start_ns",
    )

    def __init__(self, name: str, start_ns: int, at_start: Reading) -> None:
        self.name = name
        self.start_ns = start_ns
        self.host_ns = 0
        self.device_us: int | None = None
        self.count = 0
        self.allocations = self.frees = self.allocated_bytes = 0
        self.collectives = self.collective_ns = 0
        self.figures = [[at_start[place], -1, -1] for place in _FIGURES]

    def add(self, marks: list[Mark], readings: list[Reading]) -> None:
        """Add one occurrence: from the first mark to the last, peaks taken from all but the first."""
        first, last = marks[0], marks[-1]
        start, end = readings[0], readings[-1]
        self.count += 1
        self.host_ns += last.ns - first.ns
        spent = elapsed_us(first.event, last.event)
        if spent is not None:
            self.device_us = (self.device_us or 0) + spent
        if end.allocations > start.allocations:  # also guards against counters that the script has reset
            self.allocations += end.allocations - start.allocations
            self.allocated_bytes += max(0, end.allocated_bytes - start.allocated_bytes)
        self.frees += max(0, end.frees - start.frees)
        self.collectives += last.collectives - first.collectives
        self.collective_ns += last.collective_ns - first.collective_ns
        for place, figure in zip(_FIGURES, self.figures, strict=True):
            figure[1] = now = end[place]
            highest = end[place + 1]  # ifs, not max(): this is most of what the publisher does all day
            if now > highest:
                highest = now
            if start[place] > highest:
                highest = start[place]
            if highest > figure[2]:
                figure[2] = highest
        for between in readings[1:-1]:
            for place, figure in zip(_FIGURES, self.figures, strict=True):
                figure[2] = max(figure[2], between[place + 1])

    def record(self, origin_ns: int) -> PhaseRecord:
        """Make the message."""
        allocated, reserved, active, requested, resident = self.figures
        return PhaseRecord(
            self.name,
            (self.start_ns - origin_ns) // 1000,
            self.host_ns // 1000,
            Span(*allocated),
            Span(*reserved),
            self.device_us,
            _span(active),
            _span(requested),
            _span(resident),
            self.count,
            self.allocations,
            self.frees,
            self.allocated_bytes,
            self.collective_ns // 1000,
            self.collectives,
        )


def fold(raw: StepRaw, rank: int, read: Callable[[Any], Reading], dropped: int) -> Step:
    """Make a step's message. Its device events must have passed.

    A step runs from the end of the one before; the first one from the end of the ``init`` phase, whose record it
    carries with a negative ``start_us``.

    Args:
        raw: the step as handed over.
        rank: the rank.
        read: the memory back end's ``read``.
        dropped: messages this probe has dropped so far.
    """
    marks = lend_events(raw.marks)
    readings = resolve([None if mark.memory is None else read(mark.memory) for mark in marks])
    origin = next((mark for mark in marks if mark.phase and mark.phase != "init"), marks[0])
    host_us = (marks[-1].ns - origin.ns) // 1000
    phases: dict[str, _Folded] = {}
    start = 0
    for end in range(1, len(marks)):
        if not marks[end].phase and end + 1 < len(marks):
            continue  # the same phase goes on
        name = marks[start].phase
        if name not in phases:
            phases[name] = _Folded(name, marks[start].ns, readings[start])
        phases[name].add(marks[start : end + 1], readings[start : end + 1])
        start = end
    records = [phase.record(origin.ns) for phase in phases.values()]
    notes, last = raw.notes, readings[-1]
    return Step(
        rank=rank,
        step=raw.number,
        started=raw.ended - host_us / 1e6,
        host_us=host_us,
        phases=[record for record in records if record.name != "idle" or _matters(record, host_us)],
        device_us=elapsed_us(origin.event, marks[-1].event),
        micro_steps=max(1, notes.micro_steps),
        loss=_loss(notes),
        lr=values.read(notes.lr),
        grad_norm=values.read(notes.grad_norm),
        loss_scale=values.read(notes.loss_scale),
        overflow=notes.overflow,
        batch_shape=notes.shape,
        samples=notes.samples,
        tokens=sum(values.read_count(count) for count in notes.tokens if count is not None),
        padded_tokens=notes.padded_tokens,
        retries=last.retries,
        ooms=last.ooms,
        probe_us=raw.cost_ns // 1000,
        dropped=dropped,
    )


def lend_events(marks: list[Mark]) -> list[Mark]:
    """Give marks that are a time alone the device event of the next mark: nothing is launched in between."""
    found = list(marks)
    for place in range(len(found) - 2, -1, -1):
        if found[place].memory is None:
            found[place] = found[place]._replace(event=found[place + 1].event)
    return found


def resolve(readings: list[Reading | None]) -> list[Reading]:
    """Give marks without figures of their own those of the next mark that has them.

    The peak since the mark before them goes to the phase that was under way then, not to what followed it.
    """
    found: list[Reading] = []
    waiting = 0
    for reading in readings:
        if reading is None:
            waiting += 1
            continue
        if waiting:
            found.append(reading)
            found.extend([reading.without_peaks()] * waiting)
            waiting = 0
        else:
            found.append(reading)
    return found


def without_device(raw: StepRaw) -> StepRaw:
    """Take out of a step what the device has not told: times, and numbers that were to be copied from it."""
    notes = raw.notes
    notes.losses = [loss for loss in notes.losses if isinstance(loss, float)]
    notes.tokens = [count for count in notes.tokens if not isinstance(count, pinned.Fetched)]
    for name in ("lr", "grad_norm", "loss_scale"):
        if not isinstance(getattr(notes, name), int | float):
            setattr(notes, name, None)
    return raw._replace(marks=[mark._replace(event=None) for mark in raw.marks])


def _matters(idle: PhaseRecord, host_us: int) -> bool:
    peak = idle.peak_span
    return idle.host_us >= host_us * IDLE_SHARE or peak.transient >= IDLE_BYTES or abs(peak.growth) >= IDLE_BYTES


def _loss(notes: Notes) -> float | None:
    if notes.reported_loss is not None:
        return notes.reported_loss
    losses = [loss for loss in map(values.read, notes.losses) if loss is not None]
    if not losses:
        return None
    return sum(losses) if notes.sum_losses else sum(losses) / len(losses)


def _span(figures: list[int]) -> Span | None:
    return Span(*figures) if figures[1] >= 0 else None
