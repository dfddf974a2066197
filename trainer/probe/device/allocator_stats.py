"""Reads the statistics of PyTorch's CUDA caching allocator at their address in memory.

``torch._C._cuda_memoryStats`` builds a dictionary of some 40 others: 15 us in a tight loop on the host of an H100, 48
at a phase boundary, where every cache is cold. Copying the kilobyte behind it and beginning new peaks takes 9 us there.
That kilobyte is ``DeviceStats`` of ``c10/core/CachingDeviceAllocator.h``. It is found once, by its contents: the
exported pointer ``c10::cuda::CUDACachingAllocator::allocator`` leads to the allocator, its vector of pointers leads to
the device's part, and that must contain exactly the numbers that PyTorch has just returned. PyTorch 2.11 keeps them in
one piece, 2.13 has a table between two of them. With another layout or allocator (``cudaMallocAsync``) the search finds
nothing, and the caller keeps using the dictionary.

The search reads memory through ``/proc/self/mem``, which refuses an address that is not mapped. Nothing is written.
"""

import ctypes
import os
import struct
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

Stats = dict[str, Any]
Place = tuple[str, str, str]
"""A figure of the nested statistics: group, pool, figure; empty where the dictionary has no such level."""

_POOLS = ("all", "small_pool", "large_pool")
_FIGURES = ("current", "peak", "allocated", "freed")
_COUNTS = ("num_alloc_retries", "num_ooms")
_OVERSIZE = ("oversize_allocations", "oversize_segments")
_CALLS = ("num_sync_all_streams", "num_device_alloc", "num_device_free")


def _arrays(*groups: str) -> tuple[Place, ...]:
    return tuple((group, pool, figure) for group in groups for pool in _POOLS for figure in _FIGURES)


_PIECES: tuple[tuple[Place, ...], ...] = (
    _arrays("allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes"),
    _arrays("active_bytes", "inactive_split_bytes", "requested_bytes"),
    (
        *((name, "", "") for name in _COUNTS),
        *((name, "", figure) for name in _OVERSIZE for figure in _FIGURES),
        *((name, "", "") for name in _CALLS),
    ),
)
"""Fields that are adjacent in every known version, as 64-bit integers in this order."""
_GAP_BYTES = 128
"""Largest gap between two pieces."""
_POINTER = struct.Struct("P")
_WORD = _POINTER.size

_LIBRARY, _ALLOCATOR = "libc10_cuda.so", "_ZN3c104cuda20CUDACachingAllocator9allocatorE"
_ALLOCATOR_BYTES = 2**15
"""Bytes of the allocator searched for its vector: 67 mutexes and 67 tables, 8 KiB, come before it."""
_DEVICE_BYTES = 2**14
_PAGE = 4096


class Layout(NamedTuple):
    """Where a device's statistics are, and which 64-bit integer from there on is which figure."""

    address: int
    words: int
    places: dict[Place, int]

    def reader(self) -> Callable[[], bytes]:
        """Return a function that copies the integers: a sample."""
        block = (ctypes.c_char * (self.words * 8)).from_address(self.address)
        return memoryview(block).tobytes

    def picker(self, places: Sequence[Place]) -> Callable[[bytes], tuple[int, ...]]:
        """Return a function that returns the figures at some places (two or more) of a sample."""
        unpack = struct.Struct(f"{self.words}q").unpack
        pick = itemgetter(*(self.places[place] for place in places))
        return lambda sample: pick(unpack(sample))


def locate(stats: Stats, device: int, devices: int) -> Layout | None:
    """Return the address of a device's statistics; None if it is not found.

    Call it on the training thread, between its allocations.
    """
    try:
        library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        allocator = ctypes.c_void_p.in_dll(library, _ALLOCATOR).value
    except (OSError, ValueError, AttributeError):
        return None
    return search(allocator, stats, device, devices) if allocator else None


def search(allocator: int, stats: Stats, device: int, devices: int) -> Layout | None:
    """Return the layout of a device's statistics, reached from its allocator; None if it is not found."""
    try:
        if not stats["allocation"]["all"]["allocated"]:
            return None  # zeros alone match any unused memory
        pieces = [struct.pack(f"{len(piece)}q", *(value_of(stats, place) for place in piece)) for piece in _PIECES]
        memory = os.open("/proc/self/mem", os.O_RDONLY)
    except (KeyError, TypeError, struct.error, OSError):
        return None
    try:
        for part in _device_parts(memory, allocator, device, devices):
            offsets = _offsets(_read(memory, part, _DEVICE_BYTES), pieces)
            layout = _layout(part, offsets) if offsets else None
            if layout is not None and layout.places.keys() >= set(peaks_in(stats)):
                return layout
    finally:
        os.close(memory)
    return None


def value_of(stats: Stats, place: Place) -> int:
    """Return one figure of PyTorch's nested statistics."""
    group, pool, figure = place
    value = stats[group]
    if pool:
        value = value[pool]
    return value[figure] if figure else value


def peaks_in(stats: Stats) -> list[Place]:
    """List the places of the peaks in PyTorch's nested statistics."""
    places: list[Place] = []
    for name, group in stats.items():
        if isinstance(group, dict):
            places += [(name, pool, "peak") for pool in ([""] if "peak" in group else group)]
    return places


def _device_parts(memory: int, allocator: int, device: int, devices: int) -> list[int]:
    """List a device's address in each vector with one pointer per device (begin, end, end of its memory)."""
    words = _read(memory, allocator, _ALLOCATOR_BYTES)
    count = len(words) // _WORD
    pointers = struct.unpack(f"{count}P", words[: count * _WORD])
    parts: list[int] = []
    for begin, end, limit in zip(pointers, pointers[1:], pointers[2:], strict=False):
        if begin and begin % _WORD == 0 and end - begin == devices * _WORD and limit >= end:
            entry = _read(memory, begin + device * _WORD, _WORD)
            if len(entry) == _WORD:
                parts.append(_POINTER.unpack(entry)[0])
    return parts


def _offsets(part: bytes, pieces: list[bytes]) -> list[int]:
    """Return the offsets of the pieces, in order; empty if they are not found."""
    offsets: list[int] = []
    start, end = 0, len(part)
    for piece in pieces:
        offset = part.find(piece, start, end)
        if offset < 0 or offset % 8:
            return []
        offsets.append(offset)
        start = offset + len(piece)
        end = start + _GAP_BYTES + max(map(len, pieces))
    return offsets


def _layout(part: int, offsets: list[int]) -> Layout:
    first = offsets[0]
    places = {
        place: (offset - first) // 8 + number
        for piece, offset in zip(_PIECES, offsets, strict=True)
        for number, place in enumerate(piece)
    }
    return Layout(part + first, max(places.values()) + 1, places)


def _read(memory: int, address: int, size: int) -> bytes:
    """Return up to ``size`` bytes from an address: as many as are mapped."""
    found = b""
    while len(found) < size:
        place = address + len(found)
        try:
            piece = os.pread(memory, min(size - len(found), _PAGE - place % _PAGE), place)
        except (OSError, OverflowError):
            break
        if not piece:
            break
        found += piece
    return found
