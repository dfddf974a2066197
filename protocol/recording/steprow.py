"""Converts a ``Step`` to one row of ``steps`` and back, without loss.

Columns hold what is queried and drawn, in plain units. ``rest`` is one msgpack array of the other figures (``_Rest``).
``steprow_v1`` reads the rows of schema 1.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from ..messages.telemetry import STEP_PHASES, Closing, PhaseRecord, Span, Step, Update
from .schema import PHASE_COLUMNS, STEP_COLUMNS

FIRST_PHASE_COLUMN = len(STEP_COLUMNS)
PHASE_WIDTH = len(PHASE_COLUMNS)
REST_COLUMN = FIRST_PHASE_COLUMN + len(STEP_PHASES) * PHASE_WIDTH

_NO_PHASE = (None,) * PHASE_WIDTH
_POSITIONS = {name: position for position, name in enumerate(STEP_PHASES)}

Row = tuple[Any, ...]
_Margin = list[int]
"""How far a span is below another: at the start, and how much more at the end and at the peak; empty: equal."""


class _PhaseRest(msgspec.Struct, array_like=True, gc=False):
    """What a phase in the columns has besides them."""

    position: int
    gap_us: int
    """From the end of the phase before it, if that ran without a break, to its start."""
    count: int
    allocations: int
    frees: int
    allocated_bytes: int
    collective_us: int
    collectives: int
    active: _Margin | None
    """Below ``allocated``, as ``requested``."""
    requested: _Margin | None
    resident: Span | None
    waited_us: int | None


class _Rare(msgspec.Struct, omit_defaults=True, gc=False):
    """What few steps have, as a map."""

    retries: int = 0
    ooms: int = 0
    dropped: int = 0
    overflow: bool = False
    updates: list[Update] = []
    not_numbers: list[str] = []
    """The columns that are NaN, which SQLite stores as NULL."""
    others: list[PhaseRecord] = []
    """Phases without columns: of another name, or of a name that the step has twice."""


class _Rest(msgspec.Struct, array_like=True, gc=False):
    """What a step has besides its columns."""

    micro_steps: int
    samples: int
    padding: int
    """Padded tokens less tokens."""
    probe_us: int
    loss_scale: float | None
    batch_shape: list[int]
    label_tokens: int
    cpu_us: int
    flops: float | None
    fetch_us: int | None
    phases: list[_PhaseRest | None]
    """All phases in the order they ran; None stands for the next of ``rare.others``."""
    rare: _Rare


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Rest).decode


def step_rows(seq: int, t: float, step: Step) -> tuple[Row, list[Row]]:
    """Return a row of ``steps``, and rows of ``extra_phases`` for the phases that have no columns there.

    Raises:
        OverflowError: an invalid figure does not fit its column.
    """
    if step.started != step.started:
        raise OverflowError("a step that started at no time")
    columns: list[Row] = [_NO_PHASE] * len(STEP_PHASES)
    phases: list[_PhaseRest | None] = []
    others: list[PhaseRecord] = []
    extra: list[Row] = []
    ended = 0
    for phase in step.phases:
        position = _POSITIONS.get(phase.name, -1)
        if position < 0 or columns[position] is not _NO_PHASE:
            extra.append(_extra_row(seq, len(phases), t, step, phase))
            others.append(phase)
            phases.append(None)
            continue
        allocated, reserved = phase.allocated, phase.reserved
        columns[position] = (
            *(phase.host_us, phase.device_us, allocated.start, allocated.end, allocated.peak),
            *(reserved.start, reserved.end, reserved.peak),
        )
        phases.append(_phase_rest(position, phase, ended))
        ended = phase.start_us + phase.host_us
    loss, lr, grad_norm, spans = step.loss, step.lr, step.grad_norm, step.phases
    rare = _Rare(step.retries, step.ooms, step.dropped, step.overflow, step.updates, others=others)
    for name, value in (("loss", loss), ("lr", lr), ("grad_norm", grad_norm)):
        if value != value:
            rare.not_numbers = [*rare.not_numbers, name]
    rest = _Rest(
        *(step.micro_steps, step.samples, step.padded_tokens - step.tokens, step.probe_us, step.loss_scale),
        *(step.batch_shape, step.label_tokens, step.cpu_us, step.flops or None, step.fetch_us, phases, rare),
    )
    row = (
        *(seq, t, step.rank, step.step, step.started, step.host_us, step.device_us, loss, lr, grad_norm, step.tokens),
        max([phase.allocated.peak for phase in spans], default=0),
        max([phase.reserved.peak for phase in spans], default=0),
        max([phase.resident.peak for phase in spans if phase.resident is not None], default=None),
        *(*columns[0], *columns[1], *columns[2], *columns[3]),
        _encode(rest),
    )
    return row, extra


def _phase_rest(position: int, phase: PhaseRecord, ended: int) -> _PhaseRest:
    allocated = phase.allocated
    return _PhaseRest(
        *(position, phase.start_us - ended, phase.count, phase.allocations, phase.frees, phase.allocated_bytes),
        *(phase.collective_us, phase.collectives),
        None if phase.active is None else _margin(allocated, phase.active),
        None if phase.requested is None else _margin(allocated, phase.requested),
        *(phase.resident, phase.waited_us),
    )


def _margin(span: Span, lower: Span) -> _Margin:
    if lower == span:
        return []
    first = span.start - lower.start
    return [first, span.end - lower.end - first, span.peak - lower.peak - first]


def _lower(span: Span, margin: _Margin | None) -> Span | None:
    if not margin:
        return None if margin is None else span
    first, end, peak = margin
    return Span(span.start - first, span.end - first - end, span.peak - first - peak)


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
    """Return the step of a row made by ``step_rows``.

    Raises:
        msgspec.MsgspecError, LookupError, TypeError: no writer wrote the row.
    """
    _, _, rank, number, started, host_us, device_us, loss, lr, grad_norm, tokens = row[:11]
    rest = _decode(row[REST_COLUMN])
    rare = rest.rare
    phases: list[PhaseRecord] = []
    ended = 0
    for more in rest.phases:
        if more is None:
            phases.append(rare.others.pop(0))
            continue
        phases.append(_phase_from(row, more, ended))
        ended = phases[-1].start_us + phases[-1].host_us
    figures = {"loss": loss, "lr": lr, "grad_norm": grad_norm} | dict.fromkeys(rare.not_numbers, float("nan"))
    return Step(
        rank=rank,
        step=number,
        started=started,
        host_us=host_us,
        phases=phases,
        device_us=device_us,
        micro_steps=rest.micro_steps,
        **figures,
        loss_scale=rest.loss_scale,
        overflow=rare.overflow,
        batch_shape=rest.batch_shape,
        samples=rest.samples,
        tokens=tokens,
        padded_tokens=tokens + rest.padding,
        retries=rare.retries,
        ooms=rare.ooms,
        probe_us=rest.probe_us,
        dropped=rare.dropped,
        label_tokens=rest.label_tokens,
        updates=rare.updates,
        cpu_us=rest.cpu_us,
        flops=rest.flops or 0.0,
        fetch_us=rest.fetch_us,
    )


def _phase_from(row: Sequence[Any], rest: _PhaseRest, ended: int) -> PhaseRecord:
    at = FIRST_PHASE_COLUMN + rest.position * PHASE_WIDTH
    host_us, device_us, start, end, peak, *reserved = row[at : at + PHASE_WIDTH]
    allocated = Span(start, end, peak)
    return PhaseRecord(
        name=STEP_PHASES[rest.position],
        start_us=ended + rest.gap_us,
        host_us=host_us,
        allocated=allocated,
        reserved=Span(*reserved),
        device_us=device_us,
        active=_lower(allocated, rest.active),
        requested=_lower(allocated, rest.requested),
        resident=rest.resident,
        count=rest.count,
        allocations=rest.allocations,
        frees=rest.frees,
        allocated_bytes=rest.allocated_bytes,
        collective_us=rest.collective_us,
        collectives=rest.collectives,
        waited_us=rest.waited_us,
    )
