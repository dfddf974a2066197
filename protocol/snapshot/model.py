"""A snapshot as compact columns: about 40 MB for a million trace entries, without an object for each.

Columns are bytes in this machine's order, read through ``memoryview.cast``, and sent unchanged by the reading process.
Addresses are unsigned 64-bit, sizes in bytes, times in microseconds since 1970, stacks are indices into ``stacks``.
"""

from typing import NamedTuple

import msgspec

ACTIONS = (
    "other", "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
    "segment_unmap", "oom", "snapshot", "user_defined",
)  # fmt: skip
"""Actions of trace entries; a column holds the index. Unknown actions are ``other``."""
ALLOC, FREE_REQUESTED, FREE_COMPLETED = 1, 2, 3
SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM = 4, 5, 6, 7, 8

STATES = ("inactive", "active_allocated", "active_pending_free")
"""States of a block: free, allocated, or freed by the program while a stream still uses it."""
FREE, ALLOCATED, PENDING = 0, 1, 2


OWN_SPAN = "ftmon "
"""Prefix of the names of steps and phases that ftmon's probe records as annotations."""


class Frame(NamedTuple):
    """One call of a stack."""

    name: str
    filename: str
    line: int


class Trace(msgspec.Struct, frozen=True):
    """Actions of one device's allocator, oldest first; all columns have the same length."""

    device: int
    actions: bytes
    """``B``: indices into ``ACTIONS``."""
    addresses: bytes
    """``Q``; 0 for ``oom``."""
    sizes: bytes
    """``q``: bytes *requested* for allocations, frees and ``oom``; the segment's size for segments."""
    streams: bytes
    """``q``"""
    times: bytes
    """``q``; 0 if the version of PyTorch records none."""
    stacks: bytes
    """``I``"""
    notes: bytes
    """``I``: index into ``Snapshot.notes`` of the entry's user metadata; 0: none."""
    device_free: dict[int, int] = {}
    """Free bytes on the device as the driver reports them, by index of the ``oom`` entry."""

    def __len__(self) -> int:
        return len(self.actions)


class Segment(msgspec.Struct, frozen=True):
    """Memory that the driver allocated in one piece; of an expandable segment, one mapped range."""

    device: int
    address: int
    size: int
    stream: int
    small: bool
    """It serves requests of up to 1 MiB."""
    expandable: bool
    pool: str
    """``""`` for the shared pool, else a private pool's identifier (CUDA graphs, ``MemPool``)."""
    stack: int
    first_block: int
    blocks: int


class Annotation(msgspec.Struct, frozen=True):
    """A named span that was recorded with the trace."""

    device: int
    name: str
    begin_us: int
    end_us: int


class StackColumns(msgspec.Struct, frozen=True):
    """The stacks of a snapshot, the slowest part to read."""

    frames: list[Frame]
    stacks: list[list[int]]
    """Indices of the frames of each stack, innermost first; stack 0 is empty."""
    traces: list[bytes]
    """``I``, for each trace."""
    blocks: bytes
    """``I``"""
    segments: list[int]


class Snapshot(msgspec.Struct, frozen=True):
    """One snapshot: the allocator's final state, and the recorded actions before it.

    While it is being read it may lack its stacks: ``stacks`` and the columns of indices into it are empty then.
    """

    path: str
    segments: list[Segment]
    block_addresses: bytes
    """``Q``, the blocks of all segments in order."""
    block_sizes: bytes
    """``q``: size of the block, rounding included."""
    block_requested: bytes
    """``q``: size that the program requested; 0 for a free block."""
    block_states: bytes
    """``B``: indices into ``STATES``."""
    block_stacks: bytes
    """``I``"""
    traces: list[Trace]
    frames: list[Frame]
    stacks: list[list[int]]
    """Indices of the frames of each stack, innermost first; stack 0 is empty."""
    notes: list[str]
    annotations: list[Annotation] = []
    divisions: list[int] = []
    """``roundup_power2_divisions`` for requests of 1, 2, 4 ... MiB; empty or below 2: none."""
    max_split_size: int = -1
    """Blocks of at least this size were not split, bytes; -1: no limit."""

    def with_stacks(self, found: StackColumns) -> "Snapshot":
        """Return the snapshot with its stacks."""
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
        """Return the devices with segments or trace entries; device 0 if there are none."""
        found = {segment.device for segment in self.segments} | {trace.device for trace in self.traces if len(trace)}
        return sorted(found) or [0]

    def trace(self, device: int) -> Trace | None:
        """Return a device's trace, or None."""
        return next((trace for trace in self.traces if trace.device == device), None)

    def frames_of(self, stack: int) -> list[Frame]:
        """Return a stack's frames, innermost first."""
        return [self.frames[index] for index in self.stacks[stack]]
