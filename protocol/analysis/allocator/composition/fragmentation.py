"""Unused memory of the allocator, at the moment of one read."""

from typing import NamedTuple

from ....snapshot.model import ALLOCATED, FREE, Snapshot
from ..snapshot.allocations import columns


class Fragmentation(NamedTuple):
    """Bytes of one device's allocator."""

    allocated: int
    reserved: int
    free: int
    """Free bytes in reserved memory: reserved less what is allocated or waits to be free."""
    largest_free: int
    rounding: int
    """Of allocated blocks, what the program did not ask for."""
    pending: int
    """Freed by the program, and waiting for a stream that still uses it."""
    segments: int


def fragmentation(snapshot: Snapshot) -> Fragmentation:
    """Add up the blocks of a read."""
    states = snapshot.block_states
    sizes, asked = columns(snapshot.block_sizes, "q"), columns(snapshot.block_requested, "q")
    allocated = free = largest = rounding = pending = 0
    for state, size, requested in zip(states, sizes, asked, strict=True):
        if state == ALLOCATED:
            allocated += size
            rounding += size - requested
        elif state == FREE:
            free += size
            largest = max(largest, size)
        else:
            pending += size
    reserved = sum(segment.size for segment in snapshot.segments)
    return Fragmentation(allocated, reserved, free, largest, rounding, pending, len(snapshot.segments))
