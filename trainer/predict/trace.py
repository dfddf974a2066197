"""The allocations of a dry run, in order, applied at once to the model of PyTorch's caching allocator."""

from collections import deque
from collections.abc import Iterable, Sequence

from ...protocol.analysis.allocator.caching import CachingAllocator
from ...protocol.analysis.allocator.settings import Settings
from ...protocol.analysis.allocator.views import DeviceOutOfMemory, Peaks

ALLOCATE, FREE, USE, EMPTY, MARK, END = range(6)
_NEAR = 0.005
Event = tuple[int, int, int, int, str]
"""Kind, handle, bytes, stream, name of a phase that begins or ends."""


class AllocatorReplay:
    """Applies the events of a trace to the caching allocator's model."""

    def __init__(self, settings: Settings, capacity_bytes: int | None = None) -> None:
        self._allocator = CachingAllocator(settings, capacity_bytes)
        self._blocks: dict[int, int] = {}

    def apply(self, event: Event) -> None:
        """Apply one event.

        Raises:
            DeviceOutOfMemory: an allocation does not fit the capacity.
        """
        kind, handle, size, stream, _ = event
        if kind == ALLOCATE:
            self._allocator.complete_events()
            self._blocks[handle] = self._allocator.allocate(size, stream)
        elif kind == FREE:
            self._allocator.free(self._blocks.pop(handle))
        elif kind == USE:
            self._allocator.record_stream(self._blocks[handle], stream)
        elif kind == EMPTY:
            self._allocator.complete_events()
            self._allocator.empty_cache()
        elif kind == MARK:
            self._allocator.reset_peaks()

    @property
    def allocated(self) -> int:
        """Bytes of the allocated blocks."""
        return self._allocator.allocated

    def peaks(self) -> Peaks:
        """Return the highest allocated and reserved bytes since the last phase began."""
        return self._allocator.peaks()


