"""Detects failing allocations as they fail, and reports them with everything that the rank knows.

On CUDA the allocator itself calls the handler, in the failing thread and before the stack unwinds. On the CPU the
exception is the only source: it passes a hook while its traceback keeps the frames alive.
"""

import contextlib
import math
import os
import re
import resource
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import msgspec
import torch

from ....protocol.host.machine import available_memory, memory_limit
from ....protocol.messages.telemetry import Oom, OptimizerImplementation, SegmentUse, StackGroup, Step
from ....protocol.text import duration, gib
from .. import guard
from ..device.memory import backend_of
from ..memory.composition import Roots, Storages, sum_by_part, walk
from ..memory.snapshots import PhaseMarks, take_snapshot
from ..phases.tracker import Mark, Outbox, Tracker, wall_offset_ns
from ..rank.context import RankContext
from ..rank.model import Trained
from ..values.batch import model_sizes
from .console import Hold

SEGMENTS = 256
HOLDERS = 20

_SMALL_SEGMENT = 2 * 2**20
_SMALL_REQUEST = 2**20
_ALLOCATED = "active_allocated"
_FREE = "inactive"


class Pieces(NamedTuple):
    """Free memory within reserved segments, bytes."""

    free: int
    blocks: int
    usable: int  # Free bytes in pieces that serve requests of the failed size, on its stream
    largest: int
    expandable: bool


def pieces(segments: Sequence[dict[str, Any]], requested: int, stream: int) -> Pieces:
    """Add up the free memory in segments of one device, for a request of ``requested`` bytes on a CUDA stream's handle.

    ``segments`` are from ``torch.cuda.memory._snapshot``; a small request needs a segment of 2 MiB.
    """
    free = blocks = usable = largest = 0
    expandable = any(segment.get("is_expandable", False) for segment in segments)
    small = requested <= (_SMALL_REQUEST if expandable else _SMALL_SEGMENT)
    for segment in segments:
        fits = (
            (segment["segment_type"] == "small") == small
            and segment["stream"] == stream
            and tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
        )
        for block in segment["blocks"]:
            if block["state"] != _FREE:
                continue
            size = block["size"]
            free += size
            blocks += 1
            if fits:
                usable += size
                largest = max(largest, size)
    return Pieces(free, blocks, usable, largest, expandable)


def uses(segments: Sequence[dict[str, Any]]) -> list[SegmentUse]:
    """Return the use of each segment, largest first, at most ``SEGMENTS``."""
    found: list[SegmentUse] = []
    for segment in sorted(segments, key=lambda segment: -segment["total_size"])[:SEGMENTS]:
        free = [block["size"] for block in segment["blocks"] if block["state"] == _FREE]
        flags = "s" if segment["segment_type"] == "small" else ""
        flags += "e" if segment.get("is_expandable", False) else ""
        flags += "p" if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0) else ""
        total = segment["total_size"]
        found.append(SegmentUse(total, total - sum(free), max(free, default=0), len(free), flags))
    return found


def holders(segments: Sequence[dict[str, Any]]) -> list[StackGroup]:
    """Group allocated bytes by allocating stack, most bytes first; empty if no stacks were recorded."""
    sums: dict[tuple[str, ...], list[int]] = {}
    for block in _allocated(segments):
        frames = block.get("frames") or ()
        if not frames:
            continue
        stack = tuple(f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in reversed(frames[:_FRAMES]))
        entry = sums.setdefault(stack, [0, 0, 0])
        entry[0] += block["size"]
        entry[1] += 1
        entry[2] = max(entry[2], block["size"])
    order = sorted(sums.items(), key=lambda item: -item[1][0])[:HOLDERS]
    return [StackGroup(total, count, list(stack), most) for stack, (total, count, most) in order]


