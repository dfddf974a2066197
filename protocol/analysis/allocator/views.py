"""Views of the allocator: its peaks, its segments, and why a request failed."""

import msgspec

from .blocks import Block


class DeviceOutOfMemory(Exception):  # noqa: N818  (the field's word)
    """A request that neither cached nor new memory could serve, with the figures of PyTorch's own message."""

    def __init__(self, sought: int, requested: int, allocated: int, reserved: int, free: int | None) -> None:
        super().__init__(f"{sought} bytes sought with {allocated} allocated and {reserved} reserved")
        self.sought_bytes = sought
        """Size of the requested segment: PyTorch's "Tried to allocate"."""
        self.requested_bytes = requested
        """Bytes of the request itself."""
        self.allocated_bytes = allocated
        self.reserved_bytes = reserved
        self.free_bytes = free
        """Free memory of the driver; None without a capacity."""


class Peaks(msgspec.Struct, frozen=True):
    """Highest values since the last reset, in bytes."""

    allocated_bytes: int
    active_bytes: int
    requested_bytes: int
    reserved_bytes: int


class BlockView(msgspec.Struct, frozen=True):
    """A block of a segment, as in a memory snapshot."""

    address: int
    size_bytes: int
    requested_bytes: int
    state: str
    """``active_allocated``, ``active_pending_free`` or ``inactive``."""
    handle: int
    """0 for a free block."""


class SegmentView(msgspec.Struct, frozen=True):
    """A segment, or a mapped range of an expandable one, as in a memory snapshot."""

    address: int
    size_bytes: int
    stream: int
    small: bool
    expandable: bool
    blocks: tuple[BlockView, ...]


def view_segment(blocks: list[Block]) -> SegmentView:
    """Return the view of a segment from its blocks, ordered by address."""
    first = blocks[0]
    return SegmentView(
        first.address,
        sum(block.size for block in blocks),
        first.stream,
        first.pool.small,
        first.expandable is not None,
        tuple(
            BlockView(
                block.address,
                block.size,
                block.requested,
                "inactive" if block.free else "active_pending_free" if block.events else "active_allocated",
                block.handle,
            )
            for block in blocks
        ),
    )
