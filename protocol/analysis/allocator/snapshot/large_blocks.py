"""Sizes of large blocks: a block takes the whole free range at its address if only little would remain."""

from array import array
from bisect import bisect_right, insort
from typing import NamedTuple, Protocol

from ....snapshot.model import ALLOC, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, Snapshot, Trace
from .rounding import block_size


class Odd(NamedTuple):
    """A change without a trace entry of its own, in effect right after entry ``at``."""

    at: int
    number: int
    frees: bool
    ends: bool


class Window(Protocol):
    """The allocations of a window, as columns indexed by number; see ``allocations.Allocations``."""

    device: int
    trace: Trace
    entries: int
    begins: "array[int]"
    addresses: "array[int]"
    sizes: "array[int]"
    numbers: "array[int]"
    odd: list[Odd]
    known: dict[int, int]


def size_large(of: Window, snapshot: Snapshot, large: set[int]) -> None:
    """Set the sizes of the allocations ``large`` of a window; those with blocks at the end keep their size."""
    _Rooms(of, snapshot, large).replay()


class _Rooms:
    """Replays the positions of large blocks and plain segments, to find the room of each large allocation."""

    def __init__(self, of: Window, snapshot: Snapshot, large: set[int]) -> None:
        self.of, self.large, self.max_split_size = of, large, snapshot.max_split_size
        trace = of.trace
        self.addresses, self.bytes = (memoryview(column).cast("Q") for column in (trace.addresses, trace.sizes))
        self.segments: dict[int, int] = {
            segment.address: segment.size
            for segment in snapshot.segments
            if segment.device == of.device and not segment.expandable
        }
        # Walk the window backwards to find the segments before its first entry.
        for index in range(of.entries - 1, -1, -1):
            action = trace.actions[index]
            if action == SEGMENT_ALLOC:
                self.segments.pop(self.addresses[index], None)
            elif action == SEGMENT_FREE:
                self.segments[self.addresses[index]] = self.bytes[index]
        self.starts = sorted(self.segments)
        self.live = sorted(of.addresses[number] for number in large if of.begins[number] < 0)
        self.gone: dict[int, list[int]] = {}
        for odd in of.odd:
            if odd.ends and odd.number in large:
                self.gone.setdefault(odd.at, []).append(odd.number)

    def replay(self) -> None:
        """Walk the window and set the size of each large allocation."""
        of, numbers = self.of, self.of.numbers
        if not self.segments and SEGMENT_ALLOC not in of.trace.actions:
            return  # all segments are expandable: blocks are always split to size
        is_large = bytearray(len(of.begins) + 1)  # and one for the -1 of entries without an allocation
        for number in self.large:
            is_large[number] = 1
        for index, action in enumerate(of.trace.actions):
            if action == ALLOC:
                for lost in self.gone.get(index, ()) if self.gone else ():
                    self._remove(lost)
                if is_large[numbers[index]]:
                    self._place(numbers[index])
            elif action == FREE_COMPLETED:
                if is_large[numbers[index]]:
                    self._remove(numbers[index])
            elif action == SEGMENT_ALLOC:
                if self.addresses[index] not in self.segments:
                    insort(self.starts, self.addresses[index])
                self.segments[self.addresses[index]] = self.bytes[index]
            elif action == SEGMENT_FREE and self.segments.pop(self.addresses[index], None) is not None:
                self.starts.remove(self.addresses[index])

    def _remove(self, number: int) -> None:
        position = bisect_right(self.live, self.of.addresses[number]) - 1
        if position >= 0 and self.live[position] == self.of.addresses[number]:
            del self.live[position]

    def _place(self, number: int) -> None:
        address = self.of.addresses[number]
        at = bisect_right(self.live, address)
        self.live.insert(at, address)
        if number in self.of.known:
            return
        segment = bisect_right(self.starts, address) - 1
        if segment < 0:
            return
        end = self.starts[segment] + self.segments[self.starts[segment]]
        if address >= end:
            return
        if at + 1 < len(self.live):
            end = min(end, self.live[at + 1])
        self.of.sizes[number] = block_size(self.of.sizes[number], end - address, self.max_split_size)
