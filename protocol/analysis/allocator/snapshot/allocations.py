"""Finds every allocation of the window, with its lifetime and size, from a trace and the blocks at its end."""

from array import array
from itertools import compress

from ....snapshot.model import ALLOC, ALLOCATED, FREE, FREE_COMPLETED, FREE_REQUESTED, PENDING, Snapshot, Trace
from .large_blocks import Odd, size_large
from .rounding import SMALL_MOST, round_sizes

BEFORE = -1
"""Start index of allocations from before the first entry."""

_IS_ALLOC = bytes(action == ALLOC for action in range(256))
NOTHING, BEGINS, FREED, ENDS, FREED_AND_ENDS = range(5)
"""Effect of an entry on its allocation."""

_EVENT_OF = bytes({ALLOC: BEGINS, FREE_REQUESTED: FREED, FREE_COMPLETED: ENDS}.get(action, 0) for action in range(256))


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
        self.stacks = array("I")
        """Empty until ``add_stacks``; a snapshot may be replayed before its stacks are loaded."""
        self.different_stacks = 0
        self._block_of: dict[int, int] = {}
        self.numbers = array("i", [-1]) * self.entries
        """By entry: the allocation that it begins, frees or ends; -1 for other entries."""
        self.events = bytearray(self.trace.actions.translate(_EVENT_OF))
        """By entry: its effect on that allocation: ``BEGINS``, ``FREED`` ..."""
        self.odd: list[Odd] = []
        """Changes without an entry of their own, by index."""
        self.known: dict[int, int] = {}
        """Sizes of the blocks that are allocated at the end, by allocation."""
        self.lost = 0
        """Allocations whose end was not recorded."""
        self.unsure = 0
        """Number of allocations from before the window that ended in it: their size is at least the rounded request."""
        self.unsure_bytes = 0
        """Total by which their sizes may be too low, bytes."""
        self._walk()
        self._meet_the_end(snapshot)
        self.odd.sort()
        self._size(snapshot)
        if snapshot.stacks:
            self.add_stacks(snapshot)

    def add_stacks(self, snapshot: Snapshot) -> None:
        """Add the stacks of the whole snapshot."""
        self.trace = snapshot.trace(self.device) or self.trace
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
        trace, numbers, freed, ends, events = self.trace, self.numbers, self.freed, self.ends, self.events
        live = self._open = dict[int, int]()
        get, pop = live.get, live.pop
        never, following = self.entries, 0
        for index, (action, address) in enumerate(zip(trace.actions, columns(trace.addresses, "Q"), strict=True)):
            if action == ALLOC:
                if address in live:
                    self._lose(live[address], index)
                live[address] = numbers[index] = following
                following += 1
            elif action == FREE_REQUESTED:
                number = get(address)
                if number is None or freed[number] < never:
                    if number is not None:
                        self._lose(number, index)
                    number = live[address] = self._from_before(address, index)
                freed[number] = index
                numbers[index] = number
            elif action == FREE_COMPLETED:
                number = pop(address, None)
                if number is None:
                    # It was freed before the window began, and waited for a stream.
                    number = self._from_before(address, index)
                    freed[number] = BEFORE
                elif freed[number] == never:
                    freed[number] = index
                    events[index] = FREED_AND_ENDS
                ends[number] = index
                numbers[index] = number

    def _from_before(self, address: int, index: int) -> int:
        """Add an allocation that entry ``index`` frees but that no entry of the window allocated."""
        return self._add(address, columns(self.trace.sizes, "q")[index])

    def _add(self, address: int, requested: int) -> int:
        self.begins.append(BEFORE)
        self.freed.append(self.entries)
        self.ends.append(self.entries)
        self.addresses.append(address)
        self.requested.append(requested)
        return len(self.begins) - 1

    def _lose(self, number: int, index: int) -> None:
        self.odd.append(Odd(index, number, self.freed[number] > index, True))
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
                self.events[self.freed[number]] = NOTHING
                self.freed[number] = self.entries
            elif state == PENDING and self.freed[number] == self.entries:
                self.freed[number] = self.entries - 1
                self.odd.append(Odd(self.entries - 1, number, True, False))
            self.requested[number] = requested[block]
            self._block_of[number] = block
            self.known[number] = block_sizes[block]
        if segments and self.entries:
            # Trace and segments are read one after the other: allocations without a block were freed in between.
            for number in self._open.values():
                self._lose(number, self.entries - 1)
        self._open.clear()

    def _size(self, snapshot: Snapshot) -> None:
        """Set the size of every allocation to that of its block."""
        self.sizes = round_sizes(self.requested, snapshot.divisions)
        large = set(compress(range(len(self.sizes)), map(SMALL_MOST.__lt__, self.sizes)))
        for number, size in self.known.items():
            self.sizes[number] = size
        if large:
            size_large(self, snapshot, large)
        before = [n for n, begin in enumerate(self.begins) if begin == BEFORE and n not in self.known]
        self.unsure = len(before)
        self.unsure_bytes = SMALL_MOST * sum(number in large for number in before)


def columns(data: bytes, code: str) -> "memoryview[int]":
    """Return a column's bytes as a view of integers."""
    return memoryview(data).cast(code)  # type: ignore[call-overload]  # typeshed wants a literal