def parts_of_blocks(
    segments: Sequence[dict[str, Any]],
    trace: Sequence[dict[str, Any]],
    known: Mapping[int, str],
    marks: Sequence[Mark],
    offset_ns: int,
    phase: str,
) -> tuple[dict[str, int], str]:
    """Divide the allocated bytes into the parts of ``protocol.messages.memory.PARTS``; they add up to it exactly.

    A block with a known storage belongs to that storage's part. The part of any other
    block follows from the phase of its allocation: activations in a forward, temporaries in the phase that failed.

    ``trace`` are its recorded entries, oldest first (empty where nothing was recorded), ``known`` the parts of known
    storages by address, ``marks`` those of the unfinished step, ``offset_ns`` what turns their times into nanoseconds
    since the epoch, ``phase`` the phase that failed. Return bytes by part, and the limits of their accuracy in words.
    """
    borders = [mark.ns + offset_ns for mark in marks]
    names: list[str] = []
    for mark in marks:
        names.append(mark.phase or (names[-1] if names else phase))
    born = {entry["addr"]: entry.get("time_us", 0) * 1000 for entry in trace if entry["action"] == "alloc"}
    reaches = bool(trace) and trace[0].get("time_us", 0) * 1000 <= (borders[0] if borders else 0)

    def part_of(block: dict[str, Any]) -> str:
        at = born.get(block["address"])
        index = bisect_right(borders, at) - 1 if at is not None else -1
        return _part_of(names[index] if index >= 0 else "", phase, recorded=reaches or at is not None)

    sums = sum_by_part((block["size"], known.get(block["address"]) or part_of(block)) for block in _allocated(segments))
    note = "" if reaches else "allocations were not recorded for the whole step; by the failing phase instead"
    return sums, note


def _part_of(born_in: str, phase: str, *, recorded: bool) -> str:
    if not recorded:
        return {"forward": "activations", "backward": "activations", "optimizer": "temporaries"}.get(phase, "other")
    if born_in == "forward" and phase in ("forward", "backward"):
        return "activations"
    return "temporaries" if born_in == phase and phase else "other"


