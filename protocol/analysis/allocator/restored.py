"""Restores the allocator's state from the segments of a snapshot."""

from collections import deque
from collections.abc import Mapping

from .blocks import Block, Expandable, Pool
from .cached import CachedMemory
from .views import BlockView, SegmentView


class RestoredMemory(CachedMemory):
    """Restores segments and their blocks from a snapshot."""

    def restore(self, segments: list[SegmentView], begins: Mapping[int, int] | None = None) -> dict[int, int]:
        """Restore the segments of a snapshot; return the new handles by block address.

        Blocks in ``active_pending_free`` wait for the stream -1 until ``complete_free`` or ``complete_events``.

        Args:
            segments: all segments of the device.
            begins: start address of each expandable segment, by the address of its first mapped range; default: that
                address.
        """
        begins = begins or {}
        handles: dict[int, int] = {}
        tails: dict[tuple[int, bool], Block] = {}
        for segment in sorted(segments, key=lambda one: one.address):
            pool = self._small if segment.small else self._large
            before, space = None, None
            if segment.expandable:
                key = (segment.stream, segment.small)
                begin = begins.get(segment.address, segment.address)
                before = self._grow_space(tails.get(key), segment, pool) or self._unmapped(segment, begin, pool)
                space = before.expandable if before is not None else self._space(pool, begin)
            for view in segment.blocks:
                block = Block(pool, segment.stream, view.address, view.size_bytes, space)
                block.insert_after(before, before.next if before is not None else None)
                before = block
                if view.state == "inactive":
                    pool.add(block)
                else:
                    handles[view.address] = self._take_over(block, view)
            if space is not None and before is not None:
                tails[segment.stream, segment.small] = self._end_space(before, space)
            self.reserved += segment.size_bytes
            self.driver.adopt(segment.address, segment.size_bytes)
        self.reset_peaks()
        return handles

    def _take_over(self, block: Block, view: BlockView) -> int:
        self._last = handle = self._last + 1
        block.handle, block.requested = handle, view.requested_bytes
        self.active += block.size
        self.requested += block.requested
        if view.state == "active_pending_free":
            block.events = 1
            self._waiting.setdefault(-1, deque()).append(block)
        else:
            self.allocated += block.size
            self._live[handle] = block
        return handle

    def _grow_space(self, tail: Block | None, segment: SegmentView, pool: Pool) -> Block | None:
        """Return the unmapped block before a mapped range of the same expandable segment."""
        if tail is None or tail.expandable is None or segment.address >= tail.expandable.address + tail.expandable.size:
            return None
        pool.remove_unmapped(tail)
        tail.size = segment.address - tail.address
        if not tail.size:
            return tail.previous
        pool.add_unmapped(tail)
        return tail

    def _unmapped(self, segment: SegmentView, begin: int, pool: Pool) -> Block | None:
        """Add the unmapped block from the start of an expandable segment to its first mapped range."""
        if begin >= segment.address:
            return None
        block = Block(pool, segment.stream, begin, segment.address - begin, self._space(pool, begin))
        block.mapped = False
        pool.add_unmapped(block)
        return block

    def _end_space(self, last: Block, space: Expandable) -> Block:
        """Add the unmapped rest of an expandable segment after its last mapped block."""
        begin = last.address + last.size
        tail = Block(last.pool, last.stream, begin, space.address + space.size - begin, space)
        tail.mapped = False
        tail.insert_after(last, None)
        last.pool.add_unmapped(tail)
        return tail
