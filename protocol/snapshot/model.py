"""A snapshot as compact columns: a million trace entries in some 40 MB, without an object for each.

Columns are bytes in this machine's order, read through ``memoryview.cast``; they cross from the reading process as
they are. Addresses are unsigned 64-bit, sizes bytes, times microseconds since 1970, stacks indices into ``stacks``.
"""

from typing import NamedTuple

import msgspec

ACTIONS = (
    "other", "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
    "segment_unmap", "oom", "snapshot", "user_defined",
)  # fmt: skip
"""Actions of trace entries; a column holds the index. Anything newer than this list is ``other``."""
ALLOC, FREE_REQUESTED, FREE_COMPLETED = 1, 2, 3
SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM = 4, 5, 6, 7, 8

STATES = ("inactive", "active_allocated", "active_pending_free")
"""A block is free, allocated, or freed by the program and waiting for a stream that still uses it."""
FREE, ALLOCATED, PENDING = 0, 1, 2


OWN_SPAN = "ftmon "
"""How the names of the steps and phases begin that ftmon's probe writes beside the trace."""


class Frame(NamedTuple):
    """One call of a stack."""

    name: str
    filename: str
    line: int


class Trace(msgspec.Struct, frozen=True):
    """What one device's allocator did, oldest first; as many values in every column."""

    device: int
    actions: bytes
    """``B``: indices into ``ACTIONS``."""
    addresses: bytes
    """``Q``; 0 for ``oom``."""
    sizes: bytes
    """``q``: the bytes *requested* for allocations and frees, the segment's for segments, for ``oom`` those sought."""
    streams: bytes
    """``q``"""
    times: bytes
    """``q``; 0 where the version of PyTorch recorded none."""
    stacks: bytes
    """``I``"""
    notes: bytes
    """``I``: index into ``Snapshot.notes`` of the entry's user metadata; 0 is none."""
    device_free: dict[int, int] = {}
    """Free bytes on the device by the driver, for each ``oom`` entry by its index."""

    def __len__(self) -> int:
        return len(self.actions)


class Segment(msgspec.Struct, frozen=True):
    """Memory got from the driver in one piece; of an expandable segment, one mapped range."""

    device: int
    address: int
    size: int
    stream: int
    small: bool
    """It serves requests of up to 1 MiB."""
    expandable: bool
    pool: str
    """``""`` for the pool that all share, else a private pool's identifier (CUDA graphs, ``MemPool``)."""
    stack: int
    first_block: int
    blocks: int


class Annotation(msgspec.Struct, frozen=True):
    """A named span that was recorded beside the trace."""

    device: int
    name: str
    begin_us: int
    end_us: int


class StackColumns(msgspec.Struct, frozen=True):
    """The stacks of a snapshot: its slowest part to read."""

    frames: list[Frame]
    stacks: list[list[int]]
    """Each the indices of its frames, innermost first; 0 is the empty stack."""
    traces: list[bytes]
    """``I``, for each trace."""
    blocks: bytes
    """``I``"""
    segments: list[int]


class Snapshot(msgspec.Struct, frozen=True):
    """One snapshot: the allocator as it stood at the end, and what led there as far as it was recorded.

    While it is being read it may be without its stacks: ``stacks`` is empty then, as are the columns of indices to it.
    """

    path: str
    segments: list[Segment]
    block_addresses: bytes
    """``Q``, of all segments one after the other."""
    block_sizes: bytes
    """``q``: size of the block, rounding included."""
    block_requested: bytes
    """``q``: what the program asked for; 0 of a free block."""
    block_states: bytes
    """``B``: indices into ``STATES``."""
    block_stacks: bytes
    """``I``"""
    traces: list[Trace]
    frames: list[Frame]
    stacks: list[list[int]]
    """Each the indices of its frames, innermost first; 0 is the empty stack."""
    notes: list[str]
    annotations: list[Annotation] = []
    divisions: list[int] = []
    """``roundup_power2_divisions`` for requests of 1, 2, 4 ... MiB; empty or below 2: none."""
    max_split_size: int = -1
    """Blocks of this size and more were not split, bytes; -1: no limit."""

    def with_stacks(self, found: StackColumns) -> "Snapshot":
        """Return the whole snapshot."""
        replace = msgspec.structs.replace
        return replace(
            self,
            segments=[replace(one, stack=stack) for one, stack in zip(self.segments, found.segments, strict=True)],
            traces=[replace(one, stacks=stacks) for one, stacks in zip(self.traces, found.traces, strict=True)],
            block_stacks=found.blocks,
            frames=found.frames,
            stacks=found.stacks,
        )

    def devices(self) -> list[int]:
        """List the devices that have segments or trace entries; device 0 where there is nothing at all."""
        found = {segment.device for segment in self.segments} | {trace.device for trace in self.traces if len(trace)}
        return sorted(found) or [0]

    def trace(self, device: int) -> Trace | None:
        """Return a device's trace, if it has one."""
        return next((trace for trace in self.traces if trace.device == device), None)

    def frames_of(self, stack: int) -> list[Frame]:
        """Return a stack's frames, innermost first."""
        return [self.frames[index] for index in self.stacks[stack]]
