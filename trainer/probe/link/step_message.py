"""Makes ``Step`` messages from raw marks. All occurrences of a phase in a step are one record. Pure functions."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ....protocol.messages.telemetry import Closing, PhaseRecord, Span, Step, Update
from ....protocol.messages.throughput import ModelFlops, causal_pairs_of_rows
from ..device import device_values, pinned
from ..device.events import elapsed_us
from ..device.reading import Reading
from ..phases.marks import Mark, Notes, StepRaw
from ..phases.readings import first_of_step, lend_events, readings
from ..rank.batch_share import WHOLE, BatchShare
from ..values import batch, losses

IDLE_SHARE = 0.05
IDLE_BYTES = 16 * 2**20
"""Time between phases gets a record of its own when it is this share of the step, or moved this much memory."""


MOST_UPDATES = 32
"""Rows of ``Step.updates``."""
_FIGURES = (0, 2, 4, 6, 8)
"""Indexes in ``Reading`` of allocated, reserved, active, requested and resident; the peak of each is next to it."""


class _Phase:
    """One phase under construction. ``figures``: start, end and peak of allocated, reserved, active and so on."""

    def __init__(self, name: str, start_ns: int, at_start: Reading) -> None:
        self.name = name
        self.start_ns = start_ns
        self.host_ns = 0
        self.device_us: int | None = None
        self.waited_us: int | None = None
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
            highest = end[place + 1]  # ifs, not max(): this is most of the publisher's work
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
        """Return the phase as part of a message."""
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
            self.waited_us,
        )


def step_message(
    raw: StepRaw,
    rank: int,
    read: Callable[[Any], Reading],
    dropped: int,
    flops: ModelFlops | None = None,
    share: BatchShare = WHOLE,
) -> Step:
    """Return a step's message. Its device events must have passed.

    A step begins at the end of the previous one. The first step begins at the end of the ``init`` phase, and has its
    record with a negative ``start_us``.

    Args:
        raw: the step from the training thread.
        rank: the rank.
        read: the memory back end's ``read``.
        dropped: messages this probe has dropped so far.
        flops: of the model; None where they are not known.
        share: this rank's part of the batches; what the loop counts itself (``notes.counts``) is the rank's own.
    """
    times = _phase_records(raw, read)
    host_us, notes, last = times.host_us, raw.notes, times.last
    loss = losses.step_loss(notes)  # before micro_steps, which it corrects
    updates = losses.updates(notes)
    own = updates.get(notes.owner)
    if own is not None and loss is None:
        loss = own.loss if own.loss is not None else _first([each.loss for each in updates.values()])
    share = WHOLE if notes.counts else share
    if notes.counts:
        tokens, labels = sum(count.tokens for count in notes.counts), sum(count.label_tokens for count in notes.counts)
    else:
        tokens = sum(device_values.read_count(count) for count in notes.tokens if count is not None)
        labels = sum(map(batch.count_labels, notes.labels)) if len(notes.labels) == notes.micro_steps else 0
    return Step(
        rank=rank,
        step=raw.number,
        started=raw.ended - host_us / 1e6,
        host_us=host_us,
        phases=times.phases,
        device_us=times.device_us,
        micro_steps=max(1, notes.micro_steps),
        loss=loss,
        lr=device_values.read(notes.lr) if own is None else own.lr,
        grad_norm=device_values.read(notes.grad_norm) if own is None else _norm(own, updates.values()),
        loss_scale=device_values.read(notes.loss_scale) if own is None else own.loss_scale,
        overflow=notes.overflow,
        batch_shape=notes.shape,
        samples=share.of(_samples(notes)),
        tokens=share.of(tokens),
        padded_tokens=share.of(notes.padded_tokens),
        label_tokens=labels,
        retries=last.retries,
        ooms=last.ooms,
        probe_us=raw.cost_ns // 1000,
        dropped=dropped,
        updates=list(updates.values())[:MOST_UPDATES],
        cpu_us=raw.cpu_ns // 1000,
        flops=_flops(notes, tokens, flops, share),
        fetch_us=notes.fetch_ns // 1000 if notes.fetches else None,
    )


def _norm(own: Update, updates: Iterable[Update]) -> float | None:
    """Return the owner's gradient norm; where one clipping and one backward were for several, that of the first."""
    return _first([own.grad_norm, *(each.grad_norm for each in updates)]) if own.loss is None else own.grad_norm


