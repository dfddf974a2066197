"""Converts a ``Step`` to one row of ``steps`` and back, without loss.

Columns hold the figures that are queried and drawn; the rest is ``detail``, a msgpack array of mostly small integers:
each figure is stored as its difference from a figure that it is usually equal or close to.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from ..messages.telemetry import STEP_PHASES, Closing, PhaseRecord, Span, Step, Update
from .schema import PHASE_COLUMNS, STEP_COLUMNS

FIRST_PHASE_COLUMN = len(STEP_COLUMNS)
PHASE_WIDTH = len(PHASE_COLUMNS)
DETAIL_COLUMN = FIRST_PHASE_COLUMN + len(STEP_PHASES) * PHASE_WIDTH
INSERT_STEP = f"INSERT OR REPLACE INTO steps VALUES ({', '.join('?' * (DETAIL_COLUMN + 1))})"
INSERT_UPDATE = f"INSERT OR REPLACE INTO updates VALUES ({', '.join('?' * 11)})"
INSERT_EXTRA = f"INSERT OR REPLACE INTO extra_phases VALUES ({', '.join('?' * 14)})"

_NO_PHASE = (None,) * PHASE_WIDTH
_POSITIONS = {name: position for position, name in enumerate(STEP_PHASES)}
_BLOCK = 512
"""PyTorch's CUDA allocator allocates multiples of 512 bytes (kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp)."""

