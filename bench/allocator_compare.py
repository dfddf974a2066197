"""Compares the model with a recorded trace: replays a snapshot's requests in the model and compares the segments.

A trace has the program's requests (``alloc``, ``free_requested``), the times at which blocks became free
(``free_completed``) and the allocator's changes of segments. The model receives the first two and must reproduce the
third.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping

import msgspec
from ftmon.protocol.analysis.allocator.model import (
    CHUNK_BYTES,
    Block,
    CachingAllocator,
    DeviceOutOfMemory,
    Driver,
    Expandable,
    Pool,
)
from ftmon.protocol.analysis.allocator.settings import LARGE_SEGMENT_BYTES, SMALL_MOST_BYTES, Settings
from ftmon.protocol.analysis.allocator.snapshot_replay import Range, Replay
from ftmon.protocol.snapshot.columns import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Snapshot,
)

_TAKES = (SEGMENT_ALLOC, SEGMENT_MAP)
_GIVES = (SEGMENT_FREE, SEGMENT_UNMAP)
_OTHER_STREAM = -2
"""Stream passed to ``record_stream`` for a deferred free; the trace does not name the stream that used the block."""


class Comparison(msgspec.Struct, frozen=True):
    """Differences between a recorded trace and the model's."""

    entries: int
    requests: int
    same_address: int
    """Requests that the model served at the recorded address."""
    recorded_changes: int
    """Number of segments allocated, released, mapped and unmapped."""
    first_difference: int | None
    """Index of the first of these changes that differs in the model (by kind or size); None: all are equal."""
    same_segments: bool
    """Whether the segments at the end have the same sizes, streams and pools."""
    same_blocks: bool
    """Whether they also have the same blocks at the same addresses."""
    recorded_reserved_peak_bytes: int
    modelled_reserved_peak_bytes: int
    largest_reserved_error: float
    """Largest error of the model's reserved bytes at any entry, as a share."""
    ooms: int
    modelled_ooms: int


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


