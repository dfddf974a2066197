"""Layout of memory at any moment of the window: segments, blocks, fragmentation in figures and in words, stacks.

There may be hundreds of thousands of blocks, and the cursor moves between moments. Therefore a segment's blocks are
computed on request, and sums are computed over whole columns. The tree of stacks is built once; only its sums are
computed again.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate, compress
from operator import add, sub
from typing import NamedTuple

from ...code_owner import library_of
from ...snapshot.columns import ALLOCATED, FREE, PENDING, Frame, Snapshot
from ...text import counted, gib
from .snapshot_replay import Range, Replay


class Block(NamedTuple):
    """A piece of a segment."""

    address: int
    size: int
    requested: int  # requested bytes; 0 for a free block
    state: int
    number: int  # its allocation; -1 for a free block


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
            state = ALLOCATED if of.replay.allocations.freed[number] > of.moment else PENDING
            found.append(Block(address, size, of.replay.allocations.requested[number], state, number))
            at = address + size
        if at < self.end:
            found.append(Block(at, self.end - at, 0, FREE, -1))
        return found


class Layout(list[Piece]):
    """A device's memory right after an entry, as pieces ordered by address."""

    def __init__(self, replay: Replay, index: int) -> None:
        self.replay, self.moment = replay, index
        of = replay.allocations.addresses
        self.numbers = sorted(replay.active_at(index), key=of.__getitem__)
        self.addresses = list(map(of.__getitem__, self.numbers))
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
        spans = self._lay_out(replay.ranges_at(index))
        if sum(last - first for _, first, last in spans) != len(self.numbers):
            spans = self._only(spans)
        super().__init__(Piece(self, *span) for span in spans)

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
    requested: int  # requested bytes of allocated and pending blocks
    rounding: int  # bytes of allocated and pending blocks beyond the requested size
    pending: int  # freed by the program, but waiting for a stream
    free: int
    free_blocks: int
    largest_free: int
    free_small: int  # free in segments of small blocks, not usable for requests above 1 MiB
    free_private: int  # free in private pools, not usable outside them
    expandable: int
    segments: int
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
        streams=len({piece.stream for piece in layout}),
        pools=len({piece.pool for piece in layout if piece.pool}),
    )


class Tally(NamedTuple):
    """Memory held by a stack."""

    bytes: int
    blocks: int


def frame_words(frame: Frame) -> str:
    """Return a frame as text: ``forward  model.py:59``."""
    where = frame.filename.replace("\\", "/").rpartition("/")[2]
    line = f":{frame.line}" if frame.line else ""
    return f"{frame.name}  {where}{line}" if where and where != "??" else frame.name


def matches(snapshot: Snapshot, stack: int, text: str) -> bool:
    """Return whether a frame of the stack has the text in its function or file name, ignoring case."""
    text = text.lower()
    return any(text in frame.name.lower() or text in frame.filename.lower() for frame in snapshot.frames_of(stack))


Key = tuple[int, ...]  # frame indices of a node, outermost first; more than one where library frames are folded


class StackTree:
    """Every stack requested so far as a branch, with outermost calls at the root (node 0)."""

    def __init__(self, snapshot: Snapshot, fold: bool = True) -> None:
        self.snapshot, self.fold = snapshot, fold
        self.keys: list[Key] = [()]
        self.children: dict[int, list[int]] = {}
        self._parents = [0]
        self._node_of: dict[tuple[int, Key], int] = {}
        self._leaf_of: dict[int, int] = {0: 0}
        self._library = [bool(library_of(frame.filename)) for frame in snapshot.frames] if fold else []
        self._found: tuple[str, frozenset[int]] = "", frozenset()

    def weigh(self, tallies: Mapping[int, Tally], find: str = "") -> "Node":
        """Return the root of the tree with the sums of a moment, of the stacks that match ``find``."""
        if find:
            wanted = self._matching(find)
            stacks = self.snapshot.stacks
            tallies = {stack: tally for stack, tally in tallies.items() if not wanted.isdisjoint(stacks[stack])}
        leaves = [self._leaf(stack) for stack in tallies]
        sizes, blocks = [0] * len(self.keys), [0] * len(self.keys)
        for leaf, (size, count) in zip(leaves, tallies.values(), strict=True):
            sizes[leaf] += size
            blocks[leaf] += count
        parents = self._parents
        # A node's index is always larger than its parent's.
        for node in range(len(parents) - 1, 0, -1):
            if count := blocks[node]:
                sizes[parents[node]] += sizes[node]
                blocks[parents[node]] += count
        return Node(Weighed(self, sizes, blocks, tallies.get(0, Tally(0, 0))), 0)

    def _matching(self, find: str) -> frozenset[int]:
        text = find.lower()
        if self._found[0] != text:
            frames = enumerate(self.snapshot.frames)
            found = (i for i, frame in frames if text in frame.name.lower() or text in frame.filename.lower())
            self._found = text, frozenset(found)
        return self._found[1]

    def _leaf(self, stack: int) -> int:
        found = self._leaf_of.get(stack)
        if found is None:
            found = 0
            for key in self._path(self.snapshot.stacks[stack]):
                found = self._below(found, key)
            self._leaf_of[stack] = found
        return found

    def _below(self, parent: int, key: Key) -> int:
        found = self._node_of.get((parent, key))
        if found is None:
            found = self._node_of[parent, key] = len(self.keys)
            self.keys.append(key)
            self.children.setdefault(parent, []).append(found)
            self._parents.append(parent)
        return found

    def _path(self, stack: list[int]) -> Iterable[Key]:
        if not self.fold:
            return [(frame,) for frame in reversed(stack)]
        path: list[Key] = []
        run: list[int] = []
        for frame in reversed(stack):
            if self._library[frame]:
                run.append(frame)
                continue
            if run:
                path.append(tuple(run))
                run = []
            path.append((frame,))
        return [*path, tuple(run)] if run else path


