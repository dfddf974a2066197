"""A model of the CUDA driver for the allocator: limited memory, and addresses."""

from bisect import bisect_left, insort

MIB = 2**20
CHUNK_BYTES = 32 * MIB
"""``cudaMalloc`` reserves addresses in multiples of this: observed with CUDA 13 on an H200, as are the rules below."""
_TOP = 0x7FD2_68000000


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
        self._chunk_of: dict[int, tuple[int, int]] = {}
        """By a segment's address: start and end of its chunk."""
        self._holes: list[tuple[int, int, int, int]] = []
        """Size, address, and start and end of the chunk."""

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
