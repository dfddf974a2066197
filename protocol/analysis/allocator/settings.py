"""Settings of PyTorch's caching allocator, from PYTORCH_CUDA_ALLOC_CONF, and its sizes of blocks and segments.

A trace has requested sizes and the segments have block sizes. The size of a block that is gone by the end is therefore
derived from the rules of c10/cuda/CUDACachingAllocator.cpp and, in the pool of large blocks, from the free room after
its address.
"""

import re
from array import array
from collections.abc import Sequence

import msgspec

MIB = 2**20
SMALLEST = 512  # sizes are multiples of this (kMinBlockSize)
SMALL_MOST_BYTES = MIB  # largest request of the small pool; a remainder up to it is not split off (kSmallSize)
SMALL_SEGMENT_BYTES = 2 * MIB  # size of a small pool's segment, and of a page of its expandable segment (kSmallBuffer)
LARGE_SEGMENT_BYTES = 20 * MIB
"""Size of a segment for large requests below 10 MiB, and of a page of the large expandable segment (kLargeBuffer)."""
OWN_SEGMENT_BYTES = 10 * MIB  # requests of at least this size get a segment of their own size (kMinLargeAlloc) ...
ROUND_LARGE_BYTES = 2 * MIB  # ... rounded up to this (kRoundLarge)
INTERVALS = 16  # number of powers of two, from 1 MiB on, for which `roundup_power2_divisions` has values

_IGNORED = (
    "backend", "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register", "pinned_num_register_threads", "pinned_use_background_threads",
    "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb", "pinned_reserve_segment_size_mb",
    "pinned_free_catch_all", "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom",
    "expandable_segments_handle_type",
)  # fmt: skip
"""Options that do not change which device memory is reserved."""


