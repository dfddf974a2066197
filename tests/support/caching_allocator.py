"""A caching allocator in miniature, written from CUDACachingAllocator.cpp's rules: its snapshots' truth is known.

It splits, coalesces, keeps small and large pools apart by stream, maps expandable segments, and after every trace entry
notes its own figures: what a replay of the snapshot must find.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

MIB = 2**20
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB


class Figures(NamedTuple):
    allocated: int
    active: int
    requested: int
    reserved: int


@dataclass
class Chunk:
    address: int
    size: int
    requested: int = 0
    state: str = "inactive"
    frames: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Area:
    address: int
    size: int
    stream: int
    small: bool
    expandable: bool
    chunks: list[Chunk]


class CachingAllocator:
    def __init__(self, expandable: bool = False, device: int = 0) -> None:
        self.expandable, self.device = expandable, device
        self.areas: list[Area] = []
        self.trace: list[dict[str, Any]] = []
        self.figures: list[Figures] = []
        self.start = Figures(0, 0, 0, 0)
        self._next = 0x7F0000000000

    def now(self) -> Figures:
        chunks = [chunk for area in self.areas for chunk in area.chunks]
        taken = [chunk for chunk in chunks if chunk.state != "inactive"]
        return Figures(
            sum(chunk.size for chunk in taken if chunk.state == "active_allocated"),
            sum(chunk.size for chunk in taken),
            sum(chunk.requested for chunk in taken),
            sum(area.size for area in self.areas),
        )

    def record(self, action: str, address: int, size: int, stream: int, frames: list[Any], **more: Any) -> None:
        entry = {"action": action, "addr": address, "size": size, "stream": stream, "frames": frames}
        self.trace.append({**entry, "time_us": 1_000_000 + len(self.trace), **more})
        self.figures.append(self.now())

    def alloc(self, requested: int, stream: int = 0, frames: list[dict[str, Any]] | None = None) -> int:
        frames = frames or []
        size = max(512, -(-requested // 512) * 512)
        small = size <= MIB
        area, chunk = self._best(size, stream, small) or self._grow(size, stream, small, frames)
        rest = chunk.size - size
        if rest >= 512 if small or area.expandable else rest > MIB:
            chunk.size = size
            area.chunks.insert(area.chunks.index(chunk) + 1, Chunk(chunk.address + size, rest))
        chunk.requested, chunk.state, chunk.frames = requested, "active_allocated", frames
        self.record("alloc", chunk.address, requested, stream, frames)
        return chunk.address

    def free(self, address: int, wait: bool = False) -> None:
        area, chunk = self._chunk(address)
        chunk.state = "active_pending_free"
        self.record("free_requested", address, chunk.requested, area.stream, [])
        if not wait:
            self.complete(address)

    def complete(self, address: int) -> None:
        area, chunk = self._chunk(address)
        requested, chunk.requested, chunk.state, chunk.frames = chunk.requested, 0, "inactive", []
        index = area.chunks.index(chunk)
        if index + 1 < len(area.chunks) and area.chunks[index + 1].state == "inactive":
            chunk.size += area.chunks.pop(index + 1).size
        if index and area.chunks[index - 1].state == "inactive":
            area.chunks[index - 1].size += area.chunks.pop(index).size
        self.record("free_completed", address, requested, area.stream, [])

    def empty_cache(self) -> None:
        action = "segment_unmap" if self.expandable else "segment_free"
        for area in [area for area in self.areas if all(chunk.state == "inactive" for chunk in area.chunks)]:
            self.areas.remove(area)
            self.record(action, area.address, area.size, area.stream, [])

    def fail(self, size: int, device_free: int, frames: list[dict[str, Any]] | None = None) -> None:
        self.record("oom", 0, size, 0, frames or [], device_free=device_free)
        del self.trace[-1]["addr"]

    def snapshot(self, last: int | None = None) -> dict[str, Any]:
        """Give what ``torch.cuda.memory._snapshot()`` would: of the trace, the ``last`` entries."""
        trace = self.trace if last is None else self.trace[len(self.trace) - last :]
        traces = [*([] for _ in range(self.device)), trace]
        return {"segments": [self._segment(area) for area in self.areas], "device_traces": traces}

    def _segment(self, area: Area) -> dict[str, Any]:
        taken = [chunk for chunk in area.chunks if chunk.state != "inactive"]
        return {
            "device": self.device,
            "address": area.address,
            "total_size": area.size,
            "allocated_size": sum(chunk.size for chunk in taken if chunk.state == "active_allocated"),
            "active_size": sum(chunk.size for chunk in taken),
            "requested_size": sum(chunk.requested for chunk in taken),
            "stream": area.stream,
            "segment_type": "small" if area.small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": area.expandable,
            "frames": [],
            "blocks": [
                {"requested_size" if k == "requested" else k: v for k, v in vars(c).items()} for c in area.chunks
            ],
        }

    def _best(self, size: int, stream: int, small: bool) -> tuple[Area, Chunk] | None:
        fits = [
            (chunk.size, chunk.address, area, chunk)
            for area in self.areas
            if area.stream == stream and area.small == small
            for chunk in area.chunks
            if chunk.state == "inactive" and chunk.size >= size
        ]
        return min(fits, key=lambda fit: fit[:2])[2:] if fits else None

    def _grow(self, size: int, stream: int, small: bool, frames: list[dict[str, Any]]) -> tuple[Area, Chunk]:
        unit = LARGE_SEGMENT if not small and (self.expandable or size < 10 * MIB) else SMALL_SEGMENT
        segment = -(-size // unit) * unit
        chunk = Chunk(self._next, segment)
        area = Area(self._next, segment, stream, small, self.expandable, [chunk])
        # Apart, so that neighbouring segments never look like one.
        self._next += segment + 64 * MIB
        self.areas.append(area)
        self.record("segment_map" if self.expandable else "segment_alloc", area.address, segment, stream, frames)
        return area, chunk

    def _chunk(self, address: int) -> tuple[Area, Chunk]:
        return next(
            (area, chunk)
            for area in self.areas
            for chunk in area.chunks
            if chunk.address == address and chunk.state != "inactive"
        )
