"""A model of PyTorch's CUDACachingAllocator: the same requests give the same segments.

Source of the rules: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.6 to 2.11. Not modelled: private pools (CUDA graphs,
``MemPool``), settings that change during the run, other backends than ``native``.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from .settings import MIB, SMALL_MOST_BYTES, SMALL_SEGMENT_BYTES, Settings

CHUNK_BYTES = 32 * MIB
"""``cudaMalloc`` reserves addresses in multiples of this: observed with CUDA 13 on an H200, as are the rules below."""
_TOP = 0x7FD2_68000000
_ADDRESS_SPACE_BYTES = 2**42  # address space of an expandable segment if the device's memory is unknown
UNLIMITED = 2**62


class Expandable(NamedTuple):
    """A range of virtual addresses onto which one stream's pool maps pages as it grows."""

    address: int
    size: int
    page_bytes: int


@dataclass(slots=True, eq=False)
class Block:
    """A range of one segment: allocated, free, or freed and waiting for other streams (``events``)."""

    pool: "Pool"
    stream: int
    address: int
    size: int
    expandable: Expandable | None
    requested: int = 0
    handle: int = 0
    free: bool = False  # whether it is in one of its pool's sets, and can be merged with a neighbour
    mapped: bool = True  # has physical memory; False: a part of an expandable segment with only address space
    events: int = 0  # number of events of other streams that it waits for since it was freed
    streams: set[int] | None = None  # other streams that use it (`record_stream`)
    previous: "Block | None" = None
    next: "Block | None" = None
    gc_base: int = 0

    def insert_after(self, before: "Block | None", after: "Block | None") -> None:
        """Link this block between two neighbours."""
        self.previous, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.previous = self


Entry = tuple[int, int, Block]  # size, address, block: the order of a free set; addresses are unique


class Pool:
    """Free blocks of one size class, by stream; each stream's blocks are ordered by size, then address."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.free: dict[int, list[Entry]] = {}
        self.unmapped: dict[int, list[tuple[int, Block]]] = {}  # unmapped parts of expandable segments, by address
        self.searches = 0  # number of searches for a free block: the clock of garbage collection

    def add(self, block: Block) -> None:
        """Add a block to the free ones, or to the unmapped ones."""
        block.free = True
        if not block.mapped:
            insort(self.unmapped.setdefault(block.stream, []), (block.address, block))
            return
        block.gc_base = self.searches
        insort(self.free.setdefault(block.stream, []), (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """Remove a block from the free ones, or from the unmapped ones."""
        block.free = False
        if not block.mapped:
            addresses = self.unmapped[block.stream]
            del addresses[bisect_left(addresses, (block.address,))]  # type: ignore[arg-type]
            return
        entries = self.free[block.stream]
        del entries[bisect_left(entries, (block.size, block.address))]  # type: ignore[arg-type]

    def blocks(self) -> Iterator[Block]:
        """Iterate over the current free blocks, by stream, size and address."""
        for stream in sorted(self.free):
            for _, _, block in list(self.free[stream]):
                yield block


class Driver:
    """Physical memory in bytes, and virtual addresses as assigned by ``cudaMalloc``.

    Addresses matter only if the allocator chooses between free blocks of the same size. A segment is placed in the
    smallest hole of the reserved address chunks, the lowest of equal ones; else at the start of a new chunk below all
    others.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._lowest = _TOP
        self._chunk_of: dict[int, tuple[int, int]] = {}  # by a segment's address: start and end of its chunk
        self._holes: list[tuple[int, int, int, int]] = []  # size, address, and start and end of the chunk

    @property
    def free_bytes(self) -> int | None:
        """Free part of the capacity; None without a capacity."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.used_bytes

    def take(self, size: int) -> bool:
        """Allocate physical memory; return False, without allocating, if there is not enough."""
        if self.capacity_bytes is not None and self.used_bytes + size > self.capacity_bytes:
            return False
        self.used_bytes += size
        return True

    def give(self, size: int) -> None:
        """Release physical memory."""
        self.used_bytes -= size

    def allocate(self, size: int) -> int | None:
        """Return the address of a new segment (``cudaMalloc``); None if memory is short."""
        if not self.take(size):
            return None
        at = bisect_left(self._holes, (size,))  # type: ignore[arg-type]
        if at < len(self._holes):
            room, address, begin, end = self._holes.pop(at)
        else:
            room = -(-size // CHUNK_BYTES) * CHUNK_BYTES
            address = begin = self._lowest = self._lowest - room
            end = begin + room
        if room > size:
            insort(self._holes, (room - size, address + size, begin, end))
        self._chunk_of[address] = (begin, end)
        return address

    def release(self, address: int, size: int) -> None:
        """Release a segment (``cudaFree``)."""
        self.give(size)
        chunk = self._chunk_of.pop(address, None)
        if chunk is None:
            return
        begin, end = address, address + size
        for hole in [hole for hole in self._holes if hole[2:] == chunk]:
            if hole[1] + hole[0] == begin or hole[1] == end:
                begin, end = min(begin, hole[1]), max(end, hole[1] + hole[0])
                self._holes.remove(hole)
        insort(self._holes, (end - begin, begin, *chunk))

    def reserve(self, size: int) -> int:
        """Return the start of an address range without memory (``cuMemAddressReserve``)."""
        self._lowest -= -(-size // CHUNK_BYTES) * CHUNK_BYTES
        return self._lowest


class DeviceOutOfMemory(Exception):  # noqa: N818  (the field's word)
    """A request that neither cached nor new memory could serve, with the figures of PyTorch's own message."""

    def __init__(self, sought: int, requested: int, allocated: int, reserved: int, free: int | None) -> None:
        super().__init__(f"{sought} bytes sought with {allocated} allocated and {reserved} reserved")
        self.sought_bytes = sought  # size of the requested segment: PyTorch's "Tried to allocate"
        self.requested_bytes, self.allocated_bytes, self.reserved_bytes = requested, allocated, reserved
        self.free_bytes = free