def _allocated(segments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [block for segment in segments for block in segment["blocks"] if block["state"] == _ALLOCATED]


STARTS = 64
"""Number of step beginnings kept; they are thinned out evenly, so that they cover all steps since the first."""


class OomHistory:
    """The largest batch, the highest peak so far, and the allocated bytes at the beginning of steps."""

    def __init__(self) -> None:
        self.peak_bytes = self.largest_shape_step = self._largest = self._seen = 0
        self.largest_shape: list[int] = []
        self._starts: list[int] = []
        self._stride = 1

    def note(self, step: Step) -> None:
        """Record a finished step."""
        self.note_shape(step.batch_shape, step.step)
        peak = step.peak_phase
        if peak is not None:
            self.peak_bytes = max(self.peak_bytes, peak.peak_span.peak)
            if self._seen % self._stride == 0:
                self._add(step.phases[0].allocated.start)
            self._seen += 1

    def note_shape(self, shape: list[int], step: int) -> None:
        """Record the batch of a finished step; a second call changes nothing."""
        size = math.prod(shape) if shape else 0
        if size > self._largest:
            self._largest, self.largest_shape, self.largest_shape_step = size, shape, step

    def starts(self) -> list[int]:
        """Return the bytes allocated at the beginning of steps, oldest first, evenly spaced."""
        return list(self._starts)

    def _add(self, start: int) -> None:
        if len(self._starts) >= STARTS:
            self._starts = self._starts[::2]
            self._stride *= 2
            if self._seen % self._stride:
                return
        self._starts.append(start)


def peers(world_size: int) -> tuple[float, str]:
    """Return the default process group's timeout in seconds (0: not known), and the effect of a hold on it in words."""
    if world_size < 2:
        return 0.0, "there are no other ranks"
    seconds, backend = _timeout()
    waits = "the other ranks wait in their next collective"
    if not seconds:
        return 0.0, f"{waits}, and give up after their process group's timeout"
    if backend == "nccl":
        how = "NCCL's watchdog then ends their processes, and the launcher this one too"
    else:
        how = f"their collective ({backend}) then fails with an error, and the launcher ends this one too"
    return seconds, f"{waits} for at most {duration(seconds)} (the process group's timeout); {how}"


def _timeout() -> tuple[float, str]:
    dist: Any = sys.modules.get("torch.distributed")
    try:
        if dist is None or not dist.is_initialized():
            return 0.0, ""
        group = dist.distributed_c10d._get_default_group()
        backend = backend_of("cuda" if torch.cuda.is_initialized() else "cpu")
        device = torch.device("cuda" if "nccl" in backend else "cpu")
        options = group._get_backend(device).options
        return options._timeout.total_seconds(), backend
    except Exception:  # private names of PyTorch: without them the figure is not known
        return 0.0, ""


FULL_REPORTS = 3  # Number of full reports, with a snapshot each: a script may catch the error and try again many times
_FRAMES = 40
_LIMIT_SLACK = 2**20


@dataclass(slots=True)
class Failed:
    """A failed allocation as the allocator or the exception reported it; sizes in bytes."""

    requested: int
    free: int
    total: int  # The size of the device (or the host), or the process's limit if one is set
    message: str
    frames: list[FrameType]  # The stack, outermost first; empty where the allocating thread has no Python frames
    lines: list[int]
    device: int | None  # The CUDA device's index; None: the host's memory
    stack_of: Any = "failing"
    known: tuple[int, int] | None = None  # Allocated and reserved bytes from the error's own message; None: to be read


class OomReporter:
    """Reports failed allocations; for the thread whose allocation failed."""

    def __init__(
        self,
        rank: RankContext,
        tracker: Tracker,
        trained: Trained,
        outbox: Outbox,
        hold: Hold,
        history: OomHistory,
        phase_marks: PhaseMarks,
    ) -> None:
        self._rank, self._tracker, self._trained = rank, tracker, trained
        self._outbox, self._hold = outbox, hold
        self._history, self._phase_marks = history, phase_marks
        self.ooms = 0

    def send_report(self, failed: Failed) -> bool:
        """Send the report of a failed allocation; return whether the rank is to be held now."""
        if not stack_words(failed.frames, failed.lines):
            # A backward runs in threads of C++; the training thread waits for them in its call.
            failed.frames = frames_to(sys._current_frames().get(self._rank.guard.thread))
            failed.lines = [frame.f_lineno for frame in failed.frames]
            failed.stack_of = "training"
        oom = self._plain(failed)
        self.ooms += 1
        full = self.ooms <= FULL_REPORTS
        add_memory = self._add_memory if full else self._skip_memory
        for add in (self._add_history, self._add_model, add_memory, self._add_hold):
            with guard.logged(add.__name__.strip("_").replace("_", " ")):  # one part's error must not lose the rest
                oom = add(failed, oom)
        self._outbox.hand_over(oom)
        return oom.held

    def _plain(self, failed: Failed) -> Oom:
        tracker, memory, at = self._tracker, self._rank.device.memory, self._tracker.now()
        on_gpu = failed.device is not None
        if on_gpu and failed.device == memory.device_index and hasattr(memory, "now"):
            cuda: Any = memory
            now = cuda.now()
        elif on_gpu or memory.measure != "glibc":
            now = memory.read(tracker.sample)
        else:
            now = memory.read(memory.sample())
        allocated, reserved = now.allocated, now.reserved
        if failed.known is not None:
            allocated, reserved = failed.known
        elif on_gpu and memory.measure != "cuda":
            allocated, reserved = _cuda_now(failed.device)
        capacity = self._capacity(failed)
        _, _, limit = host_room()
        return Oom(
            rank=self._rank.rank,
            step=tracker.step + 1,
            phase=at.phase,
            time=time.time(),
            requested_bytes=failed.requested,
            device_free_bytes=failed.free,
            device_total_bytes=failed.total or capacity,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            batch_shape=list(tracker.notes.shape),
            message=failed.message,
            stack=stack_words(failed.frames, failed.lines),
            measure="cuda" if on_gpu else "glibc",
            stack_of=failed.stack_of,
            micro_step=at.micro_steps,
            steps_done=self._outbox.steps_done,
            capacity_bytes=capacity,
            limit="" if on_gpu else limit,
            room_bytes=failed.free,
        )

    def _capacity(self, failed: Failed) -> int:
        if failed.device is None:
            return memory_limit()
        info = self._rank.device.info
        return info.capacity_bytes if info.kind == "cuda" else failed.total

    def _add_history(self, _failed: Failed, oom: Oom) -> Oom:
        history = self._history
        for raw in self._outbox.unsent_steps():
            history.note_shape(raw.notes.shape, raw.number)
        return msgspec.structs.replace(
            oom,
            largest_shape=list(history.largest_shape),
            largest_shape_step=history.largest_shape_step,
            peak_bytes=history.peak_bytes,
            starts=history.starts(),
        )

    def _add_model(self, _failed: Failed, oom: Oom) -> Oom:
        sizes = model_sizes(self._trained)
        optimizer, implementation = _optimizer_facts(self._roots().optimizer, oom.measure)
        return msgspec.structs.replace(
            oom,
            parameter_bytes=sizes.parameter_bytes,
            trainable=sizes.trainable,
            vocabulary=sizes.vocabulary,
            optimizer=f"{optimizer} {implementation}".strip(),
            optimizer_class=optimizer,
            optimizer_implementation=implementation,
            checkpointing=bool(getattr(self._trained.model(), "is_gradient_checkpointing", False)),
        )

    def _add_memory(self, failed: Failed, oom: Oom) -> Oom:
        if failed.device is None:
            return self._add_host_memory(oom)
        capacity = self._capacity(failed)
        limited = failed.total < capacity - _LIMIT_SLACK
        room = min(failed.free, max(0, failed.total - oom.reserved_bytes)) if limited else failed.free
        oom = msgspec.structs.replace(
            oom,
            room_bytes=room,
            limit=f"torch.cuda.set_per_process_memory_fraction allows {gib(failed.total)}" if limited else "",
        )
        found: Any = torch.cuda.memory._snapshot()
        segments = [segment for segment in found["segments"] if segment["device"] == failed.device]
        traces = found["device_traces"]
        trace = traces[failed.device] if failed.device < len(traces) else []
        stream = torch.cuda.current_stream(failed.device).cuda_stream
        free = pieces(segments, failed.requested, stream)
        known = {address: held.part for address, held in self._storages(failed.device).held.items()}
        offset_ns = wall_offset_ns()
        parts, note = parts_of_blocks(segments, trace, known, self._tracker.present_marks(), offset_ns, oom.phase)
        step = self._tracker.step + 1
        self._phase_marks.annotate(found, failed.device, step, self._tracker.present_marks())
        taken, trouble = take_snapshot(self._rank, found, step, "oom")
        if taken is not None:
            self._outbox.hand_over(taken)
        return msgspec.structs.replace(
            oom,
            reserved_free_bytes=free.free,
            free_blocks=free.blocks,
            largest_free_bytes=free.largest,
            usable_free_bytes=free.usable,
            expandable=free.expandable,
            parts=parts,
            parts_note=note,
            holders=holders(segments),
            segments=uses(segments),
            snapshot=f"snapshots/{os.path.basename(taken.path)}" if taken is not None else "",
            snapshot_note=trouble,
        )

    def _add_host_memory(self, oom: Oom) -> Oom:
        note = "the CPU has no allocator that could be recorded"
        parts = self._storages(None).by_part()
        rest = oom.allocated_bytes - sum(parts.values())
        if rest < 0:  # tensors that are mapped from files, or shared, are not malloc's
            return msgspec.structs.replace(oom, snapshot_note=note)
        return msgspec.structs.replace(
            oom,
            snapshot_note=note,
            parts={**parts, "unattributed": rest} if rest else parts,
            parts_note="the CPU has no trace of allocations: what is no known storage is not attributed",
        )

    def _storages(self, cuda_index: int | None) -> Storages:
        found = Storages(cuda_index)
        walk(self._roots(), found)
        return found

    def _skip_memory(self, _failed: Failed, oom: Oom) -> Oom:
        note = f"only the first {FULL_REPORTS} out-of-memory errors of a process have a snapshot"
        return msgspec.structs.replace(oom, snapshot_note=note)

    def _add_hold(self, _failed: Failed, oom: Oom) -> Oom:
        hold = self._hold
        if not hold.wanted:
            return oom
        seconds, words = peers(self._rank.world_size)
        return msgspec.structs.replace(
            oom,
            held=not hold.since,
            hold_seconds=hold.seconds,
            console=hold.console_allowed,
            peer_timeout_s=seconds,
            others=words,
        )

    def _roots(self) -> Roots:
        return Roots(self._trained.engine(), self._trained.model(), self._trained.primary())


def stack_words(frames: Sequence[FrameType], lines: Sequence[int]) -> list[str]:
    """Return frames as ``file:line function``, innermost last, without the probe's own."""
    own = os.path.dirname(os.path.dirname(__file__))
    return [
        f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}"
        for frame, line in zip(frames, lines, strict=True)
        if not frame.f_code.co_filename.startswith(own + os.sep)
    ][-_FRAMES:]


