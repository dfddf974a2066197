"""Expandable segments: ranges of addresses onto which pages are mapped as a pool grows."""

from .blocks import Block, Expandable, Pool
from .memory import DeviceMemory
from .settings import SMALL_SEGMENT_BYTES

_ADDRESS_SPACE_BYTES = 2**42
"""Address space of an expandable segment if the device's memory is unknown."""


class ExpandableMemory(DeviceMemory):
    """Maps and unmaps pages."""

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
            first = block
            if block.previous is not None and block.previous.free:
                first = block.previous
            room, one = 0, first
            while one is not None and one.free and room < rounded:
                room += one.size
                one = one.next
            if room >= rounded:
                return first
        space = self._space(pool)
        block = Block(pool, stream, space.address, space.size, space)
        block.mapped = False
        pool.add_unmapped(block)
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
        block.pool.remove_unmapped(block)
        block.mapped = True
        if mapped < block.size:
            rest = Block(block.pool, block.stream, block.address + mapped, block.size - mapped, space)
            rest.mapped = False
            rest.insert_after(block, block.next)
            block.pool.add_unmapped(rest)
            block.size = mapped
        self._merge(block, block.previous)
        self._merge(block, block.next)
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
        self._merge(block, block.previous)
        self._merge(block, block.next)
        pool.add_unmapped(block)
        self.reserved -= end - begin
        self.driver.give(end - begin)
