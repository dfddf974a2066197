"""Memory figures of a rank: PyTorch's CUDA statistics read in place, and those of a rank that computes on the CPU.

On the CPU, ``allocated`` is the memory that malloc has handed out (``uordblks + hblkhd`` of mallinfo2(3)), ``reserved``
its total (``arena + hblkhd``). glibc keeps no peak of either; the peak is that of the resident set, reset through
``/proc/self/clear_refs`` ("5", proc(5)).
"""

import ctypes
import os
import resource
import struct
import sys
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar, NamedTuple, Protocol

from .. import guard

# ``torch._C._cuda_memoryStats`` builds a dictionary of some 40 others: 15 us in a tight loop on the host of an H100,
# 48 at a phase boundary, where every cache is cold. Copying the kilobyte behind it and beginning new peaks takes 9 us
# there. That kilobyte is ``DeviceStats`` of ``c10/core/CachingDeviceAllocator.h``. It is found once, by its contents:
# the exported pointer ``c10::cuda::CUDACachingAllocator::allocator`` leads to the allocator, its vector of pointers
# leads to the device's part, and that must contain exactly the numbers that PyTorch has just returned. PyTorch 2.11
# keeps them in one piece, 2.13 has a table between two of them. With another layout or allocator
# (``cudaMallocAsync``) the search finds nothing, and the caller keeps using the dictionary.
Stats = dict[str, Any]
Place = tuple[str, str, str]  # A figure of the nested statistics: group, pool, figure; empty where no such level is

_POOLS = ("all", "small_pool", "large_pool")
_FIGURES = ("current", "peak", "allocated", "freed")
_COUNTS = ("num_alloc_retries", "num_ooms")
_OVERSIZE = ("oversize_allocations", "oversize_segments")
_CALLS = ("num_sync_all_streams", "num_device_alloc", "num_device_free")


def _arrays(*groups: str) -> tuple[Place, ...]:
    return tuple((group, pool, figure) for group in groups for pool in _POOLS for figure in _FIGURES)


_PIECES: tuple[tuple[Place, ...], ...] = (
    _arrays("allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes"),
    _arrays("active_bytes", "inactive_split_bytes", "requested_bytes"),
    (
        *((name, "", "") for name in _COUNTS),
        *((name, "", figure) for name in _OVERSIZE for figure in _FIGURES),
        *((name, "", "") for name in _CALLS),
    ),
)
"""Fields that are adjacent in every known version, as 64-bit integers in this order."""
_GAP_BYTES = 128  # Largest gap between two pieces
_POINTER = struct.Struct("P")
_WORD = _POINTER.size

_LIBRARY, _ALLOCATOR = "libc10_cuda.so", "_ZN3c104cuda20CUDACachingAllocator9allocatorE"
_ALLOCATOR_BYTES = 2**15  # Bytes of the allocator searched for its vector: 8 KiB of mutexes and tables come before it
_DEVICE_BYTES = 2**14
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Layout(NamedTuple):
    """Where a device's statistics are, and which 64-bit integer from there on is which figure."""

    address: int
    words: int
    places: dict[Place, int]

    def reader(self) -> Callable[[], bytes]:
        """Return a function that copies the integers: a sample."""
        return memoryview((ctypes.c_char * (self.words * 8)).from_address(self.address)).tobytes

    def picker(self, places: Sequence[Place]) -> Callable[[bytes], tuple[int, ...]]:
        """Return a function that returns the figures at some places (two or more) of a sample."""
        words = sorted({self.places[place] for place in places})
        gaps = [word - before - 1 for before, word in zip([-1, *words], words, strict=False)]
        unpack = struct.Struct("".join(f"{gap * 8}xq" for gap in gaps)).unpack_from
        pick = itemgetter(*(words.index(self.places[place]) for place in places))
        return lambda sample: pick(unpack(sample))


def locate(stats: Stats, device: int, devices: int) -> Layout | None:
    """Return the address of a device's statistics; None if it is not found.

    Call it on the training thread, between its allocations.
    """
    try:
        library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        allocator = ctypes.c_void_p.in_dll(library, _ALLOCATOR).value
    except (OSError, ValueError, AttributeError):
        return None
    return search(allocator, stats, device, devices) if allocator else None