def host_room() -> tuple[int, int, str]:
    """Return the host's available memory, this process's share of it, and the limit in words (or empty)."""
    available = available_memory()
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return available, memory_limit(), ""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    if limit - used >= available:
        return available, memory_limit(), ""
    return available, memory_limit(), f"RLIMIT_AS (ulimit -v) is {gib(limit)}, of which {gib(used)} are in use"


def _cuda_now(device: int | None) -> tuple[int, int]:
    try:
        return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    except Exception as error:
        guard.log_error("reading the device's memory", error)
        return 0, 0


def _optimizer_facts(optimizer: Any, measure: str) -> tuple[str, OptimizerImplementation]:
    if optimizer is None:
        return "", ""
    name = type(optimizer).__name__
    settings = getattr(optimizer, "defaults", {})
    if settings.get("fused"):
        return name, "fused"
    if "foreach" not in settings:
        return name, ""
    # With neither set, PyTorch uses foreach for tensors on a GPU, and a loop elsewhere.
    foreach = settings["foreach"]
    return name, "foreach" if foreach or (foreach is None and measure == "cuda") else "for-loop"


def frames_to(frame: FrameType | None) -> list[FrameType]:
    """List the frames that lead to ``frame``, outermost first."""
    found: list[FrameType] = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


_CPU_MESSAGE = re.compile(r"not enough memory|can't allocate memory|Cannot allocate memory", re.IGNORECASE)
_CPU_SIZE = re.compile(r"tried to allocate (\d+) bytes")
_CUDA_FIGURES = {
    "requested": re.compile(r"Tried to allocate ([\d.]+) ([KMGT]?i?B|bytes)"),
    "total": re.compile(r"total capacity of ([\d.]+) ([KMGT]?i?B)"),
    "free": re.compile(r"of which ([\d.]+) ([KMGT]?i?B|bytes) is free"),
    "allocated": re.compile(r"([\d.]+) ([KMGT]?i?B|bytes) is allocated by PyTorch"),
    "unallocated": re.compile(r"([\d.]+) ([KMGT]?i?B|bytes) is reserved by PyTorch but unallocated"),
}
"""PyTorch's own message (c10/cuda/CUDACachingAllocator.cpp)."""
_CUDA_INDEX = re.compile(r"\bGPU (\d+)")
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DRIVER_MESSAGE = re.compile(r"CUDA error: out of memory|CUDA driver error: out of memory|Cuda failure .*out of memory")


