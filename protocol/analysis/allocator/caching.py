"""A model of PyTorch's CUDACachingAllocator: the same requests give the same segments.

Source of the rules: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.6 to 2.11. Not modelled: private pools (CUDA graphs,
``MemPool``), settings that change during the run, other backends than ``native``.
"""

from collections import deque

from .blocks import Block, Pool
from .cached import CachedMemory
from .settings import SMALL_MOST_BYTES
from .views import DeviceOutOfMemory, SegmentView, view_segment


class CachingAllocator(CachedMemory):
    """One device's allocator.

    Args:
        settings: settings of ``PYTORCH_CUDA_ALLOC_CONF``.
        capacity_bytes: memory available to PyTorch: the device's memory without the CUDA context, NCCL's buffers and
            other processes. None: unlimited.
        device_bytes: the device's total memory, for ``set_per_process_memory_fraction``; default: the capacity.
        driver: provides memory and addresses; replaceable in tests.
    """

    def allocate(self, size_bytes: int, stream: int = 0) -> int:
        """Allocate memory and return its handle.

        Raises:
            DeviceOutOfMemory: the request failed even after all cached memory was released.
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
        if self.active > self._peak_active:
            self._peak_active = self.active
        if self.requested > self._peak_requested:
            self._peak_requested = self.requested
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
        if block is None or block.stream == stream:
            return
        if block.streams is None:
            block.streams = set()
        block.streams.add(stream)

    def complete_events(self, stream: int | None = None) -> None:
        """Complete the events of a stream, or of all streams: blocks that wait for them become free.

        PyTorch checks events at its next allocation, so call this before it.
        """
        for one in list(self._waiting) if stream is None else [stream]:
            for block in self._waiting.pop(one, ()):
                block.events -= 1
                if not block.events:
                    self._free_block(block)

    def complete_free(self, handle: int) -> None:
        """Complete all events that one freed allocation waits for."""
        for stream, blocks in list(self._waiting.items()):
            block = next((one for one in blocks if one.handle == handle), None)
            if block is None:
                continue
            blocks.remove(block)
            if not blocks:
                del self._waiting[stream]
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

    def segments(self) -> list[SegmentView]:
        """Return the segments by address, each with its blocks."""
        blocks = [*self._live.values(), *{id(block): block for one in self._waiting.values() for block in one}.values()]
        for pool in (self._small, self._large):
            blocks.extend(pool.blocks())
        found: list[SegmentView] = []
        run: list[Block] = []
        for block in sorted(blocks, key=lambda one: one.address):
            if run and block.previous is not run[-1]:
                found.append(view_segment(run))
                run = []
            run.append(block)
        return [*found, view_segment(run)] if run else found

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
        self._merge(block, block.previous)
        self._merge(block, block.next)
        block.pool.add(block)