class Weighed(NamedTuple):
    """A tree with the bytes and blocks of a moment, by node."""

    tree: StackTree
    bytes: list[int]
    blocks: list[int]
    without: Tally  # bytes without a stack; they count only in the root


class Node(NamedTuple):
    """A call, or consecutive library calls folded into one, with the memory allocated at it and below."""

    of: Weighed
    number: int

    @property
    def frames(self) -> Key:
        """Its frames' indices."""
        return self.of.tree.keys[self.number]

    @property
    def bytes(self) -> int:
        """Bytes at it and below."""
        return self.of.bytes[self.number]

    @property
    def blocks(self) -> int:
        """Blocks at it and below."""
        return self.of.blocks[self.number]

    @property
    def children(self) -> list["Node"]:
        """The children with blocks, unordered."""
        weighed = self.of
        found = weighed.tree.children.get(self.number, ())
        return [Node(weighed, child) for child in found if weighed.blocks[child]]

    def ordered(self) -> list["Node"]:
        """Return the children with blocks, most bytes first (for a difference: by absolute value)."""
        return sorted(self.children, key=lambda child: (-abs(child.bytes), -child.blocks, child.number))


def stack_tree(snapshot: Snapshot, tallies: Mapping[int, Tally], fold: bool = True) -> Node:
    """Build the tree of stacks for one moment; see ``StackTree.weigh``."""
    return StackTree(snapshot, fold).weigh(tallies)


def node_words(node: Node) -> str:
    """Return a node as text: its call, or the innermost of folded library calls."""
    frames, snapshot = node.frames, node.of.tree.snapshot
    if not frames:
        return "everything"
    innermost = snapshot.frames[frames[-1]]
    more = len(frames) - 1
    if not more:
        return frame_words(innermost)
    names = dict.fromkeys(library_of(snapshot.frames[frame].filename) for frame in reversed(frames))
    names.pop("", None)
    return f"{frame_words(innermost)}  (+{counted(more, 'frame')} in {', '.join(list(names)[:3])})"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole * 100:.1f} %" if whole else "0 %"


def fragmentation_words(found: Fragmentation) -> list[str]:
    """Return the use of reserved memory, one sentence per line."""
    if not found.reserved:
        return ["nothing is reserved"]
    lines = [
        f"{gib(found.allocated)} of {gib(found.reserved)} reserved is allocated "
        f"({_percent(found.allocated, found.reserved)}) in {found.segments:,} segments"
    ]
    if found.free:
        lines.append(
            f"{gib(found.free)} is reserved but free, in {found.free_blocks:,} blocks; the largest is "
            f"{gib(found.largest_free)} ({_percent(found.largest_free, found.free)} of it)"
        )
        scattered = found.free - found.largest_free
        if scattered > found.reserved * 0.1 and found.largest_free < found.free / 2:
            lines.append("much of the free memory lies in pieces: fragmentation can fail a large request")
            if not found.expandable:
                lines.append(
                    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets segments grow instead of lying apart"
                )
        elif not matters(found.free, found.reserved):
            lines.append("fragmentation is not a problem here: little is reserved beyond what is allocated")
        else:
            lines.append("most of the free memory lies in few pieces: fragmentation is not a problem here")
    else:
        lines.append("no reserved memory is free")
    lines.append(
        f"rounding takes {gib(found.rounding)} ({_percent(found.rounding, found.requested)} over what was asked)"
    )
    if found.pending:
        lines.append(f"{gib(found.pending)} is freed but waits for a stream that used it (record_stream)")
    if found.free_small:
        lines.append(f"{gib(found.free_small)} is free in segments of small blocks, for requests up to 1 MiB only")
    if found.free_private:
        lines.append(f"{gib(found.free_private)} is free in {counted(found.pools, 'private pool')}, of no use outside")
    if found.streams > 1:
        lines.append(f"{found.streams} streams have segments of their own: what one has free, another cannot use")
    if found.expandable:
        lines.append(f"{gib(found.expandable)} is in expandable segments")
    return lines
