"""The device of a rank: memory and clock of a GPU, and copies from it that the training thread never waits for.

A phase's peak needs the allocator's peaks reset at the phase's start. The script under observation may read and reset
the same counters, so the two entry points behind ``torch.cuda.memory_stats`` and ``reset_peak_memory_stats`` are
wrapped: the script still gets the peaks since *its own* last reset.
"""

import ctypes
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy
import torch

from ....protocol.host.machine import cpu_model, memory_limit
from ....protocol.messages.telemetry import DeviceInfo
from .. import guard
from ..guard import replace
from . import memory
from .memory import CpuMemory, Layout, MemoryBackend, Place, Reading, Sample, Stats, StatsSource

_READ = ("_cuda_memoryStats", "_accelerator_getDeviceStats")
_RESET = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")
_APPLY_AT_LATEST = 4096

_NOW = ("current", "peak")
_FIGURES: list[Place] = [
    *((f"{kind}_bytes", "all", figure) for kind in ("allocated", "reserved", "active", "requested") for figure in _NOW),
    *(("allocation", "all", figure) for figure in ("allocated", "freed")),
    ("allocated_bytes", "all", "allocated"),
    *((name, "", "") for name in ("num_alloc_retries", "num_ooms")),
]
"""Statistics of a ``Reading``, in its order; the resident set (after the first eight) is no part of them."""

Pick = Callable[[bytes], tuple[int, ...]]


class ScriptPeaks:
    """The peaks the script would see without ftmon: the highest of all samples since its own last reset."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque()  # Taken just before the probe reset the peaks; the first is a dictionary
        self._places: list[Place] = []
        self._highest: list[int] = []
        self._copied: Any = None
        self._lock = threading.Lock()

    def restart(self) -> None:
        """Discard the earlier peaks: the script has reset them."""
        with self._lock:
            self.samples.clear()
            self._highest.clear()
            self._copied = None

    def raise_in(self, stats: Stats, layout: Layout | None = None) -> Stats:
        """Raise every peak in a fresh ``stats`` to its value without the probe's resets; return ``stats``."""
        self.apply_samples()
        highest = dict(zip(self._places, self._highest, strict=False))
        copied = self._copied
        if layout is not None and copied is not None:
            for place in self._places:
                highest[place] = max(highest.get(place, 0), int(copied[layout.places[place]]))
        for (name, pool, _), peak in highest.items():
            group = stats.get(name, {})
            figures = group.get(pool, {}) if pool else group
            if figures.get("peak", peak) < peak:
                figures["peak"] = peak
        return stats

    def apply_samples(self) -> None:
        """Reduce the samples to their highest; the publisher does it now and then, to spare the training thread."""
        copies: list[bytes] = []
        with self._lock:
            while self.samples:
                sample = self.samples.popleft()
                if isinstance(sample, bytes):
                    copies.append(sample)
                    continue
                self._places = self._places or memory.peaks_in(sample)
                peaks = [memory.value_of(sample, place) for place in self._places]
                self._highest = list(map(max, self._highest, peaks)) if self._highest else peaks
            if copies:
                highest = numpy.frombuffer(b"".join(copies), numpy.int64).reshape(len(copies), -1).max(axis=0)
                self._copied = highest if self._copied is None else numpy.maximum(self._copied, highest)