def search(allocator: int, stats: Stats, device: int, devices: int) -> Layout | None:
    """Return the layout of a device's statistics, reached from its allocator; None if it is not found."""
    try:
        if not stats["allocation"]["all"]["allocated"]:
            return None  # zeros alone match any unused memory
        pieces = [struct.pack(f"{len(piece)}q", *(value_of(stats, place) for place in piece)) for piece in _PIECES]
        memory = os.open("/proc/self/mem", os.O_RDONLY)
    except (KeyError, TypeError, struct.error, OSError):
        return None
    try:
        for part in _device_parts(memory, allocator, device, devices):
            offsets = _offsets(_read(memory, part, _DEVICE_BYTES), pieces)
            layout = _layout(part, offsets) if offsets else None
            if layout is not None and layout.places.keys() >= set(peaks_in(stats)):
                return layout
    finally:
        os.close(memory)
    return None


def value_of(stats: Stats, place: Place) -> int:
    """Return one figure of PyTorch's nested statistics."""
    group, pool, figure = place
    value = stats[group]
    if pool:
        value = value[pool]
    return value[figure] if figure else value


def peaks_in(stats: Stats) -> list[Place]:
    """List the places of the peaks in PyTorch's nested statistics."""
    return [
        (name, pool, "peak")
        for name, group in stats.items()
        if isinstance(group, dict)
        for pool in ([""] if "peak" in group else group)
    ]


def _device_parts(memory: int, allocator: int, device: int, devices: int) -> list[int]:
    """List a device's address in each vector with one pointer per device (begin, end, end of its memory)."""
    words = _read(memory, allocator, _ALLOCATOR_BYTES)
    count = len(words) // _WORD
    pointers = struct.unpack(f"{count}P", words[: count * _WORD])
    parts: list[int] = []
    for begin, end, limit in zip(pointers, pointers[1:], pointers[2:], strict=False):
        if begin and begin % _WORD == 0 and end - begin == devices * _WORD and limit >= end:
            entry = _read(memory, begin + device * _WORD, _WORD)
            if len(entry) == _WORD:
                parts.append(_POINTER.unpack(entry)[0])
    return parts


def _offsets(part: bytes, pieces: list[bytes]) -> list[int]:
    offsets: list[int] = []
    start, end = 0, len(part)
    for piece in pieces:
        offset = part.find(piece, start, end)
        if offset < 0 or offset % 8:
            return []
        offsets.append(offset)
        start = offset + len(piece)
        end = start + _GAP_BYTES + max(map(len, pieces))
    return offsets


def _layout(part: int, offsets: list[int]) -> Layout:
    first = offsets[0]
    places = {
        place: (offset - first) // 8 + number
        for piece, offset in zip(_PIECES, offsets, strict=True)
        for number, place in enumerate(piece)
    }
    return Layout(part + first, max(places.values()) + 1, places)


def _read(memory: int, address: int, size: int) -> bytes:
    """Return up to ``size`` bytes from an address: as many as are mapped (``/proc/self/mem`` refuses the rest)."""
    found = b""
    while len(found) < size:
        place = address + len(found)
        try:
            piece = os.pread(memory, min(size - len(found), _PAGE - place % _PAGE), place)
        except (OSError, OverflowError):
            break
        if not piece:
            break
        found += piece
    return found


SEARCH_EVERY = 8  # Samples between two attempts to find the allocator's numbers, or to verify them
ATTEMPTS = 12
PROOFS = 3  # Number of times they must equal PyTorch's dictionary before they replace it
CHECK_SECONDS = 20.0  # Seconds between comparisons of the two from then on

Sample = Stats | bytes