# Bits of detail[0].
_OVERFLOW = 1
_LOSS_NAN = 2
_LR_NAN = 4
_NORM_NAN = 8
_ACTIVE = 16
_REQUESTED = 32
_RESIDENT = 64
_HEAD = 11
"""Entries of ``detail`` before those of the phases, which a map of the rarer figures follows, if there are any."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode

Row = tuple[Any, ...]


def step_rows(seq: int, t: float, step: Step) -> tuple[Row, list[Row]]:
    """Return a row of ``steps``, and rows of ``extra_phases`` for the phases that have no columns there.

    Raises:
        OverflowError: an invalid figure does not fit its column.
    """
    phases = step.phases
    allocated_top = reserved_top = resident_top = 0
    bits = _OVERFLOW if step.overflow else 0
    last = -1
    regular = True
    measures = None
    for phase in phases:
        peak = phase.allocated.peak
        if peak > allocated_top:
            allocated_top = peak
        peak = phase.reserved.peak
        if peak > reserved_top:
            reserved_top = peak
        measured = 0
        if phase.active is not None:
            measured = _ACTIVE
        if phase.requested is not None:
            measured |= _REQUESTED
        if phase.resident is not None:
            measured |= _RESIDENT
            if phase.resident.peak > resident_top:
                resident_top = phase.resident.peak
        position = _POSITIONS.get(phase.name, -1)
        if position <= last or measured != measures:
            if position <= last or measures is not None:
                regular = False
            measures = measured
        last = position
    order: list[int | PhaseRecord] | None = None
    in_columns: Sequence[PhaseRecord] = phases
    if not regular:
        order, in_columns, measures = _split(phases)
    bits |= measures or 0
    loss, lr, grad_norm = step.loss, step.lr, step.grad_norm
    if step.started != step.started:
        raise OverflowError("a step that started at no time")
    # SQLite has no NaN: it stores NULL, which means None here.
    if loss is not None and loss != loss:
        bits |= _LOSS_NAN
    if lr is not None and lr != lr:
        bits |= _LR_NAN
    if grad_norm is not None and grad_norm != grad_norm:
        bits |= _NORM_NAN
    micro_steps, tokens = step.micro_steps, step.tokens
    detail: list[Any] = [
        bits,
        micro_steps,
        step.samples,
        step.padded_tokens - tokens,
        step.retries,
        step.ooms,
        step.probe_us,
        step.dropped,
        step.loss_scale,
        step.batch_shape or None,
        order,
    ]
    row: list[Any] = [
        seq,
        t,
        step.rank,
        step.step,
        step.started,
        step.host_us,
        step.device_us,
        loss,
        lr,
        grad_norm,
        tokens,
        allocated_top,
        reserved_top,
        resident_top if bits & _RESIDENT else None,
    ]
    allocated_end, reserved_end, resident_end = allocated_top, reserved_top, resident_top
    ended = slack = next_position = 0
    lacking = len(in_columns) < len(STEP_PHASES)
    waited: dict[str, int] = {}
    for phase in in_columns:
        if lacking:
            position = _POSITIONS[phase.name]
            while next_position < position:
                row += _NO_PHASE
                next_position += 1
            next_position += 1
        allocated, reserved = phase.allocated, phase.reserved
        start, end, peak = allocated.start, allocated.end, allocated.peak
        reserved_start = reserved.start
        host_us = phase.host_us
        row += (
            host_us,
            phase.device_us,
            start - allocated_end,
            end - start,
            allocated_top - peak,
            reserved_start - reserved_end,
            reserved.end - reserved_start,
            reserved_top - reserved.peak,
        )
        allocated_end, reserved_end = end, reserved.end
        start_us, allocations, size = phase.start_us, phase.allocations, phase.allocated_bytes
        if size < 0:
            raise OverflowError("a negative number of bytes allocated")
        detail += (
            start_us - ended,
            phase.count - micro_steps,
            allocations,
            allocations - phase.frees,
            -1 - size if size % _BLOCK else size // _BLOCK,
            phase.collective_us,
            phase.collectives,
        )
        ended = start_us + host_us
        active, requested, resident = phase.active, phase.requested, phase.resident
        if active is not None:
            detail += (active.start - start, active.end - end, active.peak - peak)
        if requested is not None:
            # The rounding overhead (allocated - requested) changes little from one point to the next.
            rounding = start - requested.start
            detail += (rounding - slack, end - requested.end - rounding, peak - requested.peak - rounding)
            slack = end - requested.end
        if resident is not None:
            detail += (
                resident.start - resident_end,
                resident.end - resident.start,
                resident_top - resident.peak,
            )
            resident_end = resident.end
        if phase.waited_us is not None:
            waited[phase.name] = phase.waited_us
    while lacking and next_position < len(STEP_PHASES):
        row += _NO_PHASE
        next_position += 1
    rest: dict[str, Any] = {}
    if step.label_tokens or step.updates:
        rest = {"labels": step.label_tokens, "updates": step.updates}
    if step.cpu_us:
        rest["cpu"] = step.cpu_us
    if step.flops:
        rest["flops"] = step.flops
    if waited:
        rest["waited"] = waited
    if step.fetch_us is not None:
        rest["fetch"] = step.fetch_us
    if rest:
        detail.append(rest)
    row.append(_encode(detail))
    return tuple(row), _extra_rows(row, step, order) if order else []


def _split(phases: list[PhaseRecord]) -> tuple[list[int | PhaseRecord], list[PhaseRecord], int | None]:
    """Separate the phases that fit the columns from the others, whatever order they ran in.

    Returns the order of all (a column phase by its position in ``STEP_PHASES``, another as a whole), the column phases
    in the order of their columns, and the bits of what was measured in these (None: there are none).
    """
    order: list[int | PhaseRecord] = []
    in_columns: dict[int, PhaseRecord] = {}
    measures = None
    for phase in phases:
        measured = _measured(phase)
        position = _POSITIONS.get(phase.name, -1)
        if position >= 0 and position not in in_columns and (measures is None or measured == measures):
            measures = measured
            order.append(position)
            in_columns[position] = phase
        else:
            order.append(phase)
    return order, [in_columns[position] for position in sorted(in_columns)], measures


def _measured(phase: PhaseRecord) -> int:
    bits = 0 if phase.active is None else _ACTIVE
    bits |= 0 if phase.requested is None else _REQUESTED
    return bits | (0 if phase.resident is None else _RESIDENT)


def _extra_rows(row: Sequence[Any], step: Step, order: list[int | PhaseRecord]) -> list[Row]:
    return [
        _extra_row(row[0], position, row[1], step, phase)
        for position, phase in enumerate(order)
        if not isinstance(phase, int)
    ]


def _extra_row(seq: int, position: int, t: float, of: Step | Closing, phase: PhaseRecord) -> Row:
    return (
        *(seq, position, t, of.rank, of.step, phase.name, phase.host_us, phase.device_us),
        *(phase.allocated.start, phase.allocated.end, phase.allocated.peak),
        *(phase.reserved.start, phase.reserved.end, phase.reserved.peak),
    )


def closing_rows(seq: int, t: float, closing: Closing) -> list[Row]:
    """Return the rows of ``extra_phases`` for the phases of a rank after its last step."""
    return [_extra_row(seq, position, t, closing, phase) for position, phase in enumerate(closing.phases)]


def update_rows(seq: int, t: float, step: Step) -> list[Row]:
    """Return the rows of ``updates``: one for each of several engines or optimizers; usually none."""
    return [
        (
            *(seq, position, t, step.rank, step.step, update.name, update.count, update.micro_steps),
            *(update.loss, update.lr, update.grad_norm),
        )
        for position, update in enumerate(step.updates)
    ]


def step_from_row(row: Sequence[Any]) -> Step:
    """Return the step of a row made by ``step_rows``."""
    detail: list[Any] = _decode(row[DETAIL_COLUMN])
    bits, micro_steps, samples, padding, retries, ooms, probe_us, dropped, loss_scale, shape, order = detail[:_HEAD]
    nan = float("nan")
    _, _, rank, number, started, host_us, device_us, loss, lr, grad_norm, tokens = row[:11]
    rest: dict[str, Any] = detail[-1] if len(detail) > _HEAD and isinstance(detail[-1], dict) else {}
    phases = _phases_from_row(row, detail, bits, micro_steps, rest.get("waited", {}))
    if order is not None:
        by_position = {_POSITIONS[phase.name]: phase for phase in phases}
        phases = [
            by_position[place] if isinstance(place, int) else msgspec.convert(place, PhaseRecord) for place in order
        ]
    return Step(
        rank=rank,
        step=number,
        started=started,
        host_us=host_us,
        phases=phases,
        device_us=device_us,
        micro_steps=micro_steps,
        loss=nan if bits & _LOSS_NAN else loss,
        lr=nan if bits & _LR_NAN else lr,
        grad_norm=nan if bits & _NORM_NAN else grad_norm,
        loss_scale=loss_scale,
        overflow=bool(bits & _OVERFLOW),
        batch_shape=shape or [],
        samples=samples,
        tokens=tokens,
        padded_tokens=tokens + padding,
        retries=retries,
        ooms=ooms,
        probe_us=probe_us,
        dropped=dropped,
        label_tokens=rest.get("labels", 0),
        updates=msgspec.convert(rest.get("updates", []), list[Update]),
        cpu_us=rest.get("cpu", 0),
        flops=rest.get("flops", 0.0),
        fetch_us=rest.get("fetch"),
    )


def _phases_from_row(
    row: Sequence[Any], detail: list[Any], bits: int, micro_steps: int, waited: dict[str, int]
) -> list[PhaseRecord]:
    allocated_top, reserved_top, resident_top = row[11], row[12], row[13] or 0
    allocated_end, reserved_end, resident_end = allocated_top, reserved_top, resident_top
    at, column = _HEAD, FIRST_PHASE_COLUMN
    ended = slack = 0
    phases: list[PhaseRecord] = []
    for name in STEP_PHASES:
        host_us, device_us, a_from, a_growth, a_below, r_from, r_growth, r_below = row[column : column + PHASE_WIDTH]
        column += PHASE_WIDTH
        if host_us is None:
            continue
        start = allocated_end + a_from
        end, peak = start + a_growth, allocated_top - a_below
        reserved_start = reserved_end + r_from
        reserved = Span(reserved_start, reserved_start + r_growth, reserved_top - r_below)
        allocated_end, reserved_end = end, reserved.end
        start_us, count, allocations, kept, size, collective_us, collectives = detail[at : at + 7]
        at += 7
        start_us += ended
        ended = start_us + host_us
        active = requested = resident = None
        if bits & _ACTIVE:
            active = Span(start + detail[at], end + detail[at + 1], peak + detail[at + 2])
            at += 3
        if bits & _REQUESTED:
            rounding = slack + detail[at]
            slack = rounding + detail[at + 1]
            requested = Span(start - rounding, end - slack, peak - rounding - detail[at + 2])
            at += 3
        if bits & _RESIDENT:
            first = resident_end + detail[at]
            resident_end = first + detail[at + 1]
            resident = Span(first, resident_end, resident_top - detail[at + 2])
            at += 3
        phases.append(
            PhaseRecord(
                name=name,
                start_us=start_us,
                host_us=host_us,
                allocated=Span(start, end, peak),
                reserved=reserved,
                device_us=device_us,
                active=active,
                requested=requested,
                resident=resident,
                count=count + micro_steps,
                allocations=allocations,
                frees=allocations - kept,
                allocated_bytes=-1 - size if size < 0 else size * _BLOCK,
                collective_us=collective_us,
                collectives=collectives,
                waited_us=waited.get(name),
            )
        )
    return phases