def round_size(requested: int, divisions: Sequence[int] = ()) -> int:
    """Return the rounded size of a request, like ``DeviceCachingAllocator::round_size``, in bytes.

    ``divisions`` are ``roundup_power2_divisions`` by power of two from 1 MiB on.
    """
    if requested < SMALLEST:
        return SMALLEST
    if divisions:
        index = min(len(divisions) - 1, max(0, (requested // MIB).bit_length() - 1))
        parts = divisions[index]
        if parts > 1 and requested > SMALLEST * parts:
            # At least 512 bytes, so never 0: the next multiple of a power of two's part.
            step = 1 << (requested.bit_length() - parts.bit_length())
            return -(-requested // step) * step
    return -(-requested // SMALLEST) * SMALLEST


def round_sizes(requested: Sequence[int], divisions: Sequence[int] = ()) -> "array[int]":
    """Return the rounded sizes of many requests; without divisions (PyTorch's default) no call per request is made."""
    if any(part > 1 for part in divisions):
        return array("q", [round_size(size, divisions) for size in requested])
    return array("q", [-(-size // SMALLEST) * SMALLEST or SMALLEST for size in requested])


def block_size(rounded: int, room: int, max_split_size: int) -> int:
    """Return a large block's size: the whole free room if the allocator would not split it (``should_split``).

    ``room`` are the free bytes from the block's address on, in a segment that is not expandable.
    """
    unsplit = room - rounded <= SMALL_MOST_BYTES or 0 <= max_split_size <= rounded
    return room if unsplit and room >= rounded else rounded


class Settings(msgspec.Struct, frozen=True):
    """Settings that determine the allocator's segments, with PyTorch's defaults.

    Source: c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h of PyTorch 2.6 to 2.13.
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None  # blocks of at least this size are not split; None: all are split
    garbage_collection_threshold: float = 0.0
    """Share of the allowed memory above which old free segments are released; 0: never. It has an effect only if
    ``set_per_process_memory_fraction`` limits the allowed memory."""
    roundup_power2_divisions: tuple[int, ...] = ()
    """Divisions for requests of 1, 2, 4 ... MiB and more; empty: requests are rounded to 512 bytes only."""
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    """Maximum excess of a block that may not be split over the request that it serves."""
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    per_process_memory_fraction: float = 1.0
    """``set_per_process_memory_fraction`` set by configuration; 1: no limit other than the device's."""

    @classmethod
    def parse(cls, text: str) -> "Settings":
        """Return the settings of a value of ``PYTORCH_CUDA_ALLOC_CONF``.

        Raises ``ValueError`` if PyTorch would refuse the text: one line with the option and its valid values.
        """
        found: dict[str, object] = {}
        for key, value in _options(text):
            if key in _READERS:
                field, read = _READERS[key]
                found[field] = read(key, value)
            elif key == "backend" and value != "native":
                raise ValueError(f"PYTORCH_CUDA_ALLOC_CONF: backend:{value} is not the allocator modelled; use native")
            elif key not in _IGNORED:
                raise ValueError(f"PYTORCH_CUDA_ALLOC_CONF: {key} is not an option of PyTorch's allocator")
        return cls(**found)  # type: ignore[arg-type]

    def rounded(self, size_bytes: int) -> int:
        """Return the size of the block that a request needs, bytes (``round_size``)."""
        return round_size(size_bytes, self.roundup_power2_divisions)

    def segment_size(self, rounded_bytes: int) -> int:
        """Return the size of a new segment for a rounded request, bytes (``get_allocation_size``)."""
        if rounded_bytes <= SMALL_MOST_BYTES:
            return SMALL_SEGMENT_BYTES
        if rounded_bytes < OWN_SEGMENT_BYTES:
            return self.large_segment_bytes
        return -(-rounded_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


def _options(text: str) -> list[tuple[str, str]]:
    """Split ``key:value,key:[a:b,c:d]`` at the commas outside brackets; white space is ignored."""
    found: list[tuple[str, str]] = []
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[\]])+", re.sub(r"\s", "", text)):
        key, _, value = part.partition(":")
        if not value:
            raise ValueError(f"PYTORCH_CUDA_ALLOC_CONF: {part} must be OPTION:VALUE")
        found.append((key, value))
    return found


def _refused(key: str, must: str, value: str) -> ValueError:
    return ValueError(f"PYTORCH_CUDA_ALLOC_CONF: {key} must be {must}, not {value}")


def _truth(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise _refused(key, "True or False", value)
    return value == "True"


def _number(key: str, value: str) -> int:
    if not value.isdigit():
        raise _refused(key, "a whole number", value)
    return int(value)


def _above_segment(key: str, value: str) -> int:
    if _number(key, value) * MIB < LARGE_SEGMENT_BYTES:
        raise _refused(key, "20 or more", value)
    return int(value) * MIB


def _large_segment(key: str, value: str) -> int:
    if _number(key, value) * MIB <= SMALL_SEGMENT_BYTES:
        raise _refused(key, "more than 2", value)
    return int(value) * MIB


def _share(key: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1 or (share == 1 and key == "garbage_collection_threshold"):
        raise _refused(key, "above 0 and below 1", value)
    return share


def _divisions(key: str, value: str) -> tuple[int, ...]:
    """Parse one number for all sizes, or ``[256:1,512:2,>:4]``: sizes in MiB with the divisions from there on."""
    if not value.startswith("["):
        return (_power(key, value),) * INTERVALS
    found, last, first = [0] * INTERVALS, 0, True
    for part in value.strip("[]").split(","):
        boundary, _, number = part.partition(":")
        divisions = 0 if number == "0" else _power(key, number)
        if boundary == ">":
            found[last + 1 :] = [divisions] * (INTERVALS - last - 1)
            continue
        last = min(_power(key, boundary).bit_length() - 1, INTERVALS - 1)
        found[0 if first else last : last + 1] = [divisions] * (last + 1 if first else 1)
        first = False
    return tuple(found)


def _power(key: str, value: str) -> int:
    number = _number(key, value)
    if number < 1 or number & (number - 1):
        raise _refused(key, "powers of two", value)
    return number


_READERS = {
    "expandable_segments": ("expandable_segments", _truth),
    "max_split_size_mb": ("max_split_size_bytes", _above_segment),
    "garbage_collection_threshold": ("garbage_collection_threshold", _share),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _above_segment),
    "large_segment_size_mb": ("large_segment_bytes", _large_segment),
    "per_process_memory_fraction": ("per_process_memory_fraction", _share),
}