class StatsSource:
    """Samples PyTorch's nested dictionary at first, and copies the numbers behind it once they are found."""

    def __init__(self, official: Callable[[int], Stats], device: int, devices: int) -> None:
        self.read: Callable[[], Sample] = self._read_searching  # Returns a sample; for the training thread
        self.layout: Layout | None = None  # Layout of the numbers once found, before samples are copies of them
        self._official, self._device, self._devices = official, device, devices
        self._reads = self._proofs = 0
        self._copy: Callable[[], bytes] | None = None
        self._checked = monotonic()
        self._compared: tuple[bytes, Stats, bytes] | None = None

    def check(self) -> None:
        """Compare a copy with the dictionary now and then, and go back to that where they differ; for the publisher.

        It does not read the dictionary: the allocator's lock, for which the interpreter's is not released, may be held
        by a training thread that is stuck in the driver. The training thread does, with its next sample.
        """
        now, copy, layout = monotonic(), self._copy, self.layout
        if copy is None or layout is None or self.read is not copy:
            return
        compared, self._compared = self._compared, None
        if compared is not None:
            self._compare(layout, *compared)
        elif now - self._checked > CHECK_SECONDS:
            self._checked = now
            self.read = partial(self._read_both, copy)

    def _read_both(self, copy: Callable[[], bytes]) -> bytes:
        before, stats, after = copy(), self._official(self._device), copy()
        self._compared = before, stats, after
        self.read = copy
        return after

    def _compare(self, layout: Layout, copy_before: bytes, stats: Stats, copy_after: bytes) -> None:
        totals = [place for place in layout.places if place[2] in ("allocated", "freed")]
        pick = layout.picker(totals)
        # Other threads may have allocated meanwhile: the dictionary's totals lie between those of the two copies.
        before, after = pick(copy_before), pick(copy_after)
        official = [value_of(stats, place) for place in totals]
        known = layout.places.keys() >= set(peaks_in(stats))  # private pools may have been added
        if not known or not all(low <= value <= high for low, value, high in zip(before, official, after, strict=True)):
            self.read = self._read_official
            guard.log("the allocator's numbers are not those that PyTorch returns: its dictionary is read again")

    def _read_official(self) -> Stats:
        return self._official(self._device)

    def _read_searching(self) -> Stats:
        """Return PyTorch's dictionary; at some samples, search for its source."""
        stats = self._official(self._device)
        self._reads += 1
        if self._reads % SEARCH_EVERY:
            return stats
        if self.layout is None or self._copy is None:
            self.layout = locate(stats, self._device, self._devices)
            self._copy = None if self.layout is None else self.layout.reader()
        elif self._equal(self.layout, self._copy(), stats):
            self._proofs += 1
        if self._proofs >= PROOFS and self._copy is not None:
            self.read = self._copy
        elif self._reads >= ATTEMPTS * SEARCH_EVERY:
            self.read = self._read_official
        return stats

    @staticmethod
    def _equal(layout: Layout, sample: bytes, stats: Stats) -> bool:
        places: list[Place] = list(layout.places)
        return list(layout.picker(places)(sample)) == [value_of(stats, place) for place in places]


def backend_of(device: str) -> str:
    """Return the default process group's backend, empty without a group.

    A group made without a named backend has one for each kind of device: then that of ``device`` (``cuda``, ``cpu``).
    """
    distributed: Any = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return ""
        backend = str(distributed.get_backend())
        if backend not in ("undefined", "custom"):
            return backend
        pairs = [pair.partition(":") for pair in str(distributed.get_backend_config()).split(",")]
        by_device = {kind: name for kind, _, name in pairs}
        return by_device.get(device) or next(iter(by_device.values()), "")
    except (RuntimeError, ValueError, AttributeError):
        return ""


class Reading(NamedTuple):
    """Bytes now, and at the highest since the reading before; -1: this back end does not measure it.

    The counts are totals since the process began.
    """

    allocated: int
    allocated_peak: int
    reserved: int
    reserved_peak: int
    active: int = -1
    active_peak: int = -1
    requested: int = -1
    requested_peak: int = -1
    resident: int = -1
    resident_peak: int = -1
    allocations: int = 0
    frees: int = 0
    allocated_bytes: int = 0
    retries: int = 0
    ooms: int = 0

    def without_peaks(self) -> "Reading":
        """Return the same figures with each peak set to the present value."""
        return self._replace(
            allocated_peak=self.allocated,
            reserved_peak=self.reserved,
            active_peak=self.active,
            requested_peak=self.requested,
            resident_peak=self.resident,
        )


class MemoryBackend(Protocol):
    """A memory back end: ``sample`` is cheap and for the training thread, ``read`` converts it on another one."""

    measure: Any
    device_index: int

    def sample(self) -> Any:
        """Sample the figures of this moment, raw, and begin a new peak."""

    def tidy(self) -> None:
        """Finish work that the training thread has deferred."""

    def read(self, sample: Any) -> Reading:
        """Convert a raw sample to a ``Reading``."""
        ...


