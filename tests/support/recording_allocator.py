"""The modelled allocator with PyTorch's recorder: it notes a trace and gives the snapshot that PyTorch would."""

from array import array
from typing import Any

from ftmon.protocol.analysis.allocator.blocks import Block, Pool
from ftmon.protocol.analysis.allocator.caching import CachingAllocator
from ftmon.protocol.analysis.allocator.driver import Driver
from ftmon.protocol.analysis.allocator.settings import Settings
from ftmon.protocol.analysis.allocator.views import DeviceOutOfMemory
from ftmon.protocol.snapshot.model import ACTIONS, STATES, Segment, Snapshot, Trace


class RecordingAllocator(CachingAllocator):
    """Notes (action, address, size, stream) of everything."""

    def __init__(self, settings: Settings, device_bytes: int, capacity_bytes: int | None = None) -> None:
        self.entries: list[tuple[str, int, int, int]] = []
        self.now = 0
        super().__init__(settings, device_bytes=device_bytes, driver=_Driver(self, capacity_bytes))

    def _from_driver(self, pool: Pool, rounded: int, size: int, stream: int) -> Block | None:
        self.now = stream
        return super()._from_driver(pool, rounded, size, stream)

    def allocate(self, size_bytes: int, stream: int = 0) -> int:
        try:
            handle = super().allocate(size_bytes, stream)
        except DeviceOutOfMemory:
            self.entries.append(("oom", 0, self.settings.rounded(size_bytes), stream))
            raise
        self.entries.append(("alloc", self.address(handle), size_bytes, stream))
        return handle

    def free(self, handle: int) -> None:
        block = self._live[handle]
        self.entries.append(("free_requested", block.address, block.requested, block.stream))
        super().free(handle)

    def _free_block(self, block: Block) -> None:
        self.entries.append(("free_completed", block.address, block.requested, block.stream))
        super()._free_block(block)

    def _release(self, block: Block) -> None:
        self.now = block.stream
        super()._release(block)

    def _map(self, block: Block, size: int) -> bool:
        address, before = block.address, self.reserved
        done = super()._map(block, size)
        if done:
            self.entries.append(("segment_map", address, self.reserved - before, block.stream))
        return done

    def _unmap(self, block: Block) -> None:
        before, space = self.reserved, block.expandable
        assert space is not None
        begin = space.address + -(-(block.address - space.address) // space.page_bytes) * space.page_bytes
        super()._unmap(block)
        if self.reserved < before:
            self.entries.append(("segment_unmap", begin, before - self.reserved, block.stream))

    def snapshot(self, last: int) -> Snapshot:
        """Give the snapshot as it is now, with the last entries of the trace."""
        entries = self.entries[len(self.entries) - last :]
        columns: list[Any] = list(zip(*entries, strict=True)) or [(), (), (), ()]
        trace = Trace(
            0,
            bytes(ACTIONS.index(action) for action in columns[0]),
            array("Q", columns[1]).tobytes(),
            array("q", columns[2]).tobytes(),
            array("q", columns[3]).tobytes(),
            array("q", [0] * len(entries)).tobytes(),
            array("I", [0] * len(entries)).tobytes(),
            array("I", [0] * len(entries)).tobytes(),
        )
        segments: list[Segment] = []
        blocks = [block for one in self.segments() for block in one.blocks]
        for one in self.segments():
            first = segments[-1].first_block + segments[-1].blocks if segments else 0
            segments.append(
                Segment(
                    0, one.address, one.size_bytes, one.stream, one.small, one.expandable, "", 0, first, len(one.blocks)
                )
            )
        most = self.settings.max_split_size_bytes
        return Snapshot(
            "",
            segments,
            array("Q", [block.address for block in blocks]).tobytes(),
            array("q", [block.size_bytes for block in blocks]).tobytes(),
            array("q", [block.requested_bytes for block in blocks]).tobytes(),
            bytes(STATES.index(block.state) for block in blocks),
            array("I", [0] * len(blocks)).tobytes(),
            [trace],
            [],
            [[]],
            [""],
            divisions=list(self.settings.roundup_power2_divisions),
            max_split_size=-1 if most is None else most,
        )


class _Driver(Driver):
    def __init__(self, recorder: RecordingAllocator, capacity_bytes: int | None) -> None:
        super().__init__(capacity_bytes)
        self._recorder = recorder

    def allocate(self, size: int) -> int | None:
        address = super().allocate(size)
        if address is not None:
            self._recorder.entries.append(("segment_alloc", address, size, self._recorder.now))
        return address

    def release(self, address: int, size: int) -> None:
        super().release(address, size)
        self._recorder.entries.append(("segment_free", address, size, self._recorder.now))
