"""Parts of messages about blocks of memory: the stacks that allocated them, and the segments that contain them."""

from typing import Literal

import msgspec

from .bounds import Whole

MemoryMeasure = Literal["cuda", "glibc"]
"""Source of ``allocated`` and ``reserved``: PyTorch's CUDA allocator, or glibc (mallinfo2)."""


class StackGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """Blocks with the same allocating stack."""

    bytes: Whole
    count: Whole
    frames: list[str]
    """``file:line function``, innermost last."""
    largest_bytes: Whole = 0
    kept_bytes: Whole = 0
    """The part of ``bytes`` that outlived the phase: growth, not transient."""


class SegmentUse(msgspec.Struct, frozen=True, array_like=True):
    """Use of one segment of the CUDA caching allocator. Encoded as an array, because there are hundreds."""

    size_bytes: Whole
    allocated_bytes: Whole
    largest_free_bytes: Whole
    free_blocks: Whole
    flags: str = ""
    """``s``: serves requests up to 1 MiB only; ``e``: expandable; ``p``: in a private pool; empty: none of these."""