class AllocationFailures:
    """Detects failing allocations, and holds the rank if requested."""

    def __init__(
        self, rank: RankContext, reporter: OomReporter, hold: Hold, check_device: Callable[[], object]
    ) -> None:
        self._rank, self._reporter = rank, reporter
        self._hold, self._check_device = hold, check_device
        self._watching = False

    def await_cuda(self) -> None:
        """Make PyTorch's allocator report failures as soon as the script has CUDA running.

        A model that does not fit fails before any hook sees the device: in ``from_pretrained`` under ``zero.Init``, in
        ``deepspeed.initialize``. PyTorch calls functions queued here in the thread that initialises CUDA.
        """
        lazy_call: Any = getattr(torch.cuda, "_lazy_call", None)
        if torch.version.cuda is None or lazy_call is None:
            return

        # An error would be raised from the script's own call.
        lazy_call(guard.logged("watching CUDA's allocator")(self.watch_cuda))

    def watch_cuda(self) -> None:
        """Make PyTorch's allocator report every failing allocation (the script may catch the error and go on)."""
        if self._watching:
            return
        self._watching = True
        core: Any = torch._C

        def observe(device: int, requested: int, total: int, free: int) -> None:
            # The allocator's lock is not held here, and this is the thread whose allocation failed.
            if self._hold.here:
                return  # tried by a console, which shows the failure
            with guard.logged("reporting an out-of-memory error"):
                if not self._rank.device.settled and self._rank.guard.is_training_thread():
                    self._check_device()
                frames = frames_to(sys._getframe(0).f_back)
                lines = [frame.f_lineno for frame in frames]
                failed = Failed(requested, free, total, f"CUDA out of memory on device {device}", frames, lines, device)
                self._report(failed)

        core._cuda_attach_out_of_memory_observer(observe)

    def report(self, error: BaseException) -> None:
        """Report an exception of the CPU allocator; other exceptions and repetitions are ignored.

        Also reports driver allocations outside PyTorch's allocator (NCCL, pinned memory).
        """
        if getattr(error, "_ftmon_seen", False):
            return
        if type(error).__name__ == "OutOfMemoryError" and isinstance(error, RuntimeError) and not self._reporter.ooms:
            failed = _from_message(error)
        else:
            failed = self._outside_cuda(error)
        if failed is not None:
            with contextlib.suppress(AttributeError):
                error._ftmon_seen = True  # type: ignore[attr-defined]
            self._report(failed)

    def _outside_cuda(self, error: BaseException) -> Failed | None:
        text = str(error)
        driver = isinstance(error, RuntimeError) and bool(_DRIVER_MESSAGE.search(text))
        on_cpu = isinstance(error, RuntimeError) and "CUDA" not in text and bool(_CPU_MESSAGE.search(text))
        if not (driver or on_cpu or isinstance(error, MemoryError)):
            return None
        size = _CPU_SIZE.search(text)
        requested = int(size.group(1)) if size else 0
        available, total, _ = host_room()
        index = None
        if driver and self._rank.device.memory.measure == "cuda":
            index = self._rank.device.memory.device_index
            available, total = torch.cuda.mem_get_info(index)
        return Failed(requested, available, total, text or type(error).__name__, *frames_of(error.__traceback__), index)

    def _report(self, failed: Failed) -> None:
        if self._reporter.send_report(failed):
            device = torch.device("cpu") if failed.device is None else torch.device("cuda", failed.device)
            self._hold.wait(failed.frames, failed.requested, device)


