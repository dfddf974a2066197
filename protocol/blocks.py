"""Parts of messages about blocks of memory: who allocated them, and the segments they lie in. Bytes are bytes."""

import msgspec


class StackGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """Blocks with the same allocating stack."""

    bytes: int
    count: int
    frames: list[str]
    """``file:line function``, innermost last."""
    largest_bytes: int = 0
    kept_bytes: int = 0
    """Of ``bytes``, what outlived the phase: growth, and no part of what came and went."""


class SegmentUse(msgspec.Struct, frozen=True, array_like=True):
    """How one segment of the CUDA caching allocator is used. Encoded as an array: there are hundreds."""

    size_bytes: int
    allocated_bytes: int
    largest_free_bytes: int
    free_blocks: int
    flags: str = ""
    """``s``: serves requests up to 1 MiB only; ``e``: expandable; ``p``: of a private pool; empty: neither."""
