"""State of the allocator at every entry of a trace: curves of figures, and the live allocations.

Like PyTorch's own viewer, the replay is anchored at the window's end: the segments are known then, and walking the
trace from there gives every earlier moment. The moment of entry ``k`` is the state right after it; ``-1`` is the state
before the first.
"""

from array import array
from functools import cached_property
from itertools import accumulate

from ....snapshot.model import (
    ALLOCATED,
    OOM,
    PENDING,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Snapshot,
)
from .allocations import BEFORE, BEGINS, FREED, FREED_AND_ENDS, NOTHING, Allocations, columns
from .live import ActiveBlocks, Begun, LiveSets, Totals
from .segments import SegmentHistory

RESERVES = {SEGMENT_ALLOC: 1, SEGMENT_MAP: 1, SEGMENT_FREE: -1, SEGMENT_UNMAP: -1}
"""Actions that change reserved memory, with the sign of the change."""


class Replay:
    """States of one device of a snapshot at every moment.

    ``allocated``, ``active``, ``requested`` and ``reserved`` have one value more than the trace has entries, in bytes:
    position 0 is the state before the first entry, position ``k + 1`` that after entry ``k``; ``at`` indexes by entry.
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
        """The first entry at which allocated memory is highest; -1: before the first."""
        self.ooms = [index for index, action in enumerate(self.trace.actions) if action == OOM]
        self._live = LiveSets(self.allocations)
        self._taken: dict[int, ActiveBlocks] = {}
        self._begun: Begun | None = None

    def complete(self, snapshot: Snapshot) -> None:
        """Add the stacks of the complete snapshot, if this was made without them."""
        self.snapshot = snapshot
        self.allocations.add_stacks(snapshot)
        self.trace = self.allocations.trace

    @cached_property
    def segments(self) -> SegmentHistory:
        """The segments at any moment."""
        return SegmentHistory(self.snapshot, self.device, self.trace, self.segment_entries)

    @property
    def last(self) -> int:
        """The index of the last entry; -1 without a trace."""
        return self.entries - 1

    def at(self, curve: "array[int]", index: int) -> int:
        """Return a curve's value right after entry ``index``."""
        return curve[max(BEFORE, min(index, self.last)) + 1]

    def _curves(self) -> None:
        of = self.allocations
        sizes, asked = of.sizes, of.requested
        before = [number for number, begin in enumerate(of.begins) if begin == BEFORE]
        # freed == BEFORE: it was pending at the start of the window and never counts as allocated.
        held = sum(sizes[number] for number in before if of.freed[number] != BEFORE)
        taken, wanted = (sum(column[number] for number in before) for column in (sizes, asked))
        self.allocated, self.active, self.requested = (array("q", [start]) for start in (held, taken, wanted))
        add_held, add_taken, add_wanted = self.allocated.append, self.active.append, self.requested.append
        odd = [*of.odd, None]
        begin, at = 0, 0
        while begin < of.entries:
            following = odd[at]
            end = of.entries if following is None else following.at + 1
            for event, number in zip(of.events[begin:end], of.numbers[begin:end], strict=True):
                if event == BEGINS:
                    size = sizes[number]
                    held += size
                    taken += size
                    wanted += asked[number]
                elif event == FREED:
                    held -= sizes[number]
                elif event != NOTHING:
                    size = sizes[number]
                    taken -= size
                    wanted -= asked[number]
                    held -= size if event == FREED_AND_ENDS else 0
                add_held(held)
                add_taken(taken)
                add_wanted(wanted)
            while (one := odd[at]) is not None and one.at < end:
                held -= sizes[one.number] if one.frees else 0
                taken -= sizes[one.number] if one.ends else 0
                wanted -= asked[one.number] if one.ends else 0
                at += 1
            self.allocated[-1], self.active[-1], self.requested[-1] = held, taken, wanted
            begin = end
        sizes, actions = columns(self.trace.sizes, "q"), self.trace.actions
        changes = [0] * (self.entries + 1)
        for index in self.segment_entries:
            changes[index + 1] = RESERVES[actions[index]] * sizes[index]
        end = sum(segment.size for segment in self.snapshot.segments if segment.device == self.device)
        changes[0] = max(0, end - sum(changes))
        self.reserved = array("q", accumulate(changes))

    def active_blocks_at(self, index: int) -> ActiveBlocks:
        """Return the allocations active (allocated or pending) right after entry ``index``, by address."""
        index = max(BEFORE, min(index, self.last))
        if index not in self._taken:
            # Keep two results, for the mark and the cursor: one of them stays while the other moves.
            self._taken = {**dict(list(self._taken.items())[-1:]), index: self._live.active_blocks_at(index)}
        else:
            self._taken[index] = self._taken.pop(index)
        return self._taken[index]

    def active_at(self, index: int) -> list[int]:
        """Return the allocations whose blocks are in use (allocated or pending) right after entry ``index``."""
        return self.active_blocks_at(index).numbers

    def totals_at(self, index: int) -> Totals:
        """Return the bytes and blocks held by the program right after entry ``index``, by stack."""
        return self._live.totals_at(max(BEFORE, min(index, self.last)))

    def begun_sums(self, low: int, high: int) -> Totals:
        """Return the sums by stack of the window's allocations numbered from ``low`` up to but not ``high``."""
        if self._begun is None:
            self._begun = Begun(self.allocations)
        return self._begun.sums(low, high)

    def live_at(self, index: int) -> list[int]:
        """Return the allocations that the program holds right after entry ``index``."""
        index = max(BEFORE, min(index, self.last))
        freed, active = self.allocations.freed, self.active_at(index)
        if self.at(self.active, index) == self.at(self.allocated, index):
            return active  # no block waits for a stream
        return [number for number in active if freed[number] > index]

    def state_at(self, number: int, index: int) -> int:
        """Return whether an active allocation is ``ALLOCATED`` or ``PENDING`` right after entry ``index``."""
        return ALLOCATED if self.allocations.freed[number] > index else PENDING

    def time_of(self, index: int) -> int:
        """Return an entry's time, microseconds since the epoch; 0 if none was recorded."""
        return columns(self.trace.times, "q")[index] if 0 <= index < self.entries else 0

    def oom_index(self) -> int | None:
        """Return the last out-of-memory entry; None if there is none."""
        return self.ooms[-1] if self.ooms else None