def _first(figures: Iterable[float | None]) -> float | None:
    return next((figure for figure in figures if figure is not None), None)


def _samples(notes: Notes) -> int:
    """Return the rows of a step: as counted by the loop, or of the forwards' batches."""
    counted = [count.samples for count in notes.counts if count.samples is not None]
    return sum(counted) if counted and len(counted) == len(notes.counts) else notes.samples


def _flops(notes: Notes, tokens: int, flops: ModelFlops | None, share: BatchShare) -> float:
    """Return the FLOPs of the model for a step; 0 where they are not known, as for several models."""
    if notes.flops is not None:
        return notes.flops
    if flops is None or notes.parts or not tokens or not share.ranks:
        return 0.0
    if notes.counts and all(count.pairs for count in notes.counts):
        return flops.of(tokens, sum(count.pairs for count in notes.counts), max(each.longest for each in notes.counts))
    rows = notes.samples
    return flops.of(tokens, causal_pairs_of_rows(tokens, rows), tokens // rows if rows else 0) / share.ranks


def closing_message(raw: StepRaw, rank: int, read: Callable[[Any], Reading]) -> Closing | None:
    """Return the message of a rank's phases after its last step, whose number ``raw`` has; None: nothing notable.

    Its device events must have passed.
    """
    times = _phase_records(raw, read)
    phases = [record for record in times.phases if record.name != "idle" or _moves(record)]
    if not phases:
        return None
    started = raw.ended - times.host_us / 1e6
    return Closing(rank, raw.number, started, times.host_us, phases, times.device_us)


class _Times(NamedTuple):
    host_us: int
    device_us: int | None
    phases: list[PhaseRecord]
    last: Reading


def _phase_records(raw: StepRaw, read: Callable[[Any], Reading]) -> _Times:
    marks = lend_events(raw.marks)
    figures = readings(marks, read)
    first = first_of_step(marks)
    origin = marks[first]
    host_us = (marks[-1].ns - origin.ns) // 1000
    phases: dict[str, _Phase] = {}
    start = 0
    for end in range(1, len(marks)):
        if marks[end].phase in ("", marks[start].phase) and end + 1 < len(marks):
            continue  # the same phase goes on
        name = marks[start].phase if start >= first else "init"
        if name not in phases:
            phases[name] = _Phase(name, marks[start].ns, figures[start])
        phases[name].add(marks[start : end + 1], figures[start : end + 1])
        start = end
    for name, begun, ended in raw.notes.waits:
        waited, phase = elapsed_us(begun, ended), phases.get(name)
        if waited is not None and phase is not None:
            phase.waited_us = (phase.waited_us or 0) + waited
    records = [phase.record(origin.ns) for phase in phases.values()]
    shown = [record for record in records if record.name != "idle" or _matters(record, host_us)]
    return _Times(host_us, elapsed_us(origin.event, marks[-1].event), shown, figures[-1])


def without_device(raw: StepRaw) -> StepRaw:
    """Return a step without the values that the device has not delivered: times, and numbers copied from it."""
    notes = _notes_without_device(raw.notes)
    return raw._replace(marks=[mark._replace(event=None) for mark in raw.marks], notes=notes)


def _notes_without_device(notes: Notes) -> Notes:
    for name in ("losses", "reported", "trainer_losses"):
        setattr(notes, name, list(filter(_is_here, getattr(notes, name))))
    notes.labels = []
    notes.tokens = [count for count in notes.tokens if not isinstance(count, pinned.Fetched)]
    for part in (notes, *notes.parts.values()):
        for name in ("lr", "grad_norm", "loss_scale"):
            if not isinstance(getattr(part, name), int | float):
                setattr(part, name, None)
    for part in notes.parts.values():
        part.losses = [list(filter(_is_here, losses)) for losses in part.losses]
    notes.waits = []
    return notes


def _matters(idle: PhaseRecord, host_us: int) -> bool:
    return idle.host_us >= host_us * IDLE_SHARE or _moves(idle)


def _moves(idle: PhaseRecord) -> bool:
    peak = idle.peak_span
    return peak.transient >= IDLE_BYTES or abs(peak.growth) >= IDLE_BYTES


def _is_here(value: Any) -> bool:
    return not isinstance(value, pinned.Fetched)


def _span(figures: list[int]) -> Span | None:
    return Span(*figures) if figures[1] >= 0 else None