real_getrusage: Any = resource.getrusage
highest_kib = 0
"""The highest mark, KiB, that the probe has reset or the script has read so far: ``ru_maxrss`` for the script.

The probe resets the kernel's resident high-water mark at every phase, and ``ru_maxrss`` is that mark.
"""


def note(peak_kib: int) -> None:
    """Record a high-water mark that is about to be reset."""
    global highest_kib
    if peak_kib > highest_kib:
        highest_kib = peak_kib


def forget() -> None:
    """In a fork, whose own mark begins with what is resident then: the marks were the parent's."""
    global highest_kib
    highest_kib = 0


def getrusage(who: int, /) -> Any:
    """As ``resource.getrusage``, with the true ``ru_maxrss`` of this process, which never falls."""
    usage = real_getrusage(who)
    if who != resource.RUSAGE_SELF:
        return usage
    if usage.ru_maxrss >= highest_kib:
        note(usage.ru_maxrss)
        return usage
    fields = list(usage)
    fields[2] = highest_kib
    return type(usage)(fields)


def install() -> None:
    """Replace ``resource.getrusage`` by the corrected function."""
    getrusage.__doc__ = real_getrusage.__doc__
    setattr(resource, "getrusage", getrusage)  # noqa: B010  (a C module: no declared attribute)


_MALLINFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"  # in the order of malloc.h


class _Mallinfo2(ctypes.Structure):
    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in _MALLINFO.split()]


class CpuMemory:
    """The CPU back end. ``sample`` is for the training thread, ``read`` for the publisher."""

    measure = "glibc"
    device_index = 0

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        # glibc 2.33 brought mallinfo2; elsewhere (older glibc, musl) the resident set stands in for both figures.
        self._mallinfo: Any = getattr(libc, "mallinfo2", None)
        if self._mallinfo is not None:
            self._mallinfo.restype = _Mallinfo2
            self._mallinfo.argtypes = ()
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._clear = self._open_clear()
        self._floor_kib = 0
        if self._clear is not None:
            install()
            # ru_maxrss never falls below the process's mark before exec; the kernel keeps that separately.
            inherited = real_getrusage(resource.RUSAGE_SELF).ru_maxrss
            self._floor_kib = inherited if inherited > _high_water_kib() + 1024 else 0

    def sample(self) -> tuple[int, int, int, int]:
        """Return (allocated, reserved, resident, resident peak since the last sample) in bytes; begins a new peak."""
        global highest_kib
        resident = int(os.pread(self._statm, 64, 0).split(b" ", 2)[1]) * _PAGE
        peak_kib = real_getrusage(resource.RUSAGE_SELF).ru_maxrss
        if peak_kib <= self._floor_kib:
            peak_kib = _high_water_kib()
        clear = self._clear
        if clear is not None:
            if peak_kib > highest_kib:
                highest_kib = peak_kib
            os.pwrite(clear, b"5", 0)
        elif peak_kib <= highest_kib:
            peak_kib = 0  # never reset and not raised in this phase: this phase's own peak is not known
        else:
            highest_kib = peak_kib
        if self._mallinfo is None:
            return resident, resident, resident, peak_kib * 1024
        info = self._mallinfo()
        mapped = info.hblkhd
        return info.uordblks + mapped, info.arena + mapped, resident, peak_kib * 1024

    def read(self, sample: tuple[int, int, int, int]) -> Reading:
        """Convert a sample to a ``Reading``."""
        allocated, reserved, resident, peak = sample
        peak = max(resident, peak)
        return Reading(allocated, allocated, reserved, reserved, resident=resident, resident_peak=peak)

    def tidy(self) -> None:
        """Do nothing: no work is deferred here."""

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self._statm)
        if self._clear is not None:
            os.close(self._clear)

    @staticmethod
    def _open_clear() -> int | None:
        try:
            descriptor = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            note(real_getrusage(resource.RUSAGE_SELF).ru_maxrss)
            os.pwrite(descriptor, b"5", 0)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor


def _high_water_kib() -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return 0
