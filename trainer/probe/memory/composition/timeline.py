"""A step on the allocator's own trace: where its phases lie in it, and how much was allocated after every entry.

Positions count entries: position ``p`` is the state after the first ``p`` of them. Phase boundaries are known by time,
which is good to some microseconds; the counters that the probe read there are exact, so a boundary is moved to the
nearest position at which the trace has that very figure.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from .....protocol.analysis.allocator.snapshot.allocations import BEFORE, Allocations, columns
from .....protocol.snapshot.model import ALLOCATED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, Snapshot
from ...device.reading import Reading
from ...phases.marks import Mark
from ...phases.readings import first_of_step

SLACK_US = 300
"""How far a boundary may be moved to where the figures agree."""

_PULSE = 1023
"""Of a number, the bits that are all zero where ``pulse`` is called."""
_RESERVES = {SEGMENT_ALLOC: 1, SEGMENT_MAP: 1, SEGMENT_FREE: -1, SEGMENT_UNMAP: -1}


class Occurrence(NamedTuple):
    """One phase once, between two marks, with what the probe's counters said of it."""

    name: str
    first: int
    """Index of the mark it begins with."""
    last: int
    """Index of the mark it ends with."""
    peak_bytes: int


class Span(NamedTuple):
    """An occurrence on the trace: from the state at ``begin`` to that at ``end``."""

    name: str
    begin: int
    end: int
    peak_bytes: int
    covered: bool
    """The trace reaches back to its beginning."""
    begin_us: int
    """Since the epoch."""


def origin(marks: list[Mark]) -> Mark:
    """Give the mark a step is counted from: its first, or the end of what came before any step."""
    return marks[first_of_step(marks)]


def occurrences(marks: list[Mark], figures: list[Reading]) -> list[Occurrence]:
    """List a step's phases as they came, each with the highest that was allocated in it."""
    found: list[Occurrence] = []
    start = 0
    for end in range(1, len(marks)):
        if marks[end].phase in ("", marks[start].phase) and end + 1 < len(marks):
            continue  # the script read its own peaks here, or the label was corrected; the phase goes on
        inside = [figure.allocated_peak for figure in figures[start + 1 : end + 1]]
        peak = max(figures[start].allocated, figures[end].allocated, *inside)
        found.append(Occurrence(marks[start].phase, start, end, peak))
        start = end
    return found


class Timeline:
    """What one device had allocated and reserved after every entry of its trace.

    Args:
        snapshot: the columns of one read.
        allocations: of the same.
        pulse: called between slices of work.
    """

    def __init__(self, snapshot: Snapshot, allocations: Allocations, pulse: Callable[[], None]) -> None:
        self.allocations = allocations
        self.snapshot = snapshot
        self.times = columns(allocations.trace.times, "q")
        count = allocations.entries
        deltas = [0] * (count + 2)
        lives = zip(allocations.begins, allocations.freed, allocations.sizes, strict=True)
        for number, (begin, freed, size) in enumerate(lives):
            if not number & _PULSE:
                pulse()
            if freed != BEFORE:
                deltas[begin + 1] += size
                deltas[freed + 1] -= size
        self.allocated = array("q", list(accumulate(deltas))[:-1])
        """One value more than entries."""
        pulse()
        actions, sizes = allocations.trace.actions, columns(allocations.trace.sizes, "q")
        changes = [0] * (count + 1)
        for action, sign in _RESERVES.items():
            at = actions.find(action)
            while at >= 0:
                changes[at + 1] = sign * sizes[at]
                at = actions.find(action, at + 1)
        now = sum(segment.size for segment in snapshot.segments)
        changes[0] = max(0, now - sum(changes))
        self.reserved = array("q", accumulate(changes))
        pulse()

    @property
    def allocated_now(self) -> int:
        """Allocated at the moment of the read, from the blocks themselves."""
        states, sizes = self.snapshot.block_states, columns(self.snapshot.block_sizes, "q")
        return sum(size for size, state in zip(sizes, states, strict=True) if state == ALLOCATED)

    def position(self, us: int, allocated: int | None) -> int:
        """Find the position of a boundary.

        Args:
            us: its time, microseconds since the epoch.
            allocated: what the counters said there; None where they were not read.
        """
        times, curve = self.times, self.allocated
        at = bisect_right(times, us)
        if allocated is None or curve[at] == allocated:
            return at
        low, high = bisect_left(times, us - SLACK_US), bisect_right(times, us + SLACK_US)
        for away in range(1, max(at - low, high - at) + 1):
            for place in (at + away, at - away):
                if low <= place <= high and curve[place] == allocated:
                    return place
        return at

    def positions(self, marks: list[Mark], figures: list[Reading], offset_ns: int) -> list[int]:
        """Find the positions of a step's marks; never going back."""
        found: list[int] = []
        for mark, figure in zip(marks, figures, strict=True):
            here = self.position((mark.ns + offset_ns) // 1000, figure.allocated if mark.memory is not None else None)
            found.append(max(here, found[-1]) if found else here)
        return found

    def spans(self, marks: list[Mark], figures: list[Reading], offset_ns: int, whole: bool) -> list[Span]:
        """Lay a step's phases on the trace.

        Args:
            marks: the step's.
            figures: of each mark.
            offset_ns: what to add to a mark's time to get nanoseconds since the epoch.
            whole: nothing has fallen out of the ring since before the step began.
        """
        places = self.positions(marks, figures, offset_ns)
        oldest = self.times[0] if len(self.times) else 0
        found: list[Span] = []
        for name, first, last, peak in occurrences(marks, figures):
            begin_us = (marks[first].ns + offset_ns) // 1000
            found.append(Span(name, places[first], places[last], peak, whole or 0 < oldest <= begin_us, begin_us))
        return found