class RestoredAllocator(CachingAllocator):
    """The model with views of its segments; it can start from the segments and blocks of a snapshot."""

    def limit_reserved(self, allowed_bytes: int) -> None:
        """Limit reserved memory to a number of bytes, like ``set_per_process_memory_fraction``."""
        self._allowed = allowed_bytes

    def complete_free(self, handle: int) -> None:
        """Complete all events that one freed allocation waits for."""
        for stream, blocks in list(self._waiting.items()):
            block = next((one for one in blocks if one.handle == handle), None)
            if block is None:
                continue
            blocks.remove(block)
            if not blocks:
                del self._waiting[stream]
            block.events -= 1
            if not block.events:
                self._free_block(block)

    def segments(self) -> list[SegmentView]:
        """Return the segments by address, each with its blocks."""
        blocks = [*self._live.values(), *{id(block): block for one in self._waiting.values() for block in one}.values()]
        for pool in (self._small, self._large):
            blocks.extend(pool.blocks())
        found: list[SegmentView] = []
        run: list[Block] = []
        for block in sorted(blocks, key=lambda one: one.address):
            if run and block.previous is not run[-1]:
                found.append(view_segment(run))
                run = []
            run.append(block)
        return [*found, view_segment(run)] if run else found

    def restore(self, segments: list[SegmentView], begins: Mapping[int, int] | None = None) -> dict[int, int]:
        """Restore the segments of a snapshot; return the new handles by block address.

        Blocks in ``active_pending_free`` wait for the stream -1 until ``complete_free`` or ``complete_events``.

        Args:
            segments: all segments of the device.
            begins: start address of each expandable segment, by the address of its first mapped range; default: that
                address.
        """
        begins = begins or {}
        handles: dict[int, int] = {}
        tails: dict[tuple[int, bool], Block] = {}
        for segment in sorted(segments, key=lambda one: one.address):
            pool = self._small if segment.small else self._large
            before, space = None, None
            if segment.expandable:
                key = (segment.stream, segment.small)
                begin = begins.get(segment.address, segment.address)
                before = self._grow_space(tails.get(key), segment, pool) or self._unmapped(segment, begin, pool)
                space = before.expandable if before is not None else self._space(pool, begin)
            for view in segment.blocks:
                block = Block(pool, segment.stream, view.address, view.size_bytes, space)
                block.insert_after(before, before.next if before is not None else None)
                before = block
                if view.state == "inactive":
                    pool.add(block)
                else:
                    handles[view.address] = self._take_over(block, view)
            if space is not None and before is not None:
                tails[segment.stream, segment.small] = self._end_space(before, space)
            self.reserved += segment.size_bytes
            self.driver.adopt(segment.address, segment.size_bytes)
        self.reset_peaks()
        return handles

    def _take_over(self, block: Block, view: BlockView) -> int:
        self._last = handle = self._last + 1
        block.handle, block.requested = handle, view.requested_bytes
        self.active += block.size
        self.requested += block.requested
        if view.state == "active_pending_free":
            block.events = 1
            self._waiting.setdefault(-1, deque()).append(block)
        else:
            self.allocated += block.size
            self._live[handle] = block
        return handle

    def _grow_space(self, tail: Block | None, segment: SegmentView, pool: Pool) -> Block | None:
        """Return the unmapped block before a mapped range of the same expandable segment."""
        if tail is None or tail.expandable is None or segment.address >= tail.expandable.address + tail.expandable.size:
            return None
        pool.remove(tail)
        tail.size = segment.address - tail.address
        if not tail.size:
            return tail.previous
        pool.add(tail)
        return tail

    def _unmapped(self, segment: SegmentView, begin: int, pool: Pool) -> Block | None:
        """Add the unmapped block from the start of an expandable segment to its first mapped range."""
        if begin >= segment.address:
            return None
        block = Block(pool, segment.stream, begin, segment.address - begin, self._space(pool, begin))
        block.mapped = False
        pool.add(block)
        return block

    def _end_space(self, last: Block, space: Expandable) -> Block:
        """Add the unmapped rest of an expandable segment after its last mapped block."""
        begin = last.address + last.size
        tail = Block(last.pool, last.stream, begin, space.address + space.size - begin, space)
        tail.mapped = False
        tail.insert_after(last, None)
        last.pool.add(tail)
        return tail


