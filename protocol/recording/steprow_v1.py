"""Reads a row of ``steps`` of schema 1, in which most figures are differences from a figure that they are close to."""

from collections.abc import Sequence
from typing import Any

import msgspec

from ..messages.telemetry import STEP_PHASES, PhaseRecord, Span, Step, Update

_FIRST_PHASE_COLUMN, _PHASE_WIDTH = 14, 8
_DETAIL_COLUMN = _FIRST_PHASE_COLUMN + len(STEP_PHASES) * _PHASE_WIDTH
_BLOCK = 512
"""``allocated_bytes`` is in blocks of 512 bytes; -1 less the bytes if it is no multiple."""

# Bits of detail[0].
_OVERFLOW, _LOSS_NAN, _LR_NAN, _NORM_NAN, _ACTIVE, _REQUESTED, _RESIDENT = (1 << bit for bit in range(7))
_HEAD = 11
"""Entries of ``detail`` before those of the phases, which a map of the rarer figures follows, if there are any."""
_decode = msgspec.msgpack.Decoder().decode


def step_from_row(row: Sequence[Any]) -> Step:
    """Return the step of a row."""
    detail: list[Any] = _decode(row[_DETAIL_COLUMN])
    bits, micro_steps, samples, padding, retries, ooms, probe_us, dropped, loss_scale, shape, order = detail[:_HEAD]
    nan = float("nan")
    _, _, rank, number, started, host_us, device_us, loss, lr, grad_norm, tokens = row[:11]
    rest: dict[str, Any] = detail[-1] if len(detail) > _HEAD and isinstance(detail[-1], dict) else {}
    phases = _phases_from_row(row, detail, bits, micro_steps, rest.get("waited", {}))
    if order is not None:
        by_position = {STEP_PHASES.index(phase.name): phase for phase in phases}
        phases = [
            by_position[place] if isinstance(place, int) else msgspec.convert(place, PhaseRecord) for place in order
        ]
    return Step(
        *(rank, number, started, host_us, phases, device_us, micro_steps),
        *(nan if bits & _LOSS_NAN else loss, nan if bits & _LR_NAN else lr, nan if bits & _NORM_NAN else grad_norm),
        *(loss_scale, bool(bits & _OVERFLOW), shape or [], samples, tokens, tokens + padding, retries, ooms),
        *(probe_us, dropped),
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
    at, column = _HEAD, _FIRST_PHASE_COLUMN
    ended = slack = 0
    phases: list[PhaseRecord] = []
    for name in STEP_PHASES:
        host_us, device_us, a_from, a_growth, a_below, r_from, r_growth, r_below = row[column : column + _PHASE_WIDTH]
        column += _PHASE_WIDTH
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
                *(name, start_us, host_us, Span(start, end, peak), reserved, device_us, active, requested, resident),
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