class Trace:
    """Allocations and frees on the GPU as events, and allocated bytes by kind of memory."""

    def __init__(self, settings: Settings) -> None:
        self.events: list[Event] = []
        self.current: dict[str, int] = {}
        """Bytes by kind of memory: ``cuda``, ``cpu``, ``pinned``."""
        self.host_peak = 0
        self._replay = AllocatorReplay(settings)
        self._sizes: dict[int, tuple[int, str, int]] = {}
        self._next = 0
        self._names: dict[int, int] = {}
        """Handle of an allocation in the events and the allocator, if a repeated step replaced it."""
        self.block_bytes: dict[int, int] = {}
        """Bytes of each allocation's block, by its handle in the events."""
        self.parts: dict[int, str] = {}
        """Part of an allocation (``protocol.messages.memory.PARTS``), by its handle in the events."""
        self.recomputed: list[tuple[int, int]] = []
        """First and last events of recomputed layers in a backward pass."""

    def allocate(self, size: int, device: str, stream: int = 0) -> int:
        """Record an allocation of ``size`` bytes; return its handle."""
        handle = self._next
        self._next += 1
        self._sizes[handle] = (size, device, stream)
        self._add(device, size)
        if device == "cuda" and size:
            self._record((ALLOCATE, handle, size, stream, ""))
        return handle

    def free(self, handle: int) -> None:
        """Record a free."""
        size, device, stream = self._sizes.pop(handle)
        self.current[device] -= size
        if device == "cuda" and size:
            self._record((FREE, self._names.pop(handle, handle), size, stream, ""))

    def use(self, handle: int, stream: int) -> None:
        """Record the use of a storage on a stream other than its own (``record_stream``)."""
        size, device, own = self._sizes[handle]
        if device == "cuda" and size and own != stream:
            self._record((USE, self._names.get(handle, handle), size, stream, ""))

    def empty_cache(self) -> None:
        """Record that cached segments are freed to the driver."""
        self._record((EMPTY, 0, 0, 0, ""))

    def move(self, handle: int, device: str) -> None:
        """Count a host allocation as another kind of host memory."""
        size, before, stream = self._sizes[handle]
        self.current[before] -= size
        self._sizes[handle] = (size, device, stream)
        self._add(device, size)

    def see(self, handle: int, part: str) -> None:
        """Record the part of an allocation: the first one counts, except that a gradient may be in a bucket."""
        name = self._names.get(handle, handle)
        if part == "buckets" or name not in self.parts:
            self.parts[name] = part

    def moment(self, *sizes: int, stream: int = 0) -> None:
        """Record memory on the GPU that an operation allocates and frees before it returns."""
        handles = [self.allocate(size, "cuda", stream) for size in sizes]
        for handle in handles:
            self.free(handle)

    def begin(self, phase: str) -> None:
        """Begin a phase, whose peaks start at the present allocation."""
        self._record((MARK, 0, 0, 0, phase))

    def end(self, phase: str) -> Peaks:
        """End a phase; return its highest allocated and reserved bytes."""
        self._record((END, 0, 0, 0, phase))
        return self.peaks()

    def repeat(self, start: int) -> list[tuple[str, Peaks]] | None:
        """Repeat everything since an event, as a next and equal step.

        Returns:
            Each phase that ended, with its peaks; None, without a repetition, if the step ended with other allocations
            than it began with, so that the next one may differ.
        """
        step = self.events[start:]
        born: dict[int, tuple[int, int]] = {}
        lost: list[tuple[int, tuple[int, int]]] = []
        for kind, handle, size, stream, _ in step:
            if kind == ALLOCATE:
                born[handle] = (size, stream)
            elif kind == FREE and born.pop(handle, None) is None:
                lost.append((handle, (size, stream)))
        kept: dict[tuple[int, int], deque[int]] = {}
        for handle, what in born.items():
            kept.setdefault(what, deque()).append(handle)
        renamed: dict[int, int] = {}
        for handle, what in lost:
            if not kept.get(what):
                return None
            renamed[handle] = kept[what].popleft()
        if any(kept.values()):
            return None
        found: list[tuple[str, Peaks]] = []
        for kind, handle, size, stream, name in step:
            if kind == ALLOCATE:
                renamed[handle] = self._next
                self._next += 1
            self._record((kind, renamed.get(handle, handle), size, stream, name))
            if kind == END:
                found.append((name, self.peaks()))
        for old, new in renamed.items():
            if old in self.parts:
                self.parts[new] = self.parts[old]
        moved = len(self.events) - len(step) - start
        self.recomputed += [(begin + moved, end + moved) for begin, end in self.recomputed if begin >= start]
        owners = {name: handle for handle, name in self._names.items()}
        for handle in born:
            self._names[owners.get(handle, handle)] = renamed[handle]
        return found

    def peaks(self) -> Peaks:
        """Return the highest allocated and reserved bytes since the phase began."""
        return self._replay.peaks()

    def _record(self, event: Event) -> None:
        self.events.append(event)
        before = self._replay.allocated
        self._replay.apply(event)
        if event[0] == ALLOCATE:
            self.block_bytes[event[1]] = self._replay.allocated - before

    def _add(self, device: str, size: int) -> None:
        self.current[device] = self.current.get(device, 0) + size
        if device in ("cpu", "pinned"):
            self.host_peak = max(self.host_peak, self.current.get("cpu", 0) + self.current.get("pinned", 0))


def failing_phase(events: Iterable[Event], settings: Settings, capacity_bytes: int) -> str:
    """Return the phase whose allocation fails with ``capacity_bytes`` of reservable memory; empty: all succeed."""
    replay = AllocatorReplay(settings, capacity_bytes)
    phase = "init"
    try:
        for event in events:
            if event[0] == MARK:
                phase = event[4]
            replay.apply(event)
    except DeviceOutOfMemory:
        return phase
    return ""


def needed_bytes(events: Sequence[Event], settings: Settings, low: int, high: int) -> int:
    """Return the minimum of reservable memory for every allocation to succeed, within 0.5 %.

    Args:
        events: events of the steps.
        settings: settings of the allocator.
        low: lower bound: the highest allocated bytes.
        high: upper bound: the highest reserved bytes.
    """
    while high - low > max(_NEAR * high, 1 << 21):
        middle = (low + high) // 2
        if failing_phase(events, settings, middle):
            low = middle
        else:
            high = middle
    return high
