"""What a step's phases come to: the shares of its time, and the rows of the phase table."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ...protocol.telemetry import PHASES, STEP_PHASES, PhaseRecord, Span, Step

_OWN_SHARE = (*STEP_PHASES, "generate")
SHARE_NAMES: tuple[str, ...] = (*(name for name in PHASES if name in _OWN_SHARE), "wait", "other")
"""The parts of a step, in the order they are drawn; ``wait`` is time inside collective calls."""


@dataclass(frozen=True, slots=True)
class Shares:
    """How a step's time divides; fractions that add up to 1 (all 0 when nothing is known)."""

    clock: Literal["device", "host"]
    """Which clock: the device's where every step has it, else the host's."""
    step_ms: float
    """Mean length of the steps these shares are of, milliseconds."""
    parts: dict[str, float]
    """Fraction of the step for each name of ``SHARE_NAMES``. On the device's clock collectives run inside the phases'
    kernels and cannot be separated from them, so ``wait`` is 0 there.
    """


def shares(steps: Iterable[Step]) -> Shares:
    """Divide the time of these steps into phases: on device time when all of them have it, else on host time.

    On host time the seconds inside collective calls come off their phase and are ``wait``. The record of ``init`` that
    the first step carries lies before that step and is left out.
    """
    chosen = list(steps)
    clock: Literal["device", "host"] = "device" if chosen and all(_on_device(step) for step in chosen) else "host"
    parts = dict.fromkeys(SHARE_NAMES, 0.0)
    total = 0.0
    for step in chosen:
        known = 0
        for record in step.phases:
            if record.name == "init":
                continue
            wait = 0 if clock == "device" else min(record.collective_us, record.host_us)
            time = record.device_us if clock == "device" and record.device_us is not None else record.host_us
            parts[record.name if record.name in _OWN_SHARE else "other"] += time - wait
            parts["wait"] += wait
            known += time
        whole = max(known, (step.device_us if clock == "device" else step.host_us) or 0)
        parts["other"] += whole - known
        total += whole
    if total:
        parts = {name: time / total for name, time in parts.items()}
    return Shares(clock, total / len(chosen) / 1000 if chosen else 0.0, parts)


def _on_device(step: Step) -> bool:
    within = [record for record in step.phases if record.name != "init"]
    return bool(within) and all(record.device_us is not None for record in within)


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """One row of the phase table: times in milliseconds, memory in bytes."""

    name: str
    host_ms: float
    device_ms: float | None
    """None on the CPU, or while events were not read."""
    count: int
    """Occurrences folded into it: micro-steps."""
    allocated: Span
    reserved: Span
    resident: Span | None
    """Resident set size; None on CUDA."""
    growth: int
    """Bytes that stayed, of the figure whose peak is a true high-water mark."""
    transient: int
    """Bytes that came and went, of the same figure."""
    peak: int
    """That figure's peak."""
    collective_ms: float
    collectives: int
    allocations: int
    frees: int
    allocated_bytes: int


def row(record: PhaseRecord) -> PhaseRow:
    """Make the table's row of one phase."""
    true = record.peak_span
    return PhaseRow(
        name=record.name,
        host_ms=record.host_us / 1000,
        device_ms=None if record.device_us is None else record.device_us / 1000,
        count=record.count,
        allocated=record.allocated,
        reserved=record.reserved,
        resident=record.resident,
        growth=true.growth,
        transient=true.transient,
        peak=true.peak,
        collective_ms=record.collective_us / 1000,
        collectives=record.collectives,
        allocations=record.allocations,
        frees=record.frees,
        allocated_bytes=record.allocated_bytes,
    )


def rows(step: Step | None) -> list[PhaseRow]:
    """Make the phase table of a step, in the order the phases ran."""
    return [] if step is None else [row(record) for record in sorted(step.phases, key=lambda each: each.start_us)]
