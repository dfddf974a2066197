"""Figures of a step's phases: the shares of its time, and the rows of the phase table."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ...protocol.messages.telemetry import PHASES, STEP_PHASES, PhaseRecord, Span, Step

_OWN_SHARE = (*STEP_PHASES, "generate")
SHARE_NAMES: tuple[str, ...] = (*(name for name in PHASES if name in _OWN_SHARE), "wait", "other")
"""The parts of a step, in the order they are drawn; ``wait`` is time inside collective calls."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of a step's time; fractions that add up to 1 (all 0 if unknown)."""

    clock: Literal["device", "host"]
    """The device's clock if every step has device times, else the host's."""
    step_ms: float
    """Mean duration of these steps, milliseconds."""
    parts: dict[str, float]
    """Fraction of the step for each name of ``SHARE_NAMES``. On the device's clock collectives run inside the phases'
    kernels and cannot be separated from them, so ``wait`` is 0 there.
    """


def shares(steps: Iterable[Step]) -> Shares:
    """Return the shares of these steps' phases, in device time if all steps have it, else in host time.

    In host time, time inside collective calls is subtracted from its phase and counted as ``wait``. The record of
    ``init`` in the first step is excluded, because it lies before that step.
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
    """Number of occurrences (micro-steps)."""
    allocated: Span
    reserved: Span
    resident: Span | None
    """Resident set size; None on CUDA."""
    growth: int
    """Bytes that stayed allocated, of the figure with exact peaks (allocated on CUDA, resident on the CPU)."""
    transient: int
    """Bytes freed within the phase, of the same figure."""
    peak: int
    """That figure's peak."""
    collective_ms: float
    collectives: int
    allocations: int
    frees: int
    allocated_bytes: int


def row(record: PhaseRecord) -> PhaseRow:
    """Return the table's row of one phase."""
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
    """Return the phase table of a step, in the order the phases ran."""
    return [] if step is None else [row(record) for record in sorted(step.phases, key=lambda each: each.start_us)]
