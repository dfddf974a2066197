"""Cached memory: free blocks that serve requests, segments from the driver, and segments released to it."""

from bisect import bisect_left

from .blocks import Block, Pool
from .expandable import ExpandableMemory
from .memory import UNLIMITED
from .settings import SMALL_MOST_BYTES


class CachedMemory(ExpandableMemory):
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
                pool.remove_unmapped(block)

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
