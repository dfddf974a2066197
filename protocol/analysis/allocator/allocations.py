"""Finds every allocation of a window, with its lifetime and size, from a trace and the blocks at its end."""

from array import array
from bisect import bisect_right, insort
from itertools import accumulate, compress

from ...snapshot.columns import (
    ALLOC,
    ALLOCATED,
    FREE,
    FREE_COMPLETED,
    FREE_REQUESTED,
    PENDING,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Snapshot,
    Trace,
)
from .settings import SMALL_MOST_BYTES, block_size, round_sizes

RESERVES = {SEGMENT_ALLOC: 1, SEGMENT_MAP: 1, SEGMENT_FREE: -1, SEGMENT_UNMAP: -1}
"""Actions that change reserved memory, with the sign of the change."""
BEFORE = -1  # start index of allocations from before the first entry

_IS_ALLOC = bytes(action == ALLOC for action in range(256))


def columns(data: bytes, code: str) -> "memoryview[int]":
    """Return a column's bytes as a view of integers."""
    return memoryview(data).cast(code)  # type: ignore[call-overload]  # typeshed wants a literal


def reserved_curve(trace: Trace, end_bytes: int) -> "array[int]":
    """Return reserved memory before the first and after every entry, bytes, from that at the end of the window."""
    actions, sizes, changes = trace.actions, columns(trace.sizes, "q"), [0] * (len(trace) + 1)
    for action, sign in RESERVES.items():
        at = actions.find(action)
        while at >= 0:
            changes[at + 1] = sign * sizes[at]
            at = actions.find(action, at + 1)
    changes[0] = max(0, end_bytes - sum(changes))
    return array("q", accumulate(changes))


class Allocations:
    """All allocations that were live at some time of the window, as columns indexed by their number.

    An allocation counts as *allocated* from ``begins`` to ``freed`` (the program freed it) and as *active* to
    ``ends`` (its block could be reused). These columns have the index of the entry: ``BEFORE`` means before the first
    entry, the number of entries means never.
    """

    def __init__(self, snapshot: Snapshot, device: int) -> None:
        self.device = device
        trace = snapshot.trace(device)
        self.trace = trace if trace is not None else Trace(device, b"", b"", b"", b"", b"", b"", b"")
        self.entries = len(self.trace)
        is_alloc = self.trace.actions.translate(_IS_ALLOC)
        self.begins = array("i", compress(range(self.entries), is_alloc))
        self.in_window = len(self.begins)
        """Number of allocations that began within the window; they have the first numbers, in order."""
        self.freed = array("i", [self.entries]) * len(self.begins)
        self.ends = self.freed[:]
        self.addresses = array("Q", compress(columns(self.trace.addresses, "Q"), is_alloc))
        self.requested = array("q", compress(columns(self.trace.sizes, "q"), is_alloc))
        self.sizes = array("q")
        self.stacks = array("I")  # empty in a snapshot without stacks
        self.different_stacks = 0
        self._block_of: dict[int, int] = {}
        self.known: dict[int, int] = {}  # sizes of the blocks that are allocated at the end, by allocation
        self.lost = 0  # allocations whose end was not recorded
        self.unsure = 0
        """Number of allocations from before the window that ended in it: their size is at least the rounded request."""
        self.unsure_bytes = 0  # total by which their sizes may be too low, bytes
        self._walk()
        self._meet_the_end(snapshot)
        self._size(snapshot)
        if snapshot.stacks:
            self._add_stacks(snapshot)

    def curve(self, stops: "array[int]", sizes: "array[int]") -> "array[int]":
        """Return the sum before the first and after every entry, of allocations from their begin to ``stops``."""
        changes = [0] * (self.entries + 2)
        for begin, stop, size in zip(self.begins, stops, sizes, strict=True):
            changes[begin + 1] += size
            changes[stop + 1] -= size
        return array("q", accumulate(changes[:-1]))

    def _add_stacks(self, snapshot: Snapshot) -> None:
        self.different_stacks = len(snapshot.stacks)
        is_alloc = self.trace.actions.translate(_IS_ALLOC)
        stacks = array("I", compress(columns(self.trace.stacks, "I"), is_alloc))
        stacks += array("I", bytes(4 * (len(self.begins) - len(stacks))))
        of_block = columns(snapshot.block_stacks, "I")
        for number, block in self._block_of.items():
            stacks[number] = of_block[block] or stacks[number]
        self.stacks = stacks

    def _walk(self) -> None:
        """Pair allocations with frees by address, oldest first."""
        trace, freed, ends = self.trace, self.freed, self.ends
        live = self._open = dict[int, int]()
        get, pop, asked = live.get, live.pop, columns(trace.sizes, "q")
        never, following = self.entries, 0
        for index, (action, address) in enumerate(zip(trace.actions, columns(trace.addresses, "Q"), strict=True)):
            if action == ALLOC:
                if address in live:
                    self._lose(live[address], index)
                live[address] = following
                following += 1
            elif action == FREE_REQUESTED:
                number = get(address)
                if number is None or freed[number] < never:
                    if number is not None:
                        self._lose(number, index)
                    number = live[address] = self._add(address, asked[index])
                freed[number] = index
            elif action == FREE_COMPLETED:
                number = pop(address, None)
                if number is None:
                    # It was freed before the window began, and waited for a stream.
                    number = self._add(address, asked[index])
                    freed[number] = BEFORE
                elif freed[number] == never:
                    freed[number] = index
                ends[number] = index

    def _add(self, address: int, requested: int) -> int:
        """Add an allocation that no entry of the window allocated."""
        self.begins.append(BEFORE)
        self.freed.append(self.entries)
        self.ends.append(self.entries)
        self.addresses.append(address)
        self.requested.append(requested)
        return len(self.begins) - 1

    def _lose(self, number: int, index: int) -> None:
        self.freed[number] = min(self.freed[number], index)
        self.ends[number] = index
        self.lost += 1

    def _meet_the_end(self, snapshot: Snapshot) -> None:
        """Set the sizes of blocks that are allocated at the end, and add those that the trace never mentions."""
        block_sizes, requested = columns(snapshot.block_sizes, "q"), columns(snapshot.block_requested, "q")
        block_addresses = columns(snapshot.block_addresses, "Q")
        segments = [segment for segment in snapshot.segments if segment.device == self.device]
        taken = [
            block
            for segment in segments
            for block in range(segment.first_block, segment.first_block + segment.blocks)
            if snapshot.block_states[block] != FREE
        ]
        for block in taken:
            state, address = snapshot.block_states[block], block_addresses[block]
            number = self._open.pop(address, None)
            if number is None:
                number = self._add(address, requested[block])
                if state == PENDING:
                    self.freed[number] = BEFORE
            elif state == ALLOCATED and self.freed[number] < self.entries:
                self.freed[number] = self.entries
            elif state == PENDING and self.freed[number] == self.entries:
                self.freed[number] = self.entries - 1
            self.requested[number] = requested[block]
            self._block_of[number] = block
            self.known[number] = block_sizes[block]
        if segments and self.entries:
            # Trace and segments are read one after the other: allocations without a block were freed in between.
            for number in self._open.values():
                self._lose(number, self.entries - 1)
        self._open.clear()

    def _size(self, snapshot: Snapshot) -> None:
        self.sizes = round_sizes(self.requested, snapshot.divisions)
        large = set(compress(range(len(self.sizes)), map(SMALL_MOST_BYTES.__lt__, self.sizes)))
        for number, size in self.known.items():
            self.sizes[number] = size
        if large:
            Rooms(self, snapshot, large).replay()
        before = [n for n, begin in enumerate(self.begins) if begin == BEFORE and n not in self.known]
        self.unsure = len(before)
        self.unsure_bytes = SMALL_MOST_BYTES * sum(number in large for number in before)