def _from_message(error: RuntimeError) -> Failed:
    """Read PyTorch's error, if its allocator reported none: CUDA started unseen, or another allocator failed."""
    text = str(error)
    found = {name: _bytes_in(pattern, text) for name, pattern in _CUDA_FIGURES.items()}
    index = _CUDA_INDEX.search(text)
    device = int(index.group(1)) if index else 0
    known = (found["allocated"], found["allocated"] + found["unallocated"]) if found["allocated"] else None
    sizes = (found["requested"], found["free"], found["total"])
    return Failed(*sizes, text, *frames_of(error.__traceback__), device, known=known)


def _bytes_in(pattern: "re.Pattern[str]", text: str) -> int:
    found = pattern.search(text)
    return int(float(found[1]) * _UNITS[found[2]]) if found is not None else 0


def frames_of(trace: TracebackType | None) -> tuple[list[FrameType], list[int]]:
    """List the frames of a traceback, those above it included, outermost first, and the line each was at.

    A frame may have continued after the exception (in a ``finally``), so its line is the traceback's.
    """
    if trace is None:
        return [], []
    found = frames_to(trace.tb_frame.f_back)
    lines = [frame.f_lineno for frame in found]
    while trace is not None:
        found.append(trace.tb_frame)
        lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return found, lines
