"""The allocator at every entry of a trace: figures as curves, and what was live at any of them.

As PyTorch's own viewer does it, the window is tied to its end: what stands in the segments then is certain, and
walking the trace from there gives every moment before. The moment of entry ``k`` is the state right after it, and
``-1`` the state before the first.
"""

from array import array
from itertools import accumulate

from .allocations import BEFORE, Allocations, columns
from .checkpoints import Checkpoints, Totals
from .model import (
    ALLOCATED,
    OOM,
    PENDING,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Snapshot,
)

RESERVES = {SEGMENT_ALLOC: 1, SEGMENT_MAP: 1, SEGMENT_FREE: -1, SEGMENT_UNMAP: -1}
"""Actions that change reserved memory, and in which direction."""


class Replay:
    """One device of a snapshot, at every moment.

    ``allocated``, ``active``, ``requested`` and ``reserved`` hold one value an entry more than the trace, in bytes:
    position 0 is the state before the first entry, position ``k + 1`` that after entry ``k``; ``at`` asks by entry.
    """

    def __init__(self, snapshot: Snapshot, device: int) -> None:
        self.snapshot = snapshot
        self.device = device
        self.allocations = Allocations(snapshot, device)
        self.trace = self.allocations.trace
        self.entries = len(self.trace)
        self.segment_entries = [index for index, action in enumerate(self.trace.actions) if action in RESERVES]
        """The entries that change segments."""
        self._curves()
        self.peak_bytes = max(self.allocated)
        self.peak_index = self.allocated.index(self.peak_bytes) - 1
        """The first entry at which allocated memory is at its highest; -1 for before the first."""
        self.ooms = [index for index, action in enumerate(self.trace.actions) if action == OOM]
        self._checkpoints = Checkpoints(self.allocations)

    @property
    def last(self) -> int:
        """The index of the last entry; -1 without a trace."""
        return self.entries - 1

    def at(self, curve: "array[int]", index: int) -> int:
        """Give a curve's value right after entry ``index``."""
        return curve[max(BEFORE, min(index, self.last)) + 1]

    def _curves(self) -> None:
        of, length = self.allocations, self.entries + 2
        allocated, active, requested = ([0] * length for _ in range(3))
        for begin, freed, end, size, asked in zip(of.begins, of.freed, of.ends, of.sizes, of.requested, strict=True):
            # freed == BEFORE: it was pending when the window began and never counts as allocated.
            if freed != BEFORE:
                allocated[begin + 1] += size
                allocated[freed + 1] -= size
            active[begin + 1] += size
            active[end + 1] -= size
            requested[begin + 1] += asked
            requested[end + 1] -= asked
        self.allocated, self.active, self.requested = (
            array("q", list(accumulate(deltas))[:-1]) for deltas in (allocated, active, requested)
        )
        sizes, actions = columns(self.trace.sizes, "q"), self.trace.actions
        changes = [0] * (self.entries + 1)
        for index in self.segment_entries:
            changes[index + 1] = RESERVES[actions[index]] * sizes[index]
        end = sum(segment.size for segment in self.snapshot.segments if segment.device == self.device)
        changes[0] = max(0, end - sum(changes))
        self.reserved = array("q", accumulate(changes))

    def active_at(self, index: int) -> list[int]:
        """List the allocations whose blocks are taken right after entry ``index``: allocated, or pending."""
        return self._checkpoints.active_at(max(BEFORE, min(index, self.last)))

    def totals_at(self, index: int) -> Totals:
        """Sum up by stack what the program holds right after entry ``index``: bytes and blocks."""
        return self._checkpoints.totals_at(max(BEFORE, min(index, self.last)))

    def live_at(self, index: int) -> list[int]:
        """List the allocations that the program holds right after entry ``index``."""
        index = max(BEFORE, min(index, self.last))
        freed = self.allocations.freed
        return [number for number in self.active_at(index) if freed[number] > index]

    def state_at(self, number: int, index: int) -> int:
        """Tell whether an active allocation is ``ALLOCATED`` or ``PENDING`` right after entry ``index``."""
        return ALLOCATED if self.allocations.freed[number] > index else PENDING

    def time_of(self, index: int) -> int:
        """Give an entry's time, microseconds since 1970; 0 where none was recorded."""
        return columns(self.trace.times, "q")[index] if 0 <= index < self.entries else 0

    def oom_index(self) -> int | None:
        """Give the last out-of-memory entry, if there is one."""
        return self.ooms[-1] if self.ooms else None
