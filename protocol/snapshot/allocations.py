"""From a trace and the blocks that stand at its end: every allocation of the window, with its span and its size."""

from bisect import bisect_right, insort

from .model import (
    ALLOC,
    ALLOCATED,
    FREE,
    FREE_COMPLETED,
    FREE_REQUESTED,
    PENDING,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    Snapshot,
    Trace,
)
from .rounding import SMALL_MOST, block_size, round_size

BEFORE = -1
"""The begin of what was there before the first entry."""


class Allocations:
    """All allocations that lived at some time of the window, as columns indexed by their number.

    An allocation counts as *allocated* from ``begins`` to ``freed`` (the program let go of it) and as *active* to
    ``ends`` (its block could be used again). An index in these columns is the entry that changed it: ``BEFORE`` for
    before the first entry, the number of entries for never.
    """

    def __init__(self, snapshot: Snapshot, device: int) -> None:
        self.device = device
        trace = snapshot.trace(device)
        self.trace = trace if trace is not None else Trace(device, b"", b"", b"", b"", b"", b"", b"")
        self.entries = len(self.trace)
        self.begins: list[int] = []
        self.freed: list[int] = []
        self.ends: list[int] = []
        self.addresses: list[int] = []
        self.requested: list[int] = []
        self.sizes: list[int] = []
        self.stacks: list[int] = []
        self.numbers: list[int] = [-1] * self.entries
        """Of each entry, the allocation that it begins, frees or ends; -1 for other entries."""
        self.lost: dict[int, list[int]] = {}
        """Allocations whose end was not recorded, by the entry at which they must have been gone."""
        self.unsure = 0
        """Allocations from before the window that ended in it: their size is at least the rounded request."""
        self.unsure_bytes = 0
        """By how much the sizes of those may be too low together, bytes."""
        self._walk()
        self._meet_the_end(snapshot)
        self._size(snapshot)

    def _new(self, begin: int, address: int, requested: int, stack: int) -> int:
        self.begins.append(begin)
        self.freed.append(self.entries)
        self.ends.append(self.entries)
        self.addresses.append(address)
        self.requested.append(requested)
        self.stacks.append(stack)
        return len(self.begins) - 1

    def _walk(self) -> None:
        """Pair allocations with frees by address, oldest first."""
        trace, numbers, freed, ends = self.trace, self.numbers, self.freed, self.ends
        addresses, sizes = columns(trace.addresses, "Q"), columns(trace.sizes, "q")
        stacks = columns(trace.stacks, "I")
        self._open: dict[int, int] = {}
        live = self._open
        get, pop = live.get, live.pop
        never, begins = self.entries, self.begins
        begin_at, free_at, end_at = begins.append, freed.append, ends.append
        lie_at, ask_for, come_from = self.addresses.append, self.requested.append, self.stacks.append
        entries = zip(trace.actions, addresses, sizes, strict=True)
        for index, (action, address, size) in enumerate(entries):
            if action == ALLOC:
                if address in live:
                    self._lose(live[address], index)
                # As _new does, without a call for each of hundreds of thousands.
                live[address] = numbers[index] = len(begins)
                begin_at(index)
                free_at(never)
                end_at(never)
                lie_at(address)
                ask_for(size)
                come_from(stacks[index])
            elif action == FREE_REQUESTED:
                number = get(address)
                if number is None or freed[number] < never:
                    if number is not None:
                        self._lose(number, index)
                    number = live[address] = self._new(BEFORE, address, size, 0)
                freed[number] = index
                numbers[index] = number
            elif action == FREE_COMPLETED:
                number = pop(address, None)
                if number is None:
                    # It was freed before the window began, and waited for a stream.
                    number = self._new(BEFORE, address, size, 0)
                    freed[number] = BEFORE
                elif freed[number] == never:
                    freed[number] = index
                ends[number] = index
                numbers[index] = number

    def _lose(self, number: int, index: int) -> None:
        self.freed[number] = min(self.freed[number], index)
        self.ends[number] = index
        self.lost.setdefault(index, []).append(number)

    def _meet_the_end(self, snapshot: Snapshot) -> None:
        """Take over the sizes of blocks that stand at the end, and add those that the trace never mentions."""
        block_addresses, block_sizes = columns(snapshot.block_addresses, "Q"), columns(snapshot.block_sizes, "q")
        requested, stacks = columns(snapshot.block_requested, "q"), columns(snapshot.block_stacks, "I")
        known: dict[int, int] = {}
        segments = [segment for segment in snapshot.segments if segment.device == self.device]
        for segment in segments:
            for block in range(segment.first_block, segment.first_block + segment.blocks):
                state = snapshot.block_states[block]
                if state == FREE:
                    continue
                number = self._open.pop(block_addresses[block], None)
                if number is None:
                    number = self._new(BEFORE, block_addresses[block], requested[block], stacks[block])
                    if state == PENDING:
                        self.freed[number] = BEFORE
                if state == ALLOCATED and self.freed[number] < self.entries:
                    self.freed[number] = self.entries
                elif state == PENDING and self.freed[number] == self.entries:
                    self.freed[number] = self.entries - 1
                self.requested[number] = requested[block]
                self.stacks[number] = stacks[block] or self.stacks[number]
                known[number] = block_sizes[block]
        if segments and self.entries:
            # Trace and segments are read one after the other: what has no block any more was freed in between.
            for number in self._open.values():
                self._lose(number, self.entries - 1)
        self._open.clear()
        self._known = known

    def _size(self, snapshot: Snapshot) -> None:
        """Give every allocation the size of its block."""
        divisions = snapshot.divisions if any(part > 1 for part in snapshot.divisions) else []
        self.sizes = [round_size(size, divisions) for size in self.requested]
        large = {number for number, size in enumerate(self.sizes) if size > SMALL_MOST}
        for number, size in self._known.items():
            self.sizes[number] = size
        if large:
            _Rooms(self, snapshot, large).replay()
        for number, begin in enumerate(self.begins):
            if begin == BEFORE and number not in self._known:
                self.unsure += 1
                self.unsure_bytes += SMALL_MOST if number in large else 0

    @property
    def known(self) -> dict[int, int]:
        """Sizes of the blocks that stand at the end, by allocation."""
        return self._known