class Peaks(msgspec.Struct, frozen=True):
    """Highest values since the last reset, in bytes."""

    allocated_bytes: int
    reserved_bytes: int


class DeviceMemory:
    """State of an allocator, and its expandable segments; see ``CachingAllocator`` for the arguments."""

    def __init__(
        self,
        settings: Settings | None = None,
        capacity_bytes: int | None = None,
        device_bytes: int | None = None,
        driver: Driver | None = None,
    ) -> None:
        self.settings = settings or Settings()
        self.driver = driver or Driver(capacity_bytes)
        self.device_bytes = device_bytes or capacity_bytes
        self.allocated = 0  # bytes of the blocks held by the program
        self.active = 0  # `allocated` plus freed blocks that still wait for another stream
        self.requested = 0
        self.reserved = 0
        self.retries = 0  # requests for which all cached memory was released (`num_alloc_retries`)
        self._peak_allocated = self._peak_reserved = 0
        self._small, self._large = Pool(True), Pool(False)
        self._live: dict[int, Block] = {}
        self._waiting: dict[int, deque[Block]] = {}
        """Freed blocks by the stream that still uses them, in the order of their events."""
        self._last = 0
        self._divides = any(part > 1 for part in self.settings.roundup_power2_divisions)
        most = self.settings.max_split_size_bytes
        self._max_split = UNLIMITED if most is None else most
        self._allowed: int | None = None
        if self.settings.per_process_memory_fraction < 1:
            self.set_per_process_memory_fraction(self.settings.per_process_memory_fraction)

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        """Limit reserved memory to a share of the device's; raise ``ValueError`` if the device's memory is unknown."""
        if self.device_bytes is None:
            raise ValueError("set_per_process_memory_fraction needs the device's memory: give device_bytes")
        self._allowed = int(fraction * self.device_bytes)

    def peaks(self) -> Peaks:
        """Return the highest values since the last reset."""
        return Peaks(self._peak_allocated, self._peak_reserved)

    def reset_peaks(self) -> None:
        """Reset the peaks to the current values (``reset_peak_memory_stats``)."""
        self._peak_allocated, self._peak_reserved = self.allocated, self.reserved

    def _free_bytes(self) -> int | None:
        """Return the bytes that could still be reserved; None: unlimited."""
        limits = self.driver.free_bytes, None if self._allowed is None else self._allowed - self.reserved
        return min((limit for limit in limits if limit is not None), default=None)

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self._peak_reserved = max(self._peak_reserved, self.reserved)

    def _merge_both(self, block: Block) -> None:
        self._merge(block, block.previous)
        self._merge(block, block.next)

    def _merge(self, block: Block, other: Block | None) -> None:
        """Merge a block with a neighbour if that is free."""
        if other is None or not other.free or other.mapped != block.mapped:
            return
        other.pool.remove(other)
        if other is block.previous:
            block.address = other.address
            block.previous = before = other.previous
            if before is not None:
                before.next = block
        else:
            block.next = after = other.next
            if after is not None:
                after.previous = block
        block.size += other.size

    @property
    def space_bytes(self) -> int:
        """Address space that an expandable segment reserves: an eighth more than the device's memory."""
        return _ADDRESS_SPACE_BYTES if self.device_bytes is None else self.device_bytes + self.device_bytes // 8

    def _expand(self, pool: Pool, rounded: int, stream: int) -> Block | None:
        """Map pages at the lowest place with room for a request; return the block, or None if memory is short."""
        block = self._room(pool, rounded, stream)
        if not block.mapped and not self._map(block, min(block.size, rounded)):
            return None
        while block.size < rounded:
            after = block.next
            if after is None or not self._map(after, min(rounded - block.size, after.size)):
                return None
            block = after  # the mapped block has merged with the free block before it
        pool.remove(block)
        return block

    def _room(self, pool: Pool, rounded: int, stream: int) -> Block:
        """Return the first of consecutive free and unmapped blocks that have room for a request."""
        for _, block in pool.unmapped.get(stream, ()):
            first = block.previous if block.previous is not None and block.previous.free else block
            room, one = 0, first
            while one is not None and one.free and room < rounded:
                room += one.size
                one = one.next
            if room >= rounded:
                return first
        space = self._space(pool)
        block = Block(pool, stream, space.address, space.size, space, mapped=False)
        pool.add(block)
        return block

    def _space(self, pool: Pool, address: int | None = None) -> Expandable:
        page = SMALL_SEGMENT_BYTES if pool.small else self.settings.large_segment_bytes
        size = -(-self.space_bytes // page) * page
        return Expandable(self.driver.reserve(size) if address is None else address, size, page)

    def _map(self, block: Block, size: int) -> bool:
        """Map whole pages at the start of an unmapped block; return False if memory is short."""
        space = block.expandable
        assert space is not None
        mapped = -(-size // space.page_bytes) * space.page_bytes
        if not self.driver.take(mapped):
            return False
        block.pool.remove(block)
        block.mapped = True
        if mapped < block.size:
            rest = Block(block.pool, block.stream, block.address + mapped, block.size - mapped, space, mapped=False)
            rest.insert_after(block, block.next)
            block.pool.add(rest)
            block.size = mapped
        self._merge_both(block)
        block.pool.add(block)
        self._reserve(mapped)
        return True

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages of a free block."""
        space = block.expandable
        assert space is not None
        page = space.page_bytes
        begin = space.address + -(-(block.address - space.address) // page) * page
        end = space.address + (block.address + block.size - space.address) // page * page
        if begin >= end:
            return
        pool = block.pool
        pool.remove(block)
        for address, size, before in (
            (block.address, begin - block.address, True),
            (end, block.address + block.size - end, False),
        ):
            if size:
                part = Block(pool, block.stream, address, size, space)
                part.insert_after(*((block.previous, block) if before else (block, block.next)))
                pool.add(part)
        block.address, block.size, block.mapped = begin, end - begin, False
        self._merge_both(block)
        pool.add(block)
        self.reserved -= end - begin
        self.driver.give(end - begin)


class CachedMemory(DeviceMemory):
    """Finds blocks for requests and releases free memory."""

    def _splits(self, pool: Pool, rounded: int, rest: int) -> bool:
        if pool.small or self.settings.expandable_segments:
            return rest >= 512
        return rounded < self._max_split and rest > SMALL_MOST_BYTES

    def _cached(self, pool: Pool, rounded: int, stream: int) -> Block | None:
        """Remove and return the best free block: the smallest that is large enough, at the lowest address."""
        pool.searches += 1
        entries = pool.free.get(stream)
        if not entries:
            return None
        at = bisect_left(entries, (rounded,))  # type: ignore[arg-type]
        if at == len(entries):
            return None
        size, _, block = entries[at]
        if block.expandable is not None:
            # The last block of an expandable segment counts with the size to which it can grow.
            while at + 1 < len(entries) and _can_grow_to(entries[at + 1][2]) < _can_grow_to(entries[at][2]):
                at += 1
            size, _, block = entries[at]
        if rounded < self._max_split <= size:
            return None
        if rounded >= self._max_split and size >= rounded + self.settings.max_non_split_rounding_bytes:
            return None
        del entries[at]
        block.free = False
        return block

    def _from_driver(self, pool: Pool, rounded: int, size: int, stream: int) -> Block | None:
        if self._allowed is not None and self.reserved + size > self._allowed:
            return None
        if self.settings.expandable_segments:
            return self._expand(pool, rounded, stream)
        address = self.driver.allocate(size)
        if address is None:
            return None
        self._reserve(size)
        return Block(pool, stream, address, size, None)

    def _release_pool(self, pool: Pool) -> None:
        """Release whole free segments, and the whole free pages of expandable ones."""
        to_unmap: list[Block] = []
        for block in pool.blocks():
            if block.expandable is not None:
                to_unmap.append(block)
            elif block.previous is None and block.next is None:
                self._release(block)
        for block in to_unmap:
            self._unmap(block)
            if block.previous is None and block.next is None and not block.mapped:
                pool.remove(block)

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserved -= block.size
        self.driver.release(block.address, block.size)

    def _release_oversize(self, pool: Pool, rounded: int, stream: int) -> bool:
        """Release free blocks that may not be split, until enough for a request is free; True if it is.

        Those of expandable segments stay: their pages are unmapped with the rest of the cache
        (``release_available_cached_blocks``).
        """
        if self._max_split == UNLIMITED:
            return False
        entries = pool.free.get(stream, [])
        sought = max(rounded, self._max_split)
        at = bisect_left(entries, (sought,))  # type: ignore[arg-type]
        if at < len(entries) and entries[at][2].expandable is None:
            self._release(entries[at][2])
            return True
        released = 0
        for size, _, block in reversed(entries[:at]):
            if released >= sought or size < self._max_split:
                break
            if block.expandable is None:
                released += size
                self._release(block)
        return released >= sought

    def _collect_garbage(self) -> None:
        """Release free segments, those unused longest first, down to the threshold."""
        target = self.reserved - int(self.settings.garbage_collection_threshold * (self._allowed or 0))
        if target <= 0:
            return
        clock = self._large.searches
        whole = [one for one in self._large.blocks() if one.previous is None and one.next is None]
        ages = sum(clock - block.gc_base for block in whole)
        reclaimed = 0
        while whole and reclaimed < target:
            limit = ages / len(whole)
            old = [block for block in whole if clock - block.gc_base >= limit]
            if not old:
                return
            whole = [block for block in whole if clock - block.gc_base < limit]
            for block in old:
                reclaimed += block.size
                ages -= clock - block.gc_base
                self._release(block)


def _can_grow_to(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


class CachingAllocator(CachedMemory):
    """One device's allocator.

    ``capacity_bytes`` is the memory available to PyTorch: the device's without CUDA's context, NCCL's buffers and other
    processes; None: unlimited. ``device_bytes``, by default the same, is the device's total memory, for
    ``set_per_process_memory_fraction``. Another ``driver`` may provide memory and addresses.
    """

    def allocate(self, size_bytes: int, stream: int = 0) -> int:
        """Allocate memory and return its handle.

        Raises ``DeviceOutOfMemory`` if the request failed even after all cached memory was released.
        """
        self._last = handle = self._last + 1
        if size_bytes <= 0:
            return handle  # PyTorch allocates nothing for empty tensors
        rounded = self.settings.rounded(size_bytes) if self._divides else -(-size_bytes // 512) * 512
        pool = self._small if rounded <= SMALL_MOST_BYTES else self._large
        block = self._cached(pool, rounded, stream) or self._new(pool, rounded, stream, size_bytes)
        rest = block.size - rounded
        if self._splits(pool, rounded, rest):
            block.size = rounded
            left = Block(pool, stream, block.address + rounded, rest, block.expandable)
            left.insert_after(block, block.next)
            pool.add(left)
        block.requested = size_bytes
        block.handle = handle
        self._live[handle] = block
        size = block.size
        self.allocated += size
        self.active += size
        self.requested += size_bytes
        if self.allocated > self._peak_allocated:
            self._peak_allocated = self.allocated
        return handle

    def free(self, handle: int) -> None:
        """Free an allocation; its block can be reused once the streams recorded on it are done.

        An unknown handle (that of an empty allocation) is ignored.
        """
        block = self._live.pop(handle, None)
        if block is None:
            return
        self.allocated -= block.size
        if not block.streams:
            self._free_block(block)
            return
        for stream in sorted(block.streams):
            block.events += 1
            self._waiting.setdefault(stream, deque()).append(block)
        block.streams = None

    def record_stream(self, handle: int, stream: int) -> None:
        """Record that a stream other than the allocating one uses an allocation (``Tensor.record_stream``)."""
        block = self._live.get(handle)
        if block is not None and block.stream != stream:
            block.streams = {*(block.streams or ()), stream}

    def complete_events(self, stream: int | None = None) -> None:
        """Complete the events of a stream, or of all streams: blocks that wait for them become free.

        PyTorch checks events at its next allocation, so call this before it.
        """
        for one in list(self._waiting) if stream is None else [stream]:
            for block in self._waiting.pop(one, ()):
                block.events -= 1
                if not block.events:
                    self._free_block(block)

    def empty_cache(self) -> None:
        """Release free segments to the driver (``torch.cuda.empty_cache``)."""
        self.complete_events()
        self._release_pool(self._large)
        self._release_pool(self._small)

    def address(self, handle: int) -> int:
        """Return the address of a live allocation; 0 for an empty one."""
        block = self._live.get(handle)
        return 0 if block is None else block.address

    def _new(self, pool: Pool, rounded: int, stream: int, requested: int) -> Block:
        """Allocate memory from the driver, if necessary after releasing cached memory."""
        if self._allowed is not None and self.settings.garbage_collection_threshold > 0:
            self._collect_garbage()
        size = self.settings.segment_size(rounded)
        block = self._from_driver(pool, rounded, size, stream)
        if block is None and self._release_oversize(pool, rounded, stream):
            block = self._from_driver(pool, rounded, size, stream)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._from_driver(pool, rounded, size, stream)
        if block is None:
            raise DeviceOutOfMemory(size, requested, self.allocated, self.reserved, self._free_bytes())
        return block

    def _free_block(self, block: Block) -> None:
        self.active -= block.size
        self.requested -= block.requested
        block.requested = block.handle = 0
        self._merge_both(block)
        block.pool.add(block)