class RecordedDriver(Driver):
    """Assigns the recorded addresses to segments in order, and records the requests."""

    def __init__(self, addresses: list[tuple[int, int]], capacity_bytes: int | None) -> None:
        super().__init__(capacity_bytes)
        self._addresses = deque(addresses)
        self.ranges: list[int] = []
        """Addresses mapped for the current request: a new address range starts at the first of them."""
        self.changes: list[tuple[bool, int]] = []

    def allocate(self, size: int) -> int | None:
        """Return the next recorded address if the size matches, else a new one; None if memory is short."""
        address = super().allocate(size)
        if address is None:
            return None
        self.changes.append((True, size))
        if self._addresses and self._addresses[0][1] == size:
            return self._addresses.popleft()[0]
        return address

    def adopt(self, address: int, size: int) -> None:
        """Count memory that was allocated before; new addresses are assigned below it."""
        self.used_bytes += size
        self._lowest = min(self._lowest, address // CHUNK_BYTES * CHUNK_BYTES)

    def release(self, address: int, size: int) -> None:
        """Release a segment."""
        self.give(size)
        self.changes.append((False, size))

    def reserve(self, size: int) -> int:
        """Return the recorded start of an address range, if any, else a new one."""
        own = super().reserve(size)
        return self.ranges[0] if self.ranges else own


def compare(
    snapshot: Snapshot,
    device: int,
    settings: Settings,
    allowed_bytes: int | None = None,
    recorded_addresses: bool = True,
    device_bytes: int | None = None,
) -> Comparison:
    """Replay a snapshot's trace in the model, from the state at the trace's start.

    Args:
        snapshot: a snapshot with a trace of the device.
        device: index of the device.
        settings: the settings with which the trace was recorded.
        allowed_bytes: limit set by ``set_per_process_memory_fraction``; None: releases of cached memory count as calls
            of ``empty_cache``.
        recorded_addresses: True: segments have their recorded addresses; False: those of the model's driver.
        device_bytes: the device's memory; expandable segments reserve an eighth more in addresses.
    """
    return _Comparing(snapshot, device, settings, allowed_bytes, recorded_addresses, device_bytes).run()


class _Comparing:
    def __init__(
        self,
        snapshot: Snapshot,
        device: int,
        settings: Settings,
        allowed: int | None,
        recorded_addresses: bool,
        device_bytes: int | None,
    ) -> None:
        self.replay = Replay(snapshot, device)
        self.snapshot, self.device = snapshot, device
        trace = self.replay.trace
        self.actions = trace.actions
        self.addresses = memoryview(trace.addresses).cast("Q")
        self.sizes = memoryview(trace.sizes).cast("q")
        self.streams = memoryview(trace.streams).cast("q")
        self.changes = [
            (action in _TAKES, self.sizes[index])
            for index, action in enumerate(self.actions)
            if action in _TAKES or action in _GIVES
        ]
        self.allowed = allowed
        taken = [(self.addresses[i], self.sizes[i]) for i, action in enumerate(self.actions) if action == SEGMENT_ALLOC]
        self.driver = RecordedDriver(taken if recorded_addresses else [], None)
        self.recorded_addresses = recorded_addresses
        settings = msgspec.structs.replace(settings, per_process_memory_fraction=1.0)
        self.model = RestoredAllocator(settings, device_bytes=device_bytes, driver=self.driver)
        if allowed is not None:
            self.model.limit_reserved(allowed)
        before = _segments_before(self.replay)
        self.held = self.model.restore(before, self._begins(before, self.model.space_bytes))

    def run(self) -> Comparison:
        worst, peak, requests, same, ooms, modelled_ooms = 0.0, self.model.reserved, 0, 0, 0, 0
        recorded = self.replay.reserved
        for index, action in enumerate(self.actions):
            address, size = self.addresses[index], self.sizes[index]
            if action == ALLOC:
                requests += 1
                try:
                    handle = self.held[address] = self.model.allocate(size, self.streams[index])
                except DeviceOutOfMemory:
                    modelled_ooms += 1
                    continue
                self.driver.ranges.clear()
                same += self.model.address(handle) == address
                off = abs(self.model.reserved - recorded[index + 1]) / max(1, recorded[index + 1])
                worst, peak = max(worst, off), max(peak, self.model.reserved)
            elif action == FREE_REQUESTED:
                self._free(index, address)
            elif action == FREE_COMPLETED:
                self.model.complete_free(self.held.pop(address, 0))
            elif action == OOM:
                ooms += 1
                try:
                    self.model.allocate(size, self.streams[index])
                except DeviceOutOfMemory:
                    modelled_ooms += 1
            elif action == SEGMENT_MAP and self.recorded_addresses:
                self.driver.ranges.append(address)
            elif action in _GIVES and self._by_program(index):
                self.model.empty_cache()
        ends = self._segments_after()
        return Comparison(
            len(self.actions), requests, same, len(self.changes), self._first_difference(),
            Counter(map(_outline, ends)) == Counter(map(_outline, self.model.segments())),
            _places(ends) == _places(self.model.segments()),
            max(recorded), peak, worst, ooms, modelled_ooms,
        )  # fmt: skip

    def _begins(self, before: list[SegmentView], space_bytes: int) -> dict[int, int]:
        """Return the start of each expandable segment, whose first pages may be unmapped at the trace's start.

        The allocator maps the lowest pages first: the lowest address that a trace maps is the lowest that was free.
        """
        known = {(one.stream, one.address) for one in before if one.expandable}
        mapped = {(self.streams[i], self.addresses[i]) for i, one in enumerate(self.actions) if one == SEGMENT_MAP}
        found: dict[int, int] = {}
        begin: tuple[int, int] | None = None
        for stream, address in sorted(known | mapped):
            if begin is None or stream != begin[0] or address >= begin[1] + space_bytes:
                begin = (stream, address)
            found[address] = begin[1]
        return found

    def _free(self, index: int, address: int) -> None:
        handle = self.held.get(address, 0)
        following = index + 1
        at_once = (
            following < len(self.actions)
            and self.actions[following] == FREE_COMPLETED
            and self.addresses[following] == address
        )
        if not at_once:
            self.model.record_stream(handle, _OTHER_STREAM)
        self.model.free(handle)

    def _by_program(self, index: int) -> bool:
        """Return whether the program released memory, and not the allocator for the next request."""
        if index and self.actions[index - 1] in _GIVES:
            return False  # the model released at the first of these entries
        if self.allowed is None:
            return True
        following = next((at for at in range(index, len(self.actions)) if self.actions[at] not in _GIVES), None)
        if following is None or self.actions[following] not in (*_TAKES, OOM):
            return True
        settings, reserved = self.model.settings, self.model.reserved
        if 0 < settings.garbage_collection_threshold * self.allowed < reserved:
            return False
        return reserved + settings.segment_size(self.sizes[following]) <= self.allowed

    def _first_difference(self) -> int | None:
        if any(action in (SEGMENT_MAP, SEGMENT_UNMAP) for action in self.actions):
            return None  # mapped pages are compared by the reserved bytes
        for number, change in enumerate(self.changes):
            if number >= len(self.driver.changes) or self.driver.changes[number] != change:
                return number
        return None if len(self.driver.changes) == len(self.changes) else len(self.changes)

    def _segments_after(self) -> list[SegmentView]:
        sizes, addresses = (
            memoryview(self.snapshot.block_sizes).cast("q"),
            memoryview(self.snapshot.block_addresses).cast("Q"),
        )
        requested = memoryview(self.snapshot.block_requested).cast("q")
        states = ("inactive", "active_allocated", "active_pending_free")
        return [
            SegmentView(
                one.address, one.size, one.stream, one.small, one.expandable,
                tuple(
                    BlockView(addresses[at], sizes[at], requested[at], states[self.snapshot.block_states[at]], 0)
                    for at in range(one.first_block, one.first_block + one.blocks)
                ),
            )
            for one in self.snapshot.segments
            if one.device == self.device
        ]  # fmt: skip


def _outline(one: SegmentView) -> tuple[int, int, bool, bool]:
    return one.size_bytes, one.stream, one.small, one.expandable


def _places(segments: list[SegmentView]) -> list[tuple[int, int, bool]]:
    return sorted(
        (block.address, block.size_bytes, block.state == "inactive") for segment in segments for block in segment.blocks
    )


def _segments_before(replay: Replay) -> list[SegmentView]:
    """Return the segments with their blocks right before a trace's first entry."""
    of = replay.allocations
    taken = sorted(
        (of.addresses[number], of.sizes[number], of.requested[number], of.freed[number] != -1)
        for number in replay.active_at(-1)
    )
    found: list[SegmentView] = []
    at = 0
    for one in replay.ranges_at(-1):
        held: list[tuple[int, int, int, bool]] = []
        while at < len(taken) and taken[at][0] < one.end:
            held.append(taken[at])
            at += 1
        # The pool of a range that was unmapped within the trace is unknown; the large pool maps 20 MiB at a time.
        small = one.small or (one.expandable and one.size % LARGE_SEGMENT_BYTES != 0)
        found.append(SegmentView(one.address, one.size, one.stream, small, one.expandable, tuple(_blocks(one, held))))
    return found


def _blocks(one: Range, held: list[tuple[int, int, int, bool]]) -> Iterator[BlockView]:
    """Return a segment's blocks, given the active ones as (address, size, requested bytes, not yet freed)."""
    place = one.address
    splits = one.small or one.expandable
    for number, (address, size, requested, allocated) in enumerate(held):
        if address > place:
            yield BlockView(place, address - place, 0, "inactive", 0)
        following = held[number + 1][0] if number + 1 < len(held) else one.end
        if not splits and following - address - size <= SMALL_MOST_BYTES:
            size = following - address  # the remainder was not split off; the trace has no entry for that
        yield BlockView(address, size, requested, "active_allocated" if allocated else "active_pending_free", 0)
        place = address + size
    if one.end > place:
        yield BlockView(place, one.end - place, 0, "inactive", 0)
