"""Finds the live allocations at any entry without walking the whole trace, from checkpoints at regular intervals.

Addresses are numbered in ascending order, so live allocations are returned in order of address without sorting when
the cursor moves.
"""

from array import array
from bisect import bisect_left
from itertools import compress
from typing import NamedTuple

from .allocations import BEFORE, BEGINS, ENDS, FREED, FREED_AND_ENDS, Allocations

_LEAST_STRIDE = 2048
_MOST_KEPT = 8_000_000
"""Maximum number of owners in all checkpoints together, 4 bytes each."""
_MOST_CHECKPOINTS = 256

_MOST_SUMS = 32
"""Number of stored sums of ``Begun``."""

Totals = dict[int, tuple[int, int]]
"""Bytes and blocks by stack."""


class ActiveBlocks(NamedTuple):
    """Numbers and addresses of active allocations, ordered by address."""

    numbers: list[int]
    addresses: list[int]


class LiveSets:
    """The live sets of a trace, computed from the checkpoint before an entry."""

    def __init__(self, of: Allocations) -> None:
        self._of = of
        self._slots, self._addresses = _slots(of)
        self._in_order = all(map(int.__le__, self._addresses, self._addresses[1:]))
        kept = max(1, min(_MOST_CHECKPOINTS, _MOST_KEPT // max(1, len(self._addresses))))
        self._stride = max(_LEAST_STRIDE, -(-of.entries // kept))
        self._owners: list[array[int]] = []
        self._sums: dict[int, tuple[list[int], list[int]]] = {}
        owner = array("I", bytes(4 * len(self._addresses)))
        for number, begin in enumerate(of.begins):
            if begin == BEFORE:
                owner[self._slots[number]] = number + 1
        for begin in range(0, max(1, of.entries), self._stride):
            self._owners.append(owner[:])
            self._advance(owner, begin, min(begin + self._stride, of.entries))

    def active_blocks_at(self, index: int) -> ActiveBlocks:
        """Return the allocations whose blocks are in use right after entry ``index``."""
        nearest = min((index + 1) // self._stride, len(self._owners) - 1)
        owner = self._owners[nearest][:]
        self._advance(owner, nearest * self._stride, index + 1)
        numbers = [one - 1 for one in owner if one]
        addresses = list(compress(self._addresses, owner))
        if not self._in_order:
            order = sorted(range(len(numbers)), key=addresses.__getitem__)
            numbers, addresses = [numbers[at] for at in order], [addresses[at] for at in order]
        return ActiveBlocks(numbers, addresses)

    def totals_at(self, index: int) -> Totals:
        """Return the memory held by the program right after entry ``index``, by stack.

        The sums at a checkpoint are cached, because a moving cursor stays near the same ones.
        """
        of = self._of
        nearest = min((index + 1) // self._stride, len(self._owners) - 1)
        begin, end = nearest * self._stride, index + 1
        kept = self._sums.get(nearest)
        if kept is None:
            owners = (owner - 1 for owner in self._owners[nearest] if owner)
            kept = self._sums[nearest] = _by_stack(of, [number for number in owners if of.freed[number] >= begin])
        size, blocks = kept[0][:], kept[1][:]
        stacks, sizes = of.stacks, of.sizes
        for event, number in zip(of.events[begin:end], of.numbers[begin:end], strict=True):
            if event == BEGINS:
                size[stacks[number]] += sizes[number]
                blocks[stacks[number]] += 1
            elif event in (FREED, FREED_AND_ENDS):
                size[stacks[number]] -= sizes[number]
                blocks[stacks[number]] -= 1
        for odd in of.odd[bisect_left(of.odd, (begin,)) : bisect_left(of.odd, (end,))]:
            if odd.frees:
                size[stacks[odd.number]] -= sizes[odd.number]
                blocks[stacks[odd.number]] -= 1
        return _totals(size, blocks)

    def _advance(self, owner: "array[int]", begin: int, end: int) -> None:
        """Apply the entries ``begin`` up to but not including ``end`` to the owners of addresses."""
        of, slots = self._of, self._slots
        for event, number in zip(of.events[begin:end], of.numbers[begin:end], strict=True):
            if event == BEGINS:
                owner[slots[number]] = number + 1
            elif event >= ENDS:
                owner[slots[number]] = 0
        for odd in of.odd[bisect_left(of.odd, (begin,)) : bisect_left(of.odd, (end,))]:
            if odd.ends and owner[slots[odd.number]] == odd.number + 1:
                owner[slots[odd.number]] = 0


def sums(of: Allocations, numbers: list[int]) -> Totals:
    """Return the sums of allocations by stack."""
    return _totals(*_by_stack(of, numbers))


def _by_stack(of: Allocations, numbers: list[int]) -> tuple[list[int], list[int]]:
    size, blocks = [0] * of.different_stacks, [0] * of.different_stacks
    of_stack = map(of.stacks.__getitem__, numbers)
    for stack, one in zip(of_stack, map(of.sizes.__getitem__, numbers), strict=True):
        size[stack] += one
        blocks[stack] += 1
    return size, blocks


def _totals(size: list[int], blocks: list[int]) -> Totals:
    return {stack: (size[stack], found) for stack, found in enumerate(blocks) if found}


class Begun:
    """Sums by stack of the window's first allocations up to any number, with stored sums at regular intervals."""

    def __init__(self, of: Allocations) -> None:
        self._of = of
        self._stride = max(1, -(-of.in_window // _MOST_SUMS))
        size, blocks = array("q", bytes(8 * of.different_stacks)), array("q", bytes(8 * of.different_stacks))
        self._kept: list[tuple[array[int], array[int]]] = []
        for begin in range(0, of.in_window + 1, self._stride):
            self._kept.append((size[:], blocks[:]))
            self._add(size, blocks, begin, min(begin + self._stride, of.in_window))

    def sums(self, low: int, high: int) -> Totals:
        """Return the sums of the allocations numbered from ``low`` up to but not including ``high``."""
        (less, fewer), (size, blocks) = self._up_to(low), self._up_to(high)
        return {
            stack: (size[stack] - less[stack], count - fewer[stack])
            for stack, count in enumerate(blocks)
            if count > fewer[stack]
        }

    def _up_to(self, number: int) -> "tuple[array[int], array[int]]":
        nearest = number // self._stride
        size, blocks = (kept[:] for kept in self._kept[nearest])
        self._add(size, blocks, nearest * self._stride, number)
        return size, blocks

    def _add(self, size: "array[int]", blocks: "array[int]", begin: int, end: int) -> None:
        for stack, one in zip(self._of.stacks[begin:end], self._of.sizes[begin:end], strict=True):
            size[stack] += one
            blocks[stack] += 1


def _slots(of: Allocations) -> tuple[list[int], list[int]]:
    """Return the slot of each allocation, and the address of each slot.

    In a complete trace an address has one owner at a time. If frees are missing, a block from before the window may
    overlap another block of the trace: it gets its own slot.
    """
    addresses = sorted(set(of.addresses))
    place = dict(zip(addresses, range(len(addresses)), strict=True))
    slots = list(map(place.__getitem__, of.addresses))
    before = {of.addresses[number] for number, begin in enumerate(of.begins) if begin == BEFORE}
    if before:
        seen: set[int] = set()
        for number, (address, begin) in enumerate(zip(of.addresses, of.begins, strict=True)):
            if address not in before:
                continue
            if begin == BEFORE and address in seen:
                slots[number] = len(addresses)
                addresses.append(address)
            seen.add(address)
    return slots, addresses
