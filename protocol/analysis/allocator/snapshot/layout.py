"""Layout of memory: segments and the blocks in them, at any moment of the window.

There may be hundreds of thousands of blocks, and the cursor moves between moments. Therefore a segment's blocks are
computed on request, and sums are computed over whole columns.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, compress
from operator import add, sub
from typing import NamedTuple, overload

from ....snapshot.model import FREE
from .replay import Replay
from .segments import Range


class Block(NamedTuple):
    """A piece of a segment."""

    address: int
    size: int
    requested: int
    """Requested bytes; 0 for a free block."""
    state: int
    number: int
    """Its allocation; -1 for a free block."""


class Piece:
    """A segment (or a mapped range of an expandable one) at a moment; its blocks fill it without gaps."""

    __slots__ = ("_first", "_last", "_of", "address", "expandable", "pool", "size", "small", "stream")

    def __init__(self, of: "Layout", one: Range, first: int, last: int) -> None:
        self._of, self._first, self._last = of, first, last
        self.address, self.size, self.stream, self.small, self.expandable, self.pool = one

    @property
    def end(self) -> int:
        """The first address after it."""
        return self.address + self.size

    @property
    def active_blocks(self) -> int:
        """Number of blocks that are allocated or pending."""
        return self._last - self._first

    @property
    def free_bytes(self) -> int:
        """Bytes in free blocks."""
        return self.size - sum(self._of.sizes[self._first : self._last])

    @property
    def free_sizes(self) -> list[int]:
        """The sizes of the free blocks, unordered."""
        within = self._of.gaps[self._first : max(self._first, self._last - 1)]
        return [*filter(None, within), *self.edges]

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest free block."""
        return max(self.free_sizes, default=0)

    @property
    def edges(self) -> list[int]:
        """The sizes of the free blocks at its ends, at most two."""
        first, last, of = self._first, self._last - 1, self._of
        if last < first:
            return [self.size] if self.size else []
        head, tail = of.addresses[first] - self.address, self.end - of.addresses[last] - of.sizes[last]
        return [size for size in (head, tail) if size]

    @property
    def blocks(self) -> list[Block]:
        """All blocks, including free ones, by address."""
        of, found, at = self._of, list[Block](), self.address
        for place in range(self._first, self._last):
            address, size, number = of.addresses[place], of.sizes[place], of.numbers[place]
            if address > at:
                found.append(Block(at, address - at, 0, FREE, -1))
            state = of.replay.state_at(number, of.moment)
            found.append(Block(address, size, of.replay.allocations.requested[number], state, number))
            at = address + size
        if at < self.end:
            found.append(Block(at, self.end - at, 0, FREE, -1))
        return found