class _Rooms:
    """Replays where large blocks and plain segments lay, to find the room that each large allocation was given."""

    def __init__(self, of: Allocations, snapshot: Snapshot, large: set[int]) -> None:
        self.of, self.large, self.max_split_size = of, large, snapshot.max_split_size
        trace = of.trace
        self.addresses, self.bytes = columns(trace.addresses, "Q"), columns(trace.sizes, "q")
        self.segments: dict[int, int] = {
            segment.address: segment.size
            for segment in snapshot.segments
            if segment.device == of.device and not segment.expandable
        }
        # Backwards over the window: which segments stood before its first entry.
        for index in range(of.entries - 1, -1, -1):
            action = trace.actions[index]
            if action == SEGMENT_ALLOC:
                self.segments.pop(self.addresses[index], None)
            elif action == SEGMENT_FREE:
                self.segments[self.addresses[index]] = self.bytes[index]
        self.starts = sorted(self.segments)
        self.live = sorted(of.addresses[number] for number in large if of.begins[number] == BEFORE)

    def replay(self) -> None:
        """Walk the window, sizing each large allocation as it comes."""
        of, numbers = self.of, self.of.numbers
        if not self.segments and SEGMENT_ALLOC not in of.trace.actions:
            return  # all segments are expandable: blocks are always split to size
        is_large = bytearray(len(of.begins) + 1)  # and one for the -1 of entries without an allocation
        for number in self.large:
            is_large[number] = 1
        for index, action in enumerate(of.trace.actions):
            if action == ALLOC:
                for lost in of.lost.get(index, ()) if of.lost else ():
                    if is_large[lost]:
                        self._remove(lost)
                if is_large[numbers[index]]:
                    self._place(numbers[index])
            elif action == FREE_COMPLETED:
                if is_large[numbers[index]]:
                    self._remove(numbers[index])
            elif action == SEGMENT_ALLOC:
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


def columns(data: bytes, code: str) -> "memoryview[int]":
    """View a column's bytes as whole numbers."""
    return memoryview(data).cast(code)  # type: ignore[call-overload]  # typeshed wants a literal
