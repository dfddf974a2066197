"""Reports a failed allocation with everything that the rank knows, collected before Python unwinds."""

import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import msgspec

from ....protocol.host.host_memory import available_memory, memory_limit
from ....protocol.messages.oomevent import Oom, OptimizerImplementation
from ....protocol.messages.telemetry import SnapshotTaken
from ....protocol.text import gib
from .. import guard
from ..memory.annotations import PhaseMarks
from ..memory.composition.storages import Storages
from ..memory.composition.walk import Roots, walk
from ..memory.snapshot_file import write_snapshot
from ..phases.marks import wall_offset_ns
from ..phases.outbox import Outbox
from ..phases.tracker import Tracker
from ..rank.context import RankContext
from ..rank.trained import Trained
from ..values.sizes import model_sizes
from . import blocks
from .history import OomHistory
from .hold import Hold
from .peers import peers

FULL_REPORTS = 3
"""Number of full reports, with a snapshot each: a script may catch the error and try again many times."""
_FRAMES = 40
_LIMIT_SLACK = 2**20


@dataclass(slots=True)
class Failed:
    """A failed allocation as the allocator or the exception reported it."""

    requested: int
    """Bytes."""
    free: int
    """Bytes that the device (or the host) had free."""
    total: int
    """Bytes of the device (or the host), or the process's limit if one is set."""
    message: str
    frames: list[FrameType]
    """The stack, outermost first; empty where the allocating thread has no Python frames."""
    lines: list[int]
    """The line each frame is at."""
    device: int | None
    """The CUDA device's index; None: the host's memory."""
    stack_of: Any = "failing"
    known: tuple[int, int] | None = None
    """Allocated and reserved bytes from the error's own message; None: to be read."""


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
        self._rank = rank
        self._tracker = tracker
        self._trained = trained
        self._outbox = outbox
        self._hold = hold
        self._history = history
        self._phase_marks = phase_marks
        self.ooms = 0
        """Allocations that failed so far."""

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
        for add in (
            self._add_history,
            self._add_model,
            self._add_memory if full else self._skip_memory,
            self._add_hold,
        ):
            try:
                oom = add(failed, oom)
            except Exception as error:  # an error in one part must not lose the rest
                guard.log_error(add.__name__.strip("_").replace("_", " "), error)
        self._outbox.hand_over(oom)
        return oom.held

    def _plain(self, failed: Failed) -> Oom:
        tracker, memory = self._tracker, self._rank.device.memory
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
        capacity = memory_limit()
        if on_gpu:
            capacity = self._rank.device.info.capacity_bytes if self._rank.device.info.kind == "cuda" else failed.total
        _, _, limit = host_room()
        return Oom(
            rank=self._rank.rank,
            step=tracker.step + 1,
            phase=tracker.phase,
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
            micro_step=tracker.notes.micro_steps,
            steps_done=self._outbox.steps_done,
            capacity_bytes=capacity,
            limit="" if on_gpu else limit,
            room_bytes=failed.free,
        )

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
        import torch

        capacity = self._rank.device.info.capacity_bytes if self._rank.device.info.kind == "cuda" else failed.total
        limited = failed.total < capacity - _LIMIT_SLACK
        room = min(failed.free, max(0, failed.total - oom.reserved_bytes)) if limited else failed.free
        oom = msgspec.structs.replace(
            oom,
            room_bytes=room,
            limit=f"torch.cuda.set_per_process_memory_fraction allows {gib(failed.total)}" if limited else "",
        )
        memory: Any = torch.cuda.memory
        found = memory._snapshot()
        segments = [segment for segment in found["segments"] if segment["device"] == failed.device]
        traces = found["device_traces"]
        trace = traces[failed.device] if failed.device < len(traces) else []
        stream = torch.cuda.current_stream(failed.device).cuda_stream
        free = blocks.pieces(segments, failed.requested, stream)
        known = {address: held.part for address, held in self._storages(failed.device).held.items()}
        offset_ns = wall_offset_ns()
        parts, note = blocks.parts(segments, trace, known, self._tracker.marks, offset_ns, oom.phase)
        step = self._tracker.step + 1
        self._phase_marks.annotate(found, failed.device, step, list(self._tracker.marks))
        name = f"rank-{self._rank.rank}-step-{step}-oom-{time.strftime('%H%M%S')}.pickle"
        path, size, trouble = write_snapshot(self._rank.run.snapshots / name, found)
        if path is not None:
            entries = sum(map(len, found["device_traces"]))
            self._outbox.hand_over(SnapshotTaken(self._rank.rank, step, time.time(), str(path), size, "oom", entries))
        return msgspec.structs.replace(
            oom,
            reserved_free_bytes=free.free,
            free_blocks=free.blocks,
            largest_free_bytes=free.largest,
            usable_free_bytes=free.usable,
            expandable=free.expandable,
            parts=parts,
            parts_note=note,
            holders=blocks.holders(segments),
            segments=blocks.uses(segments),
            snapshot=f"snapshots/{path.name}" if path is not None else "",
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

    def _storages(self, cuda_index: int | None) -> Any:
        """Return the storages of engine, model and optimizer on a device."""
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
    """Return allocated and reserved bytes of a device that the probe does not know yet."""
    import torch

    try:
        return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    except Exception as error:
        guard.log_error("reading the device's memory", error)
        return 0, 0


def _optimizer_facts(optimizer: Any, measure: str) -> tuple[str, OptimizerImplementation]:
    """Return an optimizer's class and its implementation."""
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