class Layout(Sequence[Piece]):
    """A device's memory right after an entry, as pieces ordered by address."""

    def __init__(self, replay: Replay, index: int) -> None:
        self.replay, self.moment = replay, index
        self.numbers, self.addresses = replay.active_blocks_at(index)
        """Active allocations and their addresses, ordered by address."""
        self.sizes = list(map(replay.allocations.sizes.__getitem__, self.numbers))
        ends = map(add, self.addresses, self.sizes)
        self.gaps = [*map(sub, self.addresses[1:], ends), 0][: len(self.numbers)]
        """By allocation: the free bytes up to the next one if both are in the same piece, else 0."""
        self.exact = True
        """Whether every active allocation is inside a piece with its whole size, as in any consistent file."""
        # Blocks never overlap: only blocks of uncertain size can appear to.
        if self.gaps and min(self.gaps) < 0:
            self.exact = False
            for place in [place for place, gap in enumerate(self.gaps) if gap < 0]:
                self.sizes[place], self.gaps[place] = max(0, self.sizes[place] + self.gaps[place]), 0
        spans = self._lay_out(replay.segments.at(index))
        if sum(last - first for _, first, last in spans) != len(self.numbers):
            spans = self._only(spans)
        self._pieces = [Piece(self, *span) for span in spans]

    def _lay_out(self, ranges: list[Range]) -> list[tuple[Range, int, int]]:
        """Return the allocations in each range: index of the first, and of the one after the last."""
        addresses, sizes, last = self.addresses, self.sizes, 0
        spans: list[tuple[Range, int, int]] = []
        for one in ranges:
            first = bisect_left(addresses, one.address, last)
            last = bisect_left(addresses, one.end, first)
            if last > first:
                self.gaps[last - 1] = 0
                room = one.end - addresses[last - 1]
                if sizes[last - 1] > room:
                    sizes[last - 1], self.exact = room, False
            spans.append((one, first, last))
        return spans

    def _only(self, spans: list[tuple[Range, int, int]]) -> list[tuple[Range, int, int]]:
        """Remove allocations that are in no range, where the file is inconsistent."""
        self.exact = False
        places = [place for _, first, last in spans for place in range(first, last)]
        self.numbers, self.addresses, self.sizes, self.gaps = (
            [column[place] for place in places] for column in (self.numbers, self.addresses, self.sizes, self.gaps)
        )
        begins = accumulate((last - first for _, first, last in spans), initial=0)
        return [(one, begin, begin + last - first) for (one, first, last), begin in zip(spans, begins, strict=False)]

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> list[Piece]: ...
    def __getitem__(self, index: int | slice) -> Piece | list[Piece]:
        """Return a piece, or several."""
        return self._pieces[index]

    def __len__(self) -> int:
        """Count the pieces."""
        return len(self._pieces)


def layout_at(replay: Replay, index: int) -> Layout:
    """Return the layout of a device's memory right after entry ``index``."""
    return Layout(replay, index)


def matters(free: int, reserved: int) -> bool:
    """Return whether fragmented free memory may cause a failure: more than a twentieth of reserved memory.

    With less, one more request might have fitted if it were contiguous, but the run would have failed soon after.
    """
    return free > reserved * 0.05


class Fragmentation(NamedTuple):
    """Use of reserved memory, in bytes and counts."""

    reserved: int
    allocated: int
    requested: int
    """Requested bytes of allocated and pending blocks."""
    rounding: int
    """Bytes of allocated and pending blocks beyond the requested size."""
    pending: int
    """Freed by the program, but waiting for a stream."""
    free: int
    free_blocks: int
    largest_free: int
    free_small: int
    """Free in segments of small blocks, not usable for requests above 1 MiB."""
    free_private: int
    """Free in private pools, not usable outside them."""
    expandable: int
    """Reserved in expandable segments."""
    segments: int
    blocks: int
    streams: int
    pools: int


def fragmentation(layout: Layout) -> Fragmentation:
    """Return the sums over a layout."""
    replay, sizes = layout.replay, layout.sizes
    of = replay.allocations
    reserved, taken = sum(piece.size for piece in layout), sum(sizes)
    if layout.exact:
        requested = replay.at(replay.requested, layout.moment)
        pending = taken - replay.at(replay.allocated, layout.moment)
    else:
        requested = sum(map(of.requested.__getitem__, layout.numbers))
        let_go = map(layout.moment.__ge__, map(of.freed.__getitem__, layout.numbers))
        pending = sum(compress(sizes, let_go))
    edges = [size for piece in layout for size in piece.edges]
    return Fragmentation(
        reserved=reserved,
        allocated=taken - pending,
        requested=requested,
        rounding=taken - requested,
        pending=pending,
        free=reserved - taken,
        free_blocks=len(edges) + len(layout.gaps) - layout.gaps.count(0),
        largest_free=max(max(edges, default=0), max(layout.gaps, default=0)),
        free_small=sum(piece.free_bytes for piece in layout if piece.small),
        free_private=sum(piece.free_bytes for piece in layout if piece.pool),
        expandable=sum(piece.size for piece in layout if piece.expandable),
        segments=len(layout),
        blocks=len(edges) + len(sizes) + len(layout.gaps) - layout.gaps.count(0),
        streams=len({piece.stream for piece in layout}),
        pools=len({piece.pool for piece in layout if piece.pool}),
    )
