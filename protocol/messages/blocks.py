"""Parts of messages about blocks of memory: who allocated them, and the segments they lie in. Bytes are bytes."""

from typing import Literal

import msgspec

from .bounds import Whole

MemoryMeasure = Literal["cuda", "glibc"]
"""Whose figures ``allocated`` and ``reserved`` are: PyTorch's CUDA allocator's, or glibc's own (mallinfo2)."""


class StackGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """Blocks with the same allocating stack."""

    bytes: Whole
    count: Whole
    frames: list[str]
    """``file:line function``, innermost last."""
    largest_bytes: Whole = 0
    kept_bytes: Whole = 0
    """Of ``bytes``, what outlived the phase: growth, and no part of what came and went."""


class SegmentUse(msgspec.Struct, frozen=True, array_like=True):
    """How one segment of the CUDA caching allocator is used. Encoded as an array: there are hundreds."""

    size_bytes: Whole
    allocated_bytes: Whole
    largest_free_bytes: Whole
    free_blocks: Whole
    flags: str = ""
    """``s``: serves requests up to 1 MiB only; ``e``: expandable; ``p``: of a private pool; empty: neither."""
