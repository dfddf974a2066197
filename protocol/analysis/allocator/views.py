"""Views of the allocator: its peaks, its segments, and why a request failed."""

import msgspec

from .blocks import Block


class DeviceOutOfMemory(Exception):  # noqa: N818  (the field's word)
    """A request that neither cached nor new memory could serve; the figures are those of PyTorch's own message."""

    def __init__(self, sought: int, requested: int, allocated: int, reserved: int, free: int | None) -> None:
        super().__init__(f"{sought} bytes sought with {allocated} allocated and {reserved} reserved")
        self.sought_bytes = sought
        """Size of the segment that was sought: PyTorch's "Tried to allocate"."""
        self.requested_bytes = requested
        """Bytes of the request itself."""
        self.allocated_bytes = allocated
        self.reserved_bytes = reserved
        self.free_bytes = free
        """What the driver had left, or None where no capacity was given."""


class Peaks(msgspec.Struct, frozen=True):
    """Highest values since the last reset, in bytes."""

    allocated_bytes: int
    active_bytes: int
    requested_bytes: int
    reserved_bytes: int


class BlockView(msgspec.Struct, frozen=True):
    """A block of a segment, as a memory snapshot lists it."""

    address: int
    size_bytes: int
    requested_bytes: int
    state: str
    """``active_allocated``, ``active_pending_free`` or ``inactive``."""
    handle: int
    """0 of a free block."""


class SegmentView(msgspec.Struct, frozen=True):
    """A segment, or of an expandable one a mapped range, as a memory snapshot lists it."""

    address: int
    size_bytes: int
    stream: int
    small: bool
    expandable: bool
    blocks: tuple[BlockView, ...]


def view_segment(blocks: list[Block]) -> SegmentView:
    """Return the view of a segment's blocks, which are given in the order of their addresses."""
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