class Rooms:
    """Replays the positions of large blocks and plain segments, to find the room of each large allocation.

    A block takes the whole free range at its address if only little would remain. Blocks that are allocated at the end
    keep their size.
    """

    def __init__(self, of: Allocations, snapshot: Snapshot, large: set[int]) -> None:
        self.of, self.large, self.max_split_size = of, large, snapshot.max_split_size
        trace = of.trace
        self.addresses, self.bytes = columns(trace.addresses, "Q"), columns(trace.sizes, "Q")
        plain = (one for one in snapshot.segments if one.device == of.device and not one.expandable)
        self.segments = {one.address: one.size for one in plain}
        # Walk the window backwards to find the segments before its first entry.
        for index in range(of.entries - 1, -1, -1):
            action = trace.actions[index]
            if action == SEGMENT_ALLOC:
                self.segments.pop(self.addresses[index], None)
            elif action == SEGMENT_FREE:
                self.segments[self.addresses[index]] = self.bytes[index]
        self.starts = sorted(self.segments)
        self.live = sorted(of.addresses[number] for number in large if of.begins[number] < 0)
        self.gone: dict[int, list[int]] = {}  # numbers by the entry at which they end
        for number in large:
            self.gone.setdefault(of.ends[number], []).append(number)

    def replay(self) -> None:
        """Walk the window and set the size of each large allocation."""
        of, following = self.of, 0
        if not self.segments and SEGMENT_ALLOC not in of.trace.actions:
            return  # all segments are expandable: blocks are always split to size
        for index, action in enumerate(of.trace.actions):
            for number in self.gone.get(index, ()):
                self._remove(number)
            if action == ALLOC:
                if following in self.large:
                    self._place(following)
                following += 1
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
