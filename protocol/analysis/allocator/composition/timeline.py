"""A step on the allocator's own trace: the positions of its phases, and the bytes allocated after every entry.

Positions count entries: position ``p`` is the state after the first ``p`` of them. Phase boundaries are known by time,
to some microseconds. The counters that the probe read there are exact, so a boundary is moved to the nearest position
at which the trace has the same figure.
"""

from array import array
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import NamedTuple

from ....messages.step_trace import StepMark
from ....snapshot.model import SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, Snapshot
from ..snapshot.allocations import BEFORE, Allocations, columns

SLACK_US = 300
"""Maximum shift of a boundary to a position at which the figures agree."""
_RESERVES = {SEGMENT_ALLOC: 1, SEGMENT_MAP: 1, SEGMENT_FREE: -1, SEGMENT_UNMAP: -1}


class Occurrence(NamedTuple):
    """One occurrence of a phase between two marks, with the probe's counters there."""

    name: str
    first: int
    """Index of its first mark."""
    last: int
    """Index of its last mark."""
    peak_bytes: int
    us: int
    """Its duration."""


class Span(NamedTuple):
    """An occurrence on the trace: from the state at ``begin`` to that at ``end``."""

    name: str
    begin: int
    end: int
    peak_bytes: int
    covered: bool
    """Whether the trace reaches back to its start."""
    begin_us: int
    """Its start, since the epoch."""


def occurrences(marks: list[StepMark]) -> list[Occurrence]:
    """Return a step's phases in order of time, each with its highest allocated bytes."""
    found: list[Occurrence] = []
    start = 0
    for end in range(1, len(marks)):
        if marks[end].phase in ("", marks[start].phase) and end + 1 < len(marks):
            continue  # the script reset its own peaks here, or the label was corrected; the phase continues
        first, last = marks[start], marks[end]
        peak = max(first.allocated, last.allocated, *(mark.peak for mark in marks[start + 1 : end + 1]))
        found.append(Occurrence(first.phase, start, end, peak, last.us - first.us))
        start = end
    return found


class Timeline:
    """Allocated and reserved bytes of one device after every entry of its trace."""

    def __init__(self, snapshot: Snapshot, allocations: Allocations) -> None:
        self.allocations = allocations
        self.snapshot = snapshot
        self.times = columns(allocations.trace.times, "q")
        count = allocations.entries
        deltas = [0] * (count + 2)
        lives = zip(allocations.begins, allocations.freed, allocations.sizes, strict=True)
        for begin, freed, size in lives:
            if freed != BEFORE:
                deltas[begin + 1] += size
                deltas[freed + 1] -= size
        self.allocated = array("q", list(accumulate(deltas))[:-1])
        """One value more than entries."""
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

    def position(self, us: int, allocated: int | None) -> int:
        """Return the position of a boundary.

        Args:
            allocated: the counter's value there; None: not read.
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

    def positions(self, marks: list[StepMark]) -> list[int]:
        """Return the positions of a step's marks, in non-decreasing order."""
        found: list[int] = []
        for mark in marks:
            here = self.position(mark.us, mark.allocated if mark.measured else None)
            found.append(max(here, found[-1]) if found else here)
        return found

    def spans(self, marks: list[StepMark], whole: bool) -> list[Span]:
        """Return a step's phases with their positions on the trace.

        Args:
            whole: whether the ring has lost no entries since before the step started.
        """
        places = self.positions(marks)
        oldest = self.times[0] if len(self.times) else 0
        found: list[Span] = []
        for name, first, last, peak, _ in occurrences(marks):
            begin_us = marks[first].us
            found.append(Span(name, places[first], places[last], peak, whole or 0 < oldest <= begin_us, begin_us))
        return found
