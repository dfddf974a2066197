"""Blocks of memory and the ordered sets in which the allocator keeps its free ones."""

from bisect import bisect_left, insort
from collections.abc import Iterator


class Expandable:
    """A range of virtual addresses onto which one stream's pool maps pages as it grows."""

    __slots__ = ("address", "page_bytes", "size")

    def __init__(self, address: int, size: int, page_bytes: int) -> None:
        self.address = address
        self.size = size
        self.page_bytes = page_bytes


class Block:
    """A range of one segment: allocated, free, or freed and waiting for other streams (``events``)."""

    __slots__ = (
        "address", "events", "expandable", "free", "gc_base", "handle", "mapped", "next", "pool", "previous",
        "requested", "size", "stream", "streams",
    )  # fmt: skip

    def __init__(self, pool: "Pool", stream: int, address: int, size: int, expandable: Expandable | None) -> None:
        self.pool = pool
        self.stream = stream
        self.address = address
        self.size = size
        self.expandable = expandable
        self.requested = 0
        self.handle = 0
        self.free = False
        """Whether it is in one of its pool's sets, and can be merged with a neighbour."""
        self.mapped = True
        """Whether it has physical memory; False for parts of an expandable segment that are address space only."""
        self.events = 0
        """Number of events of other streams that it waits for since it was freed."""
        self.streams: set[int] | None = None
        """Other streams that use it (``record_stream``)."""
        self.previous: Block | None = None
        self.next: Block | None = None
        self.gc_base = 0

    def insert_after(self, before: "Block | None", after: "Block | None") -> None:
        """Link this block between two neighbours."""
        self.previous, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.previous = self


Entry = tuple[int, int, Block]
"""Size, address, block: the order of a free set. Addresses are unique, so blocks are never compared."""


class Pool:
    """Free blocks of one size class, by stream; each stream's blocks are ordered by size, then address."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.free: dict[int, list[Entry]] = {}
        self.unmapped: dict[int, list[tuple[int, Block]]] = {}
        """Unmapped parts of expandable segments, by address."""
        self.searches = 0
        """Number of searches for a free block: the clock of garbage collection."""

    def add(self, block: Block) -> None:
        """Add a block to the free ones."""
        block.free = True
        block.gc_base = self.searches
        entries = self.free.get(block.stream)
        if entries is None:
            entries = self.free[block.stream] = []
        insort(entries, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """Remove a block from the free ones."""
        block.free = False
        entries = self.free[block.stream]
        del entries[bisect_left(entries, (block.size, block.address))]  # type: ignore[arg-type]

    def add_unmapped(self, block: Block) -> None:
        """Add a block to the unmapped ones."""
        block.free = True
        insort(self.unmapped.setdefault(block.stream, []), (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        """Remove a block from the unmapped ones."""
        block.free = False
        entries = self.unmapped[block.stream]
        del entries[bisect_left(entries, (block.address,))]  # type: ignore[arg-type]

    def blocks(self) -> Iterator[Block]:
        """Iterate over the current free blocks, by stream, size and address."""
        for stream in sorted(self.free):
            for _, _, block in list(self.free[stream]):
                yield block
