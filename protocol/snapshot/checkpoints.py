"""What is live at any entry, without walking the whole trace: the live set is kept every so many entries.

Where hundreds of thousands of blocks live at once, going through them at each move of a cursor would be felt, so there
the sums by stack are kept as well.
"""

from array import array

from .allocations import BEFORE, Allocations
from .model import ALLOC, FREE_COMPLETED, FREE_REQUESTED

_CHECKPOINTS = 128
_LEAST_STRIDE = 4096
_MOST_KEPT = 8_000_000
"""Allocations kept in all checkpoints together, 4 bytes each."""
_MANY = 20_000
"""From so many live blocks on, sums by stack are kept too."""

Totals = dict[int, tuple[int, int]]
"""Bytes and blocks by stack."""


class Checkpoints:
    """The live sets of a trace, found from the checkpoint before an entry."""

    def __init__(self, of: Allocations) -> None:
        self._of = of
        self._stride = max(_LEAST_STRIDE, of.entries // _CHECKPOINTS)
        self._live: list[array[int]] = []
        self._sums: list[tuple[list[int], list[int]]] = []
        self._keep_live()
        if max(map(len, self._live)) >= _MANY:
            self._keep_sums()

    def active_at(self, index: int) -> list[int]:
        """List the allocations whose blocks are taken right after entry ``index``."""
        nearest = self._nearest(index)
        live = dict.fromkeys(self._live[nearest])
        self._advance(live, nearest * self._stride, index + 1)
        return list(live)

    def totals_at(self, index: int) -> Totals:
        """Sum up by stack what the program holds right after entry ``index``."""
        of = self._of
        if self._sums:
            nearest = self._nearest(index)
            size, blocks = (kept[:] for kept in self._sums[nearest])
            self._add_up(size, blocks, nearest * self._stride, index + 1)
            return {stack: (size[stack], found) for stack, found in enumerate(blocks) if found}
        totals: Totals = {}
        for number in self.active_at(index):
            if of.freed[number] > index:
                size, blocks = totals.get(of.stacks[number], (0, 0))
                totals[of.stacks[number]] = size + of.sizes[number], blocks + 1
        return totals

    def _nearest(self, index: int) -> int:
        return min((index + 1) // self._stride, len(self._live) - 1)

    def _keep_live(self) -> None:
        of, stride = self._of, self._stride
        live = dict.fromkeys(number for number, begin in enumerate(of.begins) if begin == BEFORE)
        kept = 0
        for begin in range(0, max(1, of.entries), stride):
            if begin % self._stride == 0:
                self._live.append(array("I", live))
                kept += len(live)
            if kept > _MOST_KEPT:
                # Half as many, twice as far apart.
                self._live = self._live[::2]
                self._stride *= 2
                kept = sum(map(len, self._live))
            self._advance(live, begin, min(begin + stride, of.entries))

    def _advance(self, live: dict[int, None], begin: int, end: int) -> None:
        """Apply the entries ``begin`` up to but not including ``end`` to the set of active allocations."""
        of = self._of
        for action, number in zip(of.trace.actions[begin:end], of.numbers[begin:end], strict=True):
            if action == ALLOC:
                live[number] = None
            elif action == FREE_COMPLETED:
                live.pop(number, None)
        for index, lost in of.lost.items():
            if begin <= index < end:
                for number in lost:
                    live.pop(number, None)

    def _keep_sums(self) -> None:
        of = self._of
        length = max(of.stacks, default=0) + 1
        size, blocks = [0] * length, [0] * length
        for number, begin in enumerate(of.begins):
            if begin == BEFORE and of.freed[number] != BEFORE:
                size[of.stacks[number]] += of.sizes[number]
                blocks[of.stacks[number]] += 1
        for begin in range(0, len(self._live) * self._stride, self._stride):
            self._sums.append((size[:], blocks[:]))
            self._add_up(size, blocks, begin, min(begin + self._stride, of.entries))

    def _add_up(self, size: list[int], blocks: list[int], begin: int, end: int) -> None:
        """Apply the entries ``begin`` up to but not including ``end`` to sums, which stacks are the indices of."""
        of = self._of
        stacks, sizes, freed = of.stacks, of.sizes, of.freed
        entries = zip(of.trace.actions[begin:end], of.numbers[begin:end], strict=True)
        for index, (action, number) in enumerate(entries, begin):
            if action == ALLOC:
                stack = stacks[number]
                size[stack] += sizes[number]
                blocks[stack] += 1
            elif action in (FREE_REQUESTED, FREE_COMPLETED) and freed[number] == index:
                stack = stacks[number]
                size[stack] -= sizes[number]
                blocks[stack] -= 1
        for index, lost in of.lost.items():
            if begin <= index < end:
                for number in lost:
                    if freed[number] == index and of.numbers[index] != number:
                        size[stacks[number]] -= sizes[number]
                        blocks[stacks[number]] -= 1
