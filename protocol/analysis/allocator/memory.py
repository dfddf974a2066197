"""State of a device's allocator: pools of free blocks, reserved memory, and its limits."""

from collections import deque

from .blocks import Block, Pool
from .driver import Driver
from .settings import Settings
from .views import Peaks

UNLIMITED = 2**62


class DeviceMemory:
    """State shared by all parts of the allocator; see ``CachingAllocator`` for the arguments."""

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
        self.allocated = 0
        """Bytes of the blocks held by the program."""
        self.active = 0
        """``allocated`` plus freed blocks that still wait for another stream."""
        self.requested = 0
        """Requested bytes of the active blocks."""
        self.reserved = 0
        """Bytes of all segments."""
        self.retries = 0
        """Requests for which all cached memory was released (``num_alloc_retries``)."""
        self._peak_allocated = self._peak_active = self._peak_requested = self._peak_reserved = 0
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
        """Limit reserved memory to a share of the device's memory.

        Raises:
            ValueError: the device's memory is unknown.
        """
        if self.device_bytes is None:
            raise ValueError("set_per_process_memory_fraction needs the device's memory: give device_bytes")
        self.limit_reserved(int(fraction * self.device_bytes))

    def limit_reserved(self, allowed_bytes: int) -> None:
        """Limit reserved memory to a number of bytes, like ``set_per_process_memory_fraction``."""
        self._allowed = allowed_bytes

    def peaks(self) -> Peaks:
        """Return the highest values since the last reset."""
        return Peaks(self._peak_allocated, self._peak_active, self._peak_requested, self._peak_reserved)

    def reset_peaks(self) -> None:
        """Reset the peaks to the current values (``reset_peak_memory_stats``)."""
        self._peak_allocated, self._peak_active = self.allocated, self.active
        self._peak_requested, self._peak_reserved = self.requested, self.reserved

    def _free_bytes(self) -> int | None:
        """Return the bytes that could still be reserved; None: unlimited."""
        limits = [self.driver.free_bytes] + ([] if self._allowed is None else [self._allowed - self.reserved])
        known = [limit for limit in limits if limit is not None]
        return min(known) if known else None

    def _reserve(self, size: int) -> None:
        self.reserved += size
        if self.reserved > self._peak_reserved:
            self._peak_reserved = self.reserved

    def _merge(self, block: Block, other: Block | None) -> None:
        """Merge a block with a neighbour if that is free."""
        if other is None or not other.free or other.mapped != block.mapped:
            return
        if other.mapped:
            other.pool.remove(other)
        else:
            other.pool.remove_unmapped(other)
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
