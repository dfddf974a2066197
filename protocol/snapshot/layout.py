"""Where everything lies: segments and the blocks in them, at any moment of the window."""

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from .allocations import columns
from .model import (
    ALLOCATED,
    FREE,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
)
from .replay import Replay
from .rounding import SMALL_MOST


class Block(NamedTuple):
    """A piece of a segment."""

    address: int
    size: int
    requested: int
    """What the program asked for, bytes; 0 of a free block."""
    state: int
    number: int
    """Its allocation; -1 of a free block."""


@dataclass
class Piece:
    """A segment (of an expandable one: a mapped range) at a moment; its blocks fill it without gaps."""

    address: int
    size: int
    stream: int
    small: bool
    expandable: bool
    pool: str
    """A private pool's identifier; ``""`` for the shared one, and for segments that were gone by the end."""
    blocks: list[Block] = field(default_factory=list[Block])

    @property
    def free_bytes(self) -> int:
        """Bytes in free blocks."""
        return sum(block.size for block in self.blocks if block.state == FREE)

    @property
    def largest_free_bytes(self) -> int:
        """The largest free block, bytes."""
        return max((block.size for block in self.blocks if block.state == FREE), default=0)


def layout_at(replay: Replay, index: int) -> list[Piece]:
    """Lay out a device's memory right after entry ``index``, by address."""
    pieces = _segments_at(replay, index)
    starts = [piece.address for piece in pieces]
    of = replay.allocations
    taken = sorted((of.addresses[number], number) for number in replay.active_at(index))
    inside: list[list[tuple[int, int]]] = [[] for _ in pieces]
    for address, number in taken:
        at = bisect_right(starts, address) - 1
        if at >= 0 and address < starts[at] + pieces[at].size:
            inside[at].append((address, number))
    for piece, blocks in zip(pieces, inside, strict=True):
        _fill(piece, blocks, replay, index)
    return pieces


def _fill(piece: Piece, inside: list[tuple[int, int]], replay: Replay, index: int) -> None:
    of = replay.allocations
    at, end = piece.address, piece.address + piece.size
    for position, (address, number) in enumerate(inside):
        if address > at:
            piece.blocks.append(Block(at, address - at, 0, FREE, -1))
        after = inside[position + 1][0] if position + 1 < len(inside) else end
        # A block never reaches into the next: only blocks of unsure size could seem to.
        size = min(of.sizes[number], after - address)
        piece.blocks.append(Block(address, size, of.requested[number], replay.state_at(number, index), number))
        at = address + size
    if at < end:
        piece.blocks.append(Block(at, end - at, 0, FREE, -1))


def _segments_at(replay: Replay, index: int) -> list[Piece]:
    """Undo what happened to segments after ``index``, from how they stand at the end."""
    snapshot, trace = replay.snapshot, replay.trace
    pieces = {
        segment.address: Piece(
            segment.address, segment.size, segment.stream, segment.small, segment.expandable, segment.pool
        )
        for segment in snapshot.segments
        if segment.device == replay.device
    }
    addresses, sizes, streams = (
        columns(trace.addresses, "Q"), columns(trace.sizes, "q"), columns(trace.streams, "q"),
    )  # fmt: skip
    for entry in reversed(replay.segment_entries):
        if entry <= index:
            break
        action, address, size = trace.actions[entry], addresses[entry], sizes[entry]
        if action == SEGMENT_ALLOC:
            pieces.pop(address, None)
        elif action == SEGMENT_FREE:
            pieces[address] = Piece(address, size, streams[entry], size <= 2 * SMALL_MOST, False, "")
        elif action == SEGMENT_MAP:
            _unmap(pieces, address, size)
        else:
            _map(pieces, address, size, streams[entry])
    return [pieces[address] for address in sorted(pieces)]


def _unmap(pieces: dict[int, Piece], address: int, size: int) -> None:
    for start in [start for start, piece in pieces.items() if start < address + size and address < start + piece.size]:
        piece = pieces[start]
        if not piece.expandable:
            continue
        del pieces[start]
        end = start + piece.size
        for begin, stop in ((start, address), (address + size, end)):
            if begin < stop:
                pieces[begin] = Piece(begin, stop - begin, piece.stream, piece.small, True, piece.pool)


def _map(pieces: dict[int, Piece], address: int, size: int, stream: int) -> None:
    before = next((p for s, p in pieces.items() if s + p.size == address and p.expandable and p.stream == stream), None)
    after = pieces.get(address + size)
    if before is not None:
        address, size = before.address, before.size + size
        del pieces[before.address]
    if after is not None and after.expandable and after.stream == stream:
        size += after.size
        del pieces[after.address]
    neighbour = before or after
    small = neighbour.small if neighbour is not None else False
    pieces[address] = Piece(address, size, stream, small, True, neighbour.pool if neighbour is not None else "")


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


def fragmentation(pieces: list[Piece]) -> Fragmentation:
    """Sum a layout up."""
    blocks = [block for piece in pieces for block in piece.blocks]
    free = [block.size for block in blocks if block.state == FREE]
    taken = [block for block in blocks if block.state != FREE]
    return Fragmentation(
        reserved=sum(piece.size for piece in pieces),
        allocated=sum(block.size for block in blocks if block.state == ALLOCATED),
        requested=sum(block.requested for block in taken),
        rounding=sum(block.size - block.requested for block in taken),
        pending=sum(block.size for block in taken if block.state != ALLOCATED),
        free=sum(free),
        free_blocks=len(free),
        largest_free=max(free, default=0),
        free_small=sum(piece.free_bytes for piece in pieces if piece.small),
        free_private=sum(piece.free_bytes for piece in pieces if piece.pool),
        expandable=sum(piece.size for piece in pieces if piece.expandable),
        segments=len(pieces),
        blocks=len(blocks),
        streams=len({piece.stream for piece in pieces}),
        pools=len({piece.pool for piece in pieces if piece.pool}),
    )
