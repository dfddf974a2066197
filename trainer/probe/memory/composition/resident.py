"""The composition of a rank's peaks where it computes on the CPU: of its resident memory.

There is no trace of malloc, so what is known is known at the phase's two ends: the storages that walking finds, as far
as they are in physical memory, and what glibc has handed out. A phase's parts are those at the end where glibc had
handed out more. Activations are what a forward left allocated beyond the storages that are known. The rest of the peak
(code, libraries, freed memory that was kept, and what came and went in between) is ``unattributed``.
"""

from .....protocol.memory import PhaseComposition
from ...device.reading import Reading
from ...phases.marks import Mark
from .attribution import UNCOMPOSED
from .step_capture import Walked
from .timeline import occurrences, origin

NOTE = (
    "the CPU has no trace of allocations: parts are as they stood at the end of the phase where more was allocated, "
    "activations what the forward left allocated, temporaries cannot be told apart"
)


class _Edge:
    """What was known at one mark."""

    def __init__(self, figure: Reading, walked: Walked) -> None:
        self.in_use = figure.allocated
        self.reserved = figure.reserved
        self.resident = walked.resident
        self.unknown = max(0, figure.allocated - sum(held.bytes for held in walked.held.values()))
        """Handed out by glibc, for no storage that was found."""


def compose(marks: list[Mark], figures: list[Reading], walks: list[Walked]) -> list[PhaseComposition]:
    """Compose each phase's highest peak from what stood at its ends.

    Args:
        marks: the step's.
        figures: of each mark.
        walks: at every boundary.
    """
    walked = {walk.mark: walk for walk in walks}
    found: dict[str, PhaseComposition] = {}
    saved = 0
    for name, first, last, _ in occurrences(marks, figures):
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
            at_us = max(0, (marks[last if at_end else first].ns - origin(marks).ns) // 1000)
            found[name] = PhaseComposition(name, peak, _parts(edge, live, peak), at_us, edge.reserved)
    return list(found.values())


def _parts(edge: _Edge, saved: int, peak: int) -> dict[str, int]:
    """Fill the peak from what is surest to what is least sure."""
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
