"""Size of the block for a request: the rules of PyTorch's caching allocator, from c10/cuda/CUDACachingAllocator.cpp.

The trace has requested sizes and the segments have block sizes. The size of a block that is gone by the end is
therefore derived from these rules and, in the pool of large blocks, from the free room after its address.
"""

from array import array
from collections.abc import Sequence

SMALLEST = 512
"""Sizes are multiples of this (kMinBlockSize)."""
SMALL_MOST = 2**20
"""Requests up to this use segments of small blocks, and a remainder up to it is not split off (kSmallSize)."""
_FIRST_DIVISION = 2**20


def round_size(requested: int, divisions: Sequence[int] = ()) -> int:
    """Return the rounded size of a request, like ``DeviceCachingAllocator::round_size``, in bytes.

    Args:
        divisions: ``roundup_power2_divisions`` by power of two from 1 MiB on.
    """
    if requested < SMALLEST:
        return SMALLEST
    if divisions:
        index = min(len(divisions) - 1, max(0, (requested // _FIRST_DIVISION).bit_length() - 1))
        parts = divisions[index]
        if parts > 1 and requested > SMALLEST * parts:
            return _next_division(requested, parts)
    return -(-requested // SMALLEST) * SMALLEST


def round_sizes(requested: Sequence[int], divisions: Sequence[int] = ()) -> "array[int]":
    """Return the rounded sizes of many requests; without divisions (PyTorch's default) no call per request is made."""
    if any(part > 1 for part in divisions):
        return array("q", [round_size(size, divisions) for size in requested])
    return array("q", [-(-size // SMALLEST) * SMALLEST or SMALLEST for size in requested])


def _next_division(size: int, parts: int) -> int:
    floor = 1 << (size.bit_length() - 1)
    if size == floor:
        return size
    step = floor >> (parts.bit_length() - 1)
    if step == 0:
        return floor * 2
    return -(-size // step) * step


def block_size(rounded: int, room: int, max_split_size: int) -> int:
    """Return a large block's size: the whole free room if the allocator would not split it (``should_split``).

    Args:
        room: free bytes from the block's address on, in a segment that is not expandable.
    """
    unsplit = room - rounded <= SMALL_MOST or 0 <= max_split_size <= rounded
    return room if unsplit and room >= rounded else rounded
