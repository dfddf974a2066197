"""Layout of memory: segments and the blocks in them, at any moment of the window.

Hundreds of thousands of blocks may lie there, and a cursor moves over them: what a segment holds is found when it is
asked for, and sums are taken over whole columns.
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
    """What the program asked for, bytes; 0 of a free block."""
    state: int
    number: int
    """Its allocation; -1 of a free block."""


class Piece:
    """A segment (of an expandable one: a mapped range) at a moment; its blocks fill it without gaps."""

    __slots__ = ("_first", "_last", "_of", "address", "expandable", "pool", "size", "small", "stream")

    def __init__(self, of: "Layout", one: Range, first: int, last: int) -> None:
        self._of, self._first, self._last = of, first, last
        self.address, self.size, self.stream, self.small, self.expandable, self.pool = one

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.address + self.size

    @property
    def active_blocks(self) -> int:
        """How many blocks are allocated or pending."""
        return self._last - self._first

    @property
    def free_bytes(self) -> int:
        """Bytes in free blocks."""
        return self.size - sum(self._of.sizes[self._first : self._last])

    @property
    def free_sizes(self) -> list[int]:
        """The sizes of the free blocks, in no order."""
        within = self._of.gaps[self._first : max(self._first, self._last - 1)]
        return [*filter(None, within), *self.edges]

    @property
    def largest_free_bytes(self) -> int:
        """The largest free block, bytes."""
        return max(self.free_sizes, default=0)

    @property
    def edges(self) -> list[int]:
        """The sizes of the free blocks at its ends: none, one or two of them."""
        first, last, of = self._first, self._last - 1, self._of
        if last < first:
            return [self.size] if self.size else []
        head, tail = of.addresses[first] - self.address, self.end - of.addresses[last] - of.sizes[last]
        return [size for size in (head, tail) if size]

    @property
    def blocks(self) -> list[Block]:
        """The blocks by address, free ones included."""
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
    """A device's memory right after an entry: its pieces, by address."""

    def __init__(self, replay: Replay, index: int) -> None:
        self.replay, self.moment = replay, index
        self.numbers, self.addresses = replay.active_blocks_at(index)
        """Active allocations, and where they begin, by address."""
        self.sizes = list(map(replay.allocations.sizes.__getitem__, self.numbers))
        ends = map(add, self.addresses, self.sizes)
        self.gaps = [*map(sub, self.addresses[1:], ends), 0][: len(self.numbers)]
        """Behind each allocation the free bytes up to the next one, where both lie in the same piece."""
        self.exact = True
        """Whether every active allocation lies in it with its whole size, as in any file that is sound."""
        # A block never reaches into the next: only blocks of unsure size could seem to.
        if self.gaps and min(self.gaps) < 0:
            self.exact = False
            for place in [place for place, gap in enumerate(self.gaps) if gap < 0]:
                self.sizes[place], self.gaps[place] = max(0, self.sizes[place] + self.gaps[place]), 0
        spans = self._lay_out(replay.segments.at(index))
        if sum(last - first for _, first, last in spans) != len(self.numbers):
            spans = self._only(spans)
        self._pieces = [Piece(self, *span) for span in spans]

    def _lay_out(self, ranges: list[Range]) -> list[tuple[Range, int, int]]:
        """Find the allocations in each range: the first, and the one behind the last."""
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
        """Leave out allocations that lie in no range: the file contradicts itself there."""
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
    """Lay out a device's memory right after entry ``index``, by address."""
    return Layout(replay, index)


def matters(free: int, reserved: int) -> bool:
    """Return whether free memory in pieces can be why a run fails: more than a twentieth of what is reserved.

    With less, one more request may have fitted in one piece, but the run had come to its end all the same.
    """
    return free > reserved * 0.05


class Fragmentation(NamedTuple):
    """How well reserved memory is used, in numbers; all bytes."""

    reserved: int
    allocated: int
    requested: int
    """Of what is allocated or pending, what the program asked for."""
    rounding: int
    """Allocated or pending beyond what was asked for."""
    pending: int
    """Freed by the program, but waiting for a stream."""
    free: int
    free_blocks: int
    largest_free: int
    free_small: int
    """Free in segments of small blocks, of no use to requests above 1 MiB."""
    free_private: int
    """Free in private pools, of no use outside them."""
    expandable: int
    """Reserved in expandable segments."""
    segments: int
    blocks: int
    streams: int
    pools: int


def fragmentation(layout: Layout) -> Fragmentation:
    """Sum a layout up."""
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
