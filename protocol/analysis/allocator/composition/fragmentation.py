"""Unused memory of the allocator at the time of one reading."""

from typing import NamedTuple

from ....snapshot.model import ALLOCATED, FREE, Snapshot
from ..snapshot.allocations import columns


class Fragmentation(NamedTuple):
    """Bytes of one device's allocator."""

    allocated: int
    reserved: int
    free: int
    """Free bytes in reserved memory: reserved minus allocated and pending."""
    largest_free: int
    rounding: int
    """Bytes of allocated blocks beyond the requested size."""
    pending: int
    """Bytes freed by the program that a stream still uses."""
    segments: int


def fragmentation(snapshot: Snapshot) -> Fragmentation:
    """Return the sums over the blocks of a reading."""
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
