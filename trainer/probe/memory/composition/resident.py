"""Composition of a rank's peaks of resident memory, if it computes on the CPU.

malloc has no trace, so only a phase's two ends are known: the storages that walking finds, as far as they are in
physical memory, and glibc's allocated bytes. A phase's parts are those at the end with more allocated bytes.
Activations are the bytes that a forward left allocated beyond the known storages. The rest of the peak (code,
libraries, freed memory that glibc kept, memory allocated and freed in between) is ``unattributed``.
"""

import time
from collections.abc import Callable
from typing import Any

from .....protocol.analysis.allocator.composition.attribution import UNCOMPOSED
from .....protocol.analysis.allocator.composition.timeline import occurrences
from .....protocol.messages.memory import Composition, PhaseComposition
from .....protocol.messages.step_trace import StepMark
from ...device.reading import Reading
from ...phases.readings import first_of_step, readings
from .step_capture import StepCapture, Walked
from .step_trace import step_marks

NOTE = (
    "the CPU has no trace of allocations: the parts are those at whichever end of the phase had more allocated. "
    "Activations are what the forward left allocated, and temporaries cannot be distinguished"
)


class _Edge:
    """Known state at one mark."""

    def __init__(self, figure: Reading, walked: Walked) -> None:
        self.in_use = figure.allocated
        self.reserved = figure.reserved
        self.resident = walked.resident
        self.unknown = max(0, figure.allocated - sum(held.bytes for held in walked.held.values()))
        """Bytes allocated from glibc that belong to no known storage."""


def composition_on_cpu(capture: StepCapture, rank: int, read: Callable[[Any], Reading]) -> Composition:
    """Return the composition of a step on the CPU."""
    start, figures = time.perf_counter_ns(), readings(capture.marks, read)
    marks = step_marks(capture, figures)
    phases = _compose(marks, figures, capture.walks, marks[first_of_step(capture.marks)].us)
    return Composition(
        rank=rank,
        step=capture.step,
        time=time.time(),
        measure="glibc",
        phases=phases,
        reason=capture.reason,
        known=capture.known(),
        allocated_bytes=figures[-1].allocated,
        reserved_bytes=figures[-1].reserved,
        walk_us=capture.walk_ns // 1000,
        read_us=(time.perf_counter_ns() - start) // 1000,
        note=NOTE,
    )


def _compose(
    marks: list[StepMark], figures: list[Reading], walks: list[Walked], origin_us: int
) -> list[PhaseComposition]:
    """Compose each phase's highest peak from the memory at its ends."""
    walked = {walk.mark: walk for walk in walks}
    found: dict[str, PhaseComposition] = {}
    saved = 0
    for name, first, last, _, _ in occurrences(marks):
        if first not in walked or last not in walked:
            continue
        start, end = _Edge(figures[first], walked[first]), _Edge(figures[last], walked[last])
        if name == "forward":
            saved = max(0, end.unknown - start.unknown)
        peak = max(figure.resident_peak for figure in (*figures[first + 1 : last + 1], figures[last]))
        peak = max(peak, figures[first].resident, figures[last].resident)
        at_end = end.in_use >= start.in_use
        live = saved if (name == "forward" and at_end) or (name == "backward" and not at_end) else 0
        if name not in UNCOMPOSED and (name not in found or peak > found[name].peak_bytes):
            edge = end if at_end else start
            at_us = max(0, marks[last if at_end else first].us - origin_us)
            found[name] = PhaseComposition(name, peak, _parts(edge, live, peak), at_us, edge.reserved)
    return list(found.values())


def _parts(edge: _Edge, saved: int, peak: int) -> dict[str, int]:
    """Divide the peak into parts, the most certain part first."""
    parts: dict[str, int] = {}
    rest = peak
    for part, size in (*edge.resident.items(), ("activations", saved), ("other", max(0, edge.unknown - saved))):
        taken = min(size, rest)
        if taken:
            parts[part] = parts.get(part, 0) + taken
            rest -= taken
    if rest:
        parts["unattributed"] = rest
    return parts
