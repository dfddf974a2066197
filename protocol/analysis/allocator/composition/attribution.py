"""Attributes the peak of each phase to parts, from a trace, its phases, and the storages found by walking.

A block that is allocated at the moment of the peak belongs to the part of the storage found in it. Without a storage
its lifetime decides: from a forward into the backward it is an activation, within one phase a temporary. The remainder
of the peak is ``unattributed``.
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from ....messages.memory import PhaseComposition
from ..snapshot.allocations import BEFORE, Allocations
from .timeline import Span, Timeline

UNCOMPOSED = frozenset(("init", "idle"))
"""Phases without a composition: the time between the other phases."""


class Seen(NamedTuple):
    """A storage found in a block at a position of the trace."""

    position: int
    address: int
    part: str


def parts_of(allocations: Allocations, seen: Iterable[Seen]) -> dict[int, str]:
    """Return the part of each allocation in which a storage was found, by the allocation's number."""
    sightings = list(dict.fromkeys(seen))
    wanted = {sighting.address for sighting in sightings}
    of_address: dict[int, list[int]] = {}
    for number, address in enumerate(allocations.addresses):
        if address in wanted:
            of_address.setdefault(address, []).append(number)
    begins, freed = allocations.begins, allocations.freed
    parts: dict[int, str] = {}
    for position, address, part in sightings:
        for number in of_address.get(address, ()):
            if begins[number] < position <= freed[number]:
                # A gradient may be part of a reduction bucket that was found as a gradient only.
                if part == "buckets" or number not in parts:
                    parts[number] = part
                break
    return parts


class Attribution:
    """The compositions of one step.

    Args:
        parts: parts of the allocations with known storages, by allocation.
        recomputed: intervals of positions in which layers were recomputed inside a backward.
    """

    def __init__(
        self,
        timeline: Timeline,
        spans: list[Span],
        parts: dict[int, str],
        recomputed: list[tuple[int, int]],
        origin_us: int,
    ) -> None:
        self._timeline = timeline
        self._of = timeline.allocations
        self._spans = spans
        self._parts = parts
        self._recomputed = recomputed
        self._origin_us = origin_us
        self._begins = [span.begin for span in spans]
        self.notes: list[str] = []

    def phases(self) -> list[PhaseComposition]:
        """Return the composition of each phase's highest peak covered by the trace, in order of first occurrence."""
        best: dict[str, int] = {}
        highest: dict[str, int] = {}
        for number, span in enumerate(self._spans):
            if span.name in UNCOMPOSED:
                continue
            highest[span.name] = max(highest.get(span.name, 0), span.peak_bytes)
            if span.covered and (span.name not in best or span.peak_bytes > self._spans[best[span.name]].peak_bytes):
                best[span.name] = number
        for name in highest:
            if name not in best:
                self.notes.append(f"{name}: its allocations had left the recorder's ring")
        return [self._phase(number, highest[name]) for name, number in best.items()]

    def _phase(self, number: int, highest: int) -> PhaseComposition:
        span, timeline = self._spans[number], self._timeline
        position = self._peak_position(span)
        parts = self._parts_at(position, number)
        found = timeline.allocated[position]
        rest = highest - sum(parts.values())
        if found != highest:
            self.notes.append(f"{span.name}: the trace has {found} bytes where the allocator counted {highest}")
        if rest < 0:  # the trace is above the counted peak during the whole phase
            parts, rest = {}, highest
        if rest:
            parts["unattributed"] = rest
        us = timeline.times[position - 1] if position > span.begin else span.begin_us
        return PhaseComposition(span.name, highest, parts, max(0, us - self._origin_us), timeline.reserved[position])

    def _peak_position(self, span: Span) -> int:
        """Return the first position of a span's peak; if the trace exceeds it, of the highest value below."""
        curve = self._timeline.allocated[span.begin : span.end + 1]
        top = max(curve)
        if top > span.peak_bytes:
            top = max((value for value in curve if value <= span.peak_bytes), default=min(curve))
        return span.begin + curve.index(top)

    def _parts_at(self, position: int, number: int) -> dict[str, int]:
        of, sums = self._of, dict[str, int]()
        lives = zip(of.begins, of.freed, strict=True)
        for allocation in [n for n, (begin, freed) in enumerate(lives) if begin < position <= freed]:
            part = self._parts.get(allocation) or self._by_life(allocation, number)
            sums[part] = sums.get(part, 0) + of.sizes[allocation]
        return sums

    def _by_life(self, allocation: int, peak: int) -> str:
        """Return the part of a block without a known storage, from the phases of its allocation and its free."""
        begin, freed = self._of.begins[allocation], self._of.freed[allocation]
        born = self._span_of(begin) if begin != BEFORE else -1
        if born < 0:
            return "other"
        gone = self._span_of(freed)
        name = self._spans[born].name
        if gone == born:
            return "activations" if name == "backward" and self._is_recomputed(begin, freed) else "temporaries"
        if name != "forward":
            return "other"
        if gone < len(self._spans) and self._spans[gone].name == "backward":
            return "activations"
        # Kept longer than a backward needs it (a script's ``outputs``): an activation until a backward has passed.
        passed = any(span.name == "backward" for span in self._spans[born:peak])
        return "other" if passed or self._spans[peak].name not in ("forward", "backward") else "activations"

    def _span_of(self, entry: int) -> int:
        """Return the index of an entry's span; -1 before the step, the number of spans after it."""
        if not self._spans or entry >= self._spans[-1].end:
            return len(self._spans)
        return bisect_right(self._begins, entry) - 1

    def _is_recomputed(self, begin: int, freed: int) -> bool:
        place = bisect_right(self._recomputed, (begin, 1 << 62)) - 1
        return place >= 0 and begin < self._recomputed[place][1] <= freed