class CudaMemory:
    """The CUDA back end for one of the ``devices`` that the process sees; ``core`` is the ``torch._C`` module.

    ``on_script_reset`` is called with the figures as they were, just before the script's own reset takes place.
    """

    measure = "cuda"

    def __init__(self, core: Any, device: int, devices: int, on_script_reset: Callable[[Stats], None]) -> None:
        self.device_index = device
        self._stats: Callable[[int], Stats] = core._cuda_memoryStats
        self._reset: Callable[[int], None] = core._cuda_resetPeakMemoryStats
        self._source = StatsSource(self._stats, device, devices)
        self._pick: Pick | None = None
        self._script = ScriptPeaks()
        self._samples = self._script.samples
        self._on_script_reset = on_script_reset
        self._wrap(core)

    def sample(self) -> Sample:
        """Return the allocator's statistics and begin new peaks."""
        found = self._source.read()
        self._reset(self.device_index)
        samples = self._samples  # not by a method: runs where every cache is cold
        samples.append(found)
        if len(samples) >= _APPLY_AT_LATEST:
            self._script.apply_samples()
        return found

    def read(self, sample: Sample) -> Reading:
        """Pick the figures ftmon shows out of the allocator's statistics; an empty one is that of a fresh process."""
        if not sample:
            return Reading(0, 0, 0, 0, 0, 0, 0, 0)
        if isinstance(sample, dict):
            figures = tuple(memory.value_of(sample, place) for place in _FIGURES)
        else:
            if self._pick is None:
                assert self._source.layout is not None
                self._pick = self._source.layout.picker(_FIGURES)
            figures = self._pick(sample)
        return Reading._make((*figures[:8], -1, -1, *figures[8:]))

    def tidy(self) -> None:
        """Finish work that the training thread has deferred; for the publisher."""
        self._script.apply_samples()
        self._source.check()

    def now(self) -> Reading:
        """Read the figures of this moment without touching the peaks."""
        return self.read(self._stats(self.device_index))

    def _wrap(self, core: Any) -> None:
        for names, wrapped in ((_READ, self._reading), (_RESET, self._resetting)):
            for name in names:
                if hasattr(core, name):
                    setattr(core, name, wrapped(getattr(core, name)))

    def _reading(self, real: Callable[[int], Stats]) -> Callable[[int], Stats]:
        def stats(device: int) -> Stats:
            found = real(device)
            return self._script.raise_in(found, self._source.layout) if device == self.device_index else found

        return stats

    def _resetting(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def reset(device: int) -> None:
            if device == self.device_index:
                self._on_script_reset(self._stats(device))
                self._script.restart()
            real(device)

        return reset


_RELAXED = 2  # ``CU_STREAM_CAPTURE_MODE_RELAXED``
under_way = 0
"""Number of captures of CUDA graphs that have begun and not ended; work recorded into one would be replayed for ever.

A query of the stream costs 3 us at each phase boundary, where every cache is cold. Every capture from Python goes
through ``torch.cuda.CUDAGraph``, so its two methods are wrapped once, and the query is a read of a number.
"""
has_captured = False
"""Whether a capture has begun since the probe did: a replay overwrites its graph's outputs, which no version shows."""
_captures = threading.Lock()  # Held while a capture begins, and while the publisher copies on the trained stream


def install() -> None:
    """Wrap ``torch.cuda.CUDAGraph``, once; CUDA is running."""
    graph: Any = torch.cuda.CUDAGraph
    with guard.logged("captures of CUDA graphs are not noticed"):
        replace(graph, "capture_begin", _beginning)
        replace(graph, "capture_end", _ending)


def allow_queries() -> None:
    """Let this thread query events while another captures a graph: by default that breaks the capture.

    The mode is the thread's own (``cuThreadExchangeStreamCaptureMode`` of the CUDA driver API); PyTorch's watchdog of
    NCCL does the same.
    """
    with guard.logged("events cannot be asked for during captures of CUDA graphs"):
        driver: Any = ctypes.CDLL("libcuda.so.1")
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


def _beginning(real: Callable[..., Any]) -> Callable[..., Any]:
    def capture_begin(*args: Any, **kwargs: Any) -> Any:
        global under_way, has_captured
        with _captures:
            under_way += 1
            has_captured = True
        try:
            return real(*args, **kwargs)
        except BaseException:
            under_way -= 1
            raise

    return capture_begin


def _ending(real: Callable[..., Any]) -> Callable[..., Any]:
    def capture_end(*args: Any, **kwargs: Any) -> Any:
        global under_way
        try:
            return real(*args, **kwargs)
        finally:
            under_way = max(0, under_way - 1)

    return capture_end


class CudaEvents:
    """Device times: a pool of timing events, recorded at phase boundaries and read when they have passed.

    ``mark`` is for the training thread, the rest for the publisher.
    """

    def __init__(self, device: int) -> None:
        core: Any = torch._C
        install()
        self._device = device
        self._new: Any = torch.cuda.Event
        self._record: Any = core._CudaEventBase.record
        self._raw_stream: Any = core._cuda_getCurrentRawStream
        self._current_stream: Any = torch.cuda.current_stream
        self._streams: dict[int, Any] = {}
        self._free: deque[Any] = deque()

    def mark(self) -> Any:
        """Record an event on the current stream; None inside a CUDA graph capture."""
        if under_way:
            return None
        try:
            event = self._free.pop()
        except IndexError:
            event = self._new(enable_timing=True)
        self._record(event, self.stream())
        return event

    def stream(self) -> Any:
        """Return the current stream."""
        # Making a Stream object costs more than recording, so the few Stream objects are kept.
        raw = self._raw_stream(self._device)
        stream = self._streams.get(raw)
        if stream is None:
            stream = self._streams[raw] = self._current_stream(self._device)
        return stream

    def recycle(self, event: Any) -> None:
        """Return an event to the pool once no reader is left."""
        if event is not None:
            self._free.append(event)


def has_passed(event: Any) -> bool:
    """Return whether the device has passed an event (None: yes); RuntimeError: it is in an error state."""
    return event is None or bool(event.query())


def elapsed_us(start: Any, end: Any) -> int | None:
    """Device time between two passed events in microseconds; None when either is missing or cannot be read."""
    if start is None or end is None:
        return None
    try:
        return max(0, round(start.elapsed_time(end) * 1000))
    except RuntimeError:
        return None


class Device:
    """The device that this rank computes on, its memory back end and clock: the CPU until the script has CUDA running.

    CUDA is never initialised from here: a script that forks, or means to train on the CPU, must stay able to.
    """

    def __init__(self) -> None:
        self.memory: MemoryBackend = CpuMemory()
        self.mark_event: Callable[[], Any] = guard.nothing
        self.events: Any = None
        self.blank: Any = {}  # The raw CUDA sample of a process that has allocated nothing yet
        self.settled = False  # Whether the device is final, so that hooks stop checking
        local_rank = int(os.environ.get("LOCAL_RANK", "0") or 0)
        self.info = DeviceInfo("cpu", local_rank, cpu_model(), memory_limit())

    def settle(self, on_script_reset: Callable[[Any], None]) -> bool:
        """Check whether the script has CUDA running; return whether the back end changed."""
        if torch.version.cuda is None:
            self.settled = True
            return False
        if not torch.cuda.is_initialized():
            return False
        core: Any = torch._C
        index = torch.cuda.current_device()
        self.settled = True
        self.events = CudaEvents(index)
        self.memory = CudaMemory(core, index, torch.cuda.device_count(), on_script_reset)
        self.mark_event = self.events.mark
        properties: Any = torch.cuda.get_device_properties(index)
        uuid = str(getattr(properties, "uuid", ""))
        if uuid and not uuid.startswith("GPU-"):
            uuid = f"GPU-{uuid}"  # as NVML writes it
        self.info = DeviceInfo("cuda", index, properties.name, int(properties.total_memory), uuid)
        return True


# ``Tensor.copy_`` costs 29 us at a phase boundary, where every cache is cold, the driver's own call 16 us (measured
# on an H200). So the copy into pinned memory is the driver's, ``cuMemcpyDtoHAsync`` (CUDA Driver API, "Memory
# Management"), on the current stream, with nothing allocated on the device (so the script's peaks stay what they are).
# The publisher reads it once the step's last event has passed. The host's buffers are never returned to PyTorch: an
# unread copy may still be in flight. They are reused instead, the one that has been free for longest first, up to a
# limit of memory.

SMALLEST = 64
MOST_BYTES = 64 * 2**20  # Limit of all buffers, beyond which nothing is fetched: a lost figure costs less than memory

_SCALAR = torch.Size(())

_free: dict[int, "deque[_Buffer]"] = {}
_scalars: "deque[_Buffer]" = deque()
_unread: "list[_Buffer]" = []
"""Of scalars that were dropped before their copies were there: kept, as memory that is freed may be another's."""
_total = 0
_is_sought = False
_driver: Any = None  # The driver's copy; None: not sought yet, or not to be had. With it come two functions of PyTorch.
_stream_of: Any = None
_current: Any = None


class _Buffer(NamedTuple):
    """Pinned bytes of the host, and where they are."""

    tensor: Any
    address: int
    free: "deque[_Buffer]"
    head: Any = None  # The first bytes of a scalar's buffer, by which its arrival is seen


_UNREAD = b"\xa5\xff" * 4
"""What a scalar's buffer has until the copy arrives. As a float of up to 32 bits that is a NaN with a payload that no
computation makes, as a boolean it is neither."""


_FORMATS = {torch.float32: "<f", torch.bfloat16: "<f", torch.float16: "<e", torch.float64: "<d", torch.bool: "<?"}
"""Of scalars in bytes, for ``struct``; a bfloat16 is the upper half of a float32."""


class Fetched(NamedTuple):
    """A tensor on its way to the host. Whoever drops it, read or not, returns its buffer."""

    buffer: _Buffer
    dtype: Any
    shape: Any

    def __del__(self) -> None:
        buffer = self.buffer
        if buffer.head is not None:
            if not self.arrived():
                _unread.append(buffer)  # the copy is still to come, into the next one's number
                return
            buffer.head.raw = _UNREAD
        buffer.free.append(buffer)

    def arrived(self) -> bool:
        """Return whether a scalar is here; of other tensors an event after the copy shows that."""
        size = self.dtype.itemsize
        return self.buffer.head is None or self.buffer.head.raw[:size] != _UNREAD[:size]

    def number(self) -> float:
        """Return the scalar as ``float(tensor())``, but without operations of PyTorch, which give up the lock."""
        head, form = self.buffer.head, _FORMATS.get(self.dtype)
        if head is None or form is None:
            return float(self.tensor())
        raw = head.raw[: self.dtype.itemsize]
        return float(struct.unpack(form, raw if self.dtype is not torch.bfloat16 else b"\0\0" + raw)[0])

    def tensor(self) -> Any:
        """Return the tensor on the host, valid while this object lives; the stream must have passed the copy."""
        size = self.dtype.itemsize * self.shape.numel()
        return self.buffer.tensor[:size].view(self.dtype).view(self.shape)


arrays = 0  # Number of copies so far whose arrival only an event shows


def fetch(tensor: Any) -> Fetched | None:
    """Begin to copy a CUDA tensor to the host; None while a graph is captured, or if too many copies are in flight."""
    global arrays
    if under_way:
        return None
    arrays += 1
    size = tensor.nbytes
    size = SMALLEST if size <= SMALLEST else 1 << (size - 1).bit_length()
    free = _free.get(size)
    buffer = free.popleft() if free else _make(size)
    return None if buffer is None else _begin_copy(buffer, tensor, tensor.dtype, tensor.shape)


def fetch_scalar(tensor: Any) -> Fetched | None:
    """Begin to copy a CUDA tensor of one element, as ``fetch`` does; ``Fetched.arrived`` shows its end."""
    if under_way:
        return None
    try:
        buffer = _scalars.popleft()
    except IndexError:  # not asked before: another thread may take the last one
        buffer = _make(0)
    return None if buffer is None else _begin_copy(buffer, tensor, tensor.dtype, _SCALAR)


def _make(size: int) -> _Buffer | None:
    """Return a new buffer; of size 0: of a scalar."""
    global _total
    own = size or SMALLEST
    if _total + own > MOST_BYTES:
        return None
    # A script may have set another default device, on which memory cannot be pinned.
    tensor: Any = torch.empty(own, dtype=torch.uint8, device="cpu", pin_memory=True)
    _total += own
    address = tensor.data_ptr()
    if size:
        return _Buffer(tensor, address, _free.setdefault(size, deque()))
    head = (ctypes.c_char * len(_UNREAD)).from_address(address)
    head.raw = _UNREAD
    return _Buffer(tensor, address, _scalars, head)


def _begin_copy(buffer: _Buffer, tensor: Any, dtype: Any, shape: Any) -> Fetched:
    """Begin to copy a tensor into a buffer by the driver; PyTorch does where the driver cannot."""
    if not _is_sought:
        _find_driver()
    device = tensor.get_device()
    if _driver is not None and device == _current() and (shape is _SCALAR or tensor.is_contiguous()):
        size = dtype.itemsize if shape is _SCALAR else dtype.itemsize * shape.numel()
        if _driver(buffer.address, tensor.data_ptr(), size, _stream_of(device)) == 0:
            return Fetched(buffer, dtype, shape)
    fetched = Fetched(buffer, dtype, shape)
    fetched.tensor().copy_(tensor.detach().view(shape), non_blocking=True)
    return fetched


def _find_driver() -> None:
    global _driver, _stream_of, _current, _is_sought
    _is_sought = True
    try:
        copy: Any = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoHAsync_v2
    except (OSError, AttributeError) as error:
        guard.log_error("the driver's copy is not to be had", error)
        return
    copy.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    copy.restype = ctypes.c_int
    core: Any = torch._C
    _driver, _stream_of, _current = copy, core._cuda_getCurrentRawStream, core._cuda_getDevice


class Kept:
    """A CUDA scalar that stays on the device until ``fetch_kept`` copies it, usually in the publisher's thread."""

    __slots__ = ("_version", "copied", "copy", "tensor")

    def __init__(self, tensor: Any) -> None:
        self.tensor: Any = tensor.detach()  # None once it has been copied
        self._version: int = tensor._version
        self.copy: Fetched | None = None
        self.copied: Any = None  # An event after the copy

    def arrived(self) -> bool:
        """Return whether the scalar is here, or never will be."""
        if self.tensor is not None:
            return False
        if not isinstance(self.copy, Fetched) or self.copy.arrived():
            return True
        try:
            return self.copied is not None and has_passed(self.copied)
        except RuntimeError:  # the device is in an error state
            return True

    def fetch(self) -> bool:
        """Begin to copy the scalar unless it was overwritten, or is none."""
        tensor, self.tensor = self.tensor, None
        if tensor._version != self._version or tensor.numel() != 1:
            return False
        self.copy = fetch_scalar(tensor)
        return True

    def is_overwritten(self) -> bool:
        """Return whether the scalar was overwritten since it was kept."""
        return self.tensor is not None and self.tensor._version != self._version


def can_be_kept(tensor: Any) -> bool:
    """Return whether a tensor holds no larger one's memory, and is seen to be overwritten."""
    return not (has_captured or tensor._is_view() or tensor.is_inference())


def fetch_kept(kept: list[Kept], *, at_once: bool = False) -> bool:
    """Begin to copy scalars, and empty the list; return False if some were overwritten, which are not read.

    ``at_once``: if the device has done all its work, as after a script has read a value, the copies are waited for.
    """
    found, kept[:] = list(kept), []
    try:
        is_done, copied = at_once and not under_way and is_idle(), None
        complete = [each.fetch() for each in found]
        if is_done:
            torch.cuda.current_stream().synchronize()
        elif not under_way:
            copied = torch.cuda.Event()
            copied.record()
    except RuntimeError:  # the device is in an error state, which the script will see
        for each in found:
            each.tensor = each.copy = None
        return False
    for each in found:
        each.copied = copied
    return all(complete)


def fetch_kept_on(stream: Any, kept: list[Kept]) -> bool | None:
    """Do what ``fetch_kept`` does on the stream of another thread; None, and nothing is done, during a capture."""
    with _captures:
        if under_way:
            return None
        torch.cuda.set_stream(stream)  # for this thread, with its device
        return fetch_kept(kept)


def is_idle() -> bool:
    """Return whether the device has done all the work of the current stream."""
    return torch.cuda.current_stream().query()


ON_ITS_WAY = (Fetched, Kept)


def arrived(values: Iterable[Any]) -> bool:
    """Return whether scalars on their way from the device are here."""
    return all(value.arrived() for value in values if isinstance(value, ON_ITS_WAY))


_NUMBERS = (int, float, *ON_ITS_WAY)


def fetch_values(value: Any, scalar: Callable[[Any], Any] | None = None) -> Any:
    """Begin to fetch a tensor of one element; return what ``read`` reads, or None if it is no scalar.

    Numbers and results of ``fetch_scalar`` are returned unchanged. ``scalar`` is called in place of ``fetch_scalar``.

    A DTensor that is not the same on all ranks is no scalar: the probe enters no collective.
    """
    if type(value) is torch.Tensor and value.is_cuda and value.numel() == 1:
        return fetch_scalar(value) if scalar is None else scalar(value)
    if value is None or isinstance(value, _NUMBERS):
        return value
    return _fetch_other(value)


def _fetch_other(value: Any) -> Any:
    if not hasattr(value, "data_ptr"):
        return None
    if (local := getattr(value, "_local_tensor", None)) is not None:
        if not all(placement.is_replicate() for placement in value.placements):
            return None
        value = local
    if value.numel() != 1:
        return None
    return fetch_scalar(value) if value.is_cuda else float(value.item())


def fetch_count(mask: Any, later: bool = False) -> Any:
    """Begin to count a mask's non-zero elements (a DTensor's: this rank's part); return the argument of ``read_count``.

    None if the mask cannot be read. ``later``: defer the counting of a mask on the CPU to ``read_count``: there the
    host's memory is not measured.
    """
    mask = getattr(mask, "_local_tensor", mask)
    if mask.is_cuda:
        return fetch(mask)
    return mask.detach() if later else _count(mask)


def read(value: Any) -> float | None:
    """Read a result of ``fetch``; None for None, and for what cannot be read or has not arrived."""
    if isinstance(value, Kept):
        value = value.copy
    if not isinstance(value, Fetched):
        return None if value is None else float(value)
    if not value.arrived():
        return None
    try:
        return value.number()
    except (TypeError, ValueError, RuntimeError):
        return None


def arrived_value(value: Any) -> float | None:
    """Return a result of ``fetch_values`` if it is here; for any thread, without a wait."""
    return None if isinstance(value, ON_ITS_WAY) and not value.arrived() else read(value)


def read_count(value: Any) -> int:
    """Read a result of ``fetch_count``; the copy must have finished."""
    if isinstance(value, int):
        return value
    return _count(value.tensor() if isinstance(value, Fetched) else value)


def _count(mask: Any) -> int:
    mask = mask.detach()
    try:
        return int(numpy.count_nonzero(mask.numpy()))  # a tenth of the cost of a torch operator
    except TypeError:  # numpy has no bfloat16
        return int(torch.count_nonzero(mask))
