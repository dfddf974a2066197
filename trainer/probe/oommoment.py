"""Everything about one failed allocation that the rank itself knows, gathered before Python unwinds."""

import os
import resource
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from ...protocol.rundir import RunDir
from ...protocol.telemetry import Oom, SnapshotTaken
from ...protocol.text import gib
from . import guard, oomblocks, place
from .memory_cpu import available_bytes, total_bytes
from .oomfile import write_snapshot
from .oompeers import peers
from .sizes import model_sizes

if TYPE_CHECKING:
    from .probe import Probe

FULL_REPORTS = 3
"""A script may catch the error and try again, many times: only the first few are worth a snapshot each."""
_FRAMES = 40
_LIMIT_SLACK = 2**20


class Failed:
    """A failed allocation as its witness saw it.

    Args:
        requested: bytes that were sought.
        free: bytes the device (or the host) had free.
        total: bytes there are, or that the process may use where a limit is set.
        message: the words that go with it.
        frames: the stack, outermost first; empty where the allocating thread has no Python frames.
        lines: the line each frame is at.
        device: the CUDA device's index; None: the host's memory.
    """

    def __init__(
        self,
        requested: int,
        free: int,
        total: int,
        message: str,
        frames: list[FrameType],
        lines: list[int],
        device: int | None,
    ) -> None:
        self.requested = requested
        self.free = free
        self.total = total
        self.message = message
        self.frames = frames
        self.lines = lines
        self.device = device
        self.stack_of: Any = "failing"


def tell(probe: "Probe", failed: Failed) -> bool:
    """Send everything known of a failed allocation; returns whether the rank is to be held now."""
    if not stack_words(failed.frames, failed.lines):
        # A backward pass runs in threads of C++; the training thread waits for them where it called it.
        failed.frames = _frames_of_thread(probe.thread)
        failed.lines = [frame.f_lineno for frame in failed.frames]
        failed.stack_of = "training"
    oom = _plain(probe, failed)
    probe.ooms += 1
    full = probe.ooms <= FULL_REPORTS
    for add in (_add_history, _add_model, _add_memory if full else _skip_memory, _add_hold):
        try:
            oom = add(probe, failed, oom)
        except Exception as error:  # one part that fails must not cost the rest
            guard.log_error(add.__name__.strip("_").replace("_", " "), error)
    probe.hand_over(oom)
    return oom.held


def stack_words(frames: Sequence[FrameType], lines: Sequence[int]) -> list[str]:
    """Write frames as ``file:line function``, innermost last; the probe's own are left out."""
    own = os.path.dirname(__file__)
    return [
        f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}"
        for frame, line in zip(frames, lines, strict=True)
        if os.path.dirname(frame.f_code.co_filename) != own
    ][-_FRAMES:]


def host_room() -> tuple[int, int, str]:
    """Return what the host has available, what this process could get of it, and the limit in words (or empty)."""
    available = available_bytes()
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return available, total_bytes(), ""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    if limit - used >= available:
        return available, total_bytes(), ""
    return available, total_bytes(), f"RLIMIT_AS (ulimit -v) is {gib(limit)}, of which {gib(used)} are in use"


def _plain(probe: "Probe", failed: Failed) -> Oom:
    tracker, memory = probe.tracker, probe.device.memory
    on_gpu = failed.device is not None
    if on_gpu and failed.device == memory.device_index and hasattr(memory, "now"):
        cuda: Any = memory
        now = cuda.now()
    elif on_gpu or memory.measure != "glibc":
        now = memory.read(tracker.sample)
    else:
        now = memory.read(memory.sample())
    _, _, limit = host_room()
    return Oom(
        rank=probe.about.rank,
        step=tracker.step + 1,
        phase=tracker.phase,
        time=time.time(),
        requested_bytes=failed.requested,
        device_free_bytes=failed.free,
        device_total_bytes=failed.total or probe.device.info.capacity_bytes,
        allocated_bytes=now.allocated,
        reserved_bytes=now.reserved,
        batch_shape=list(tracker.notes.shape),
        message=failed.message,
        stack=stack_words(failed.frames, failed.lines),
        measure="cuda" if on_gpu else "glibc",
        stack_of=failed.stack_of,
        micro_step=tracker.notes.micro_steps,
        steps_done=probe.steps_done,
        capacity_bytes=probe.device.info.capacity_bytes if on_gpu else total_bytes(),
        limit="" if on_gpu else limit,
        room_bytes=failed.free,
    )


def _add_history(probe: "Probe", _failed: Failed, oom: Oom) -> Oom:
    history = probe.oom_history
    for raw in probe.unsent_steps():
        history.note_shape(raw.notes.shape, raw.number)
    return msgspec.structs.replace(
        oom,
        largest_shape=list(history.largest_shape),
        largest_shape_step=history.largest_shape_step,
        peak_bytes=history.peak_bytes,
        starts=history.starts(),
    )


def _add_model(probe: "Probe", _failed: Failed, oom: Oom) -> Oom:
    from .composition.walk import Roots

    sizes = model_sizes(probe)
    return msgspec.structs.replace(
        oom,
        parameter_bytes=sizes.parameter_bytes,
        trainable=sizes.trainable,
        vocabulary=sizes.vocabulary,
        optimizer=_optimizer_words(Roots(probe.engine(), probe.model(), probe.primary).optimizer, oom.measure),
        checkpointing=bool(getattr(probe.model(), "is_gradient_checkpointing", False)),
    )


def _optimizer_words(optimizer: Any, measure: str) -> str:
    if optimizer is None:
        return ""
    name = type(optimizer).__name__
    settings = getattr(optimizer, "defaults", {})
    if settings.get("fused"):
        return f"{name} fused"
    if "foreach" not in settings:
        return name
    # With neither said, PyTorch takes foreach for tensors on a GPU, and a loop elsewhere.
    foreach = settings["foreach"]
    return f"{name} foreach" if foreach or (foreach is None and measure == "cuda") else f"{name} for-loop"


def _add_memory(probe: "Probe", failed: Failed, oom: Oom) -> Oom:
    if failed.device is None:
        return _add_host_memory(probe, oom)
    import torch

    capacity = probe.device.info.capacity_bytes
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
    free = oomblocks.pieces(segments, failed.requested, stream)
    known = {address: held.part for address, held in _storages(probe, failed.device).held.items()}
    offset_ns = time.time_ns() - time.perf_counter_ns()
    parts, note = oomblocks.parts(segments, trace, known, probe.tracker.marks, offset_ns, oom.phase)
    step = probe.tracker.step + 1
    run = RunDir(place.folder())
    probe.phase_marks.annotate(found, failed.device, step, list(probe.tracker.marks))
    path, size, trouble = write_snapshot(run.snapshots, probe.about.rank, step, found)
    if path is not None:
        entries = sum(map(len, found["device_traces"]))
        probe.hand_over(SnapshotTaken(probe.about.rank, step, time.time(), str(path), size, "oom", entries))
    return msgspec.structs.replace(
        oom,
        reserved_free_bytes=free.free,
        free_blocks=free.blocks,
        largest_free_bytes=free.largest,
        usable_free_bytes=free.usable,
        expandable=free.expandable,
        parts=parts,
        parts_note=note,
        holders=oomblocks.holders(segments),
        segments=oomblocks.uses(segments),
        snapshot=f"snapshots/{path.name}" if path is not None else "",
        snapshot_note=trouble,
    )


def _add_host_memory(probe: "Probe", oom: Oom) -> Oom:
    note = "the CPU has no allocator that could be recorded"
    parts = _storages(probe, None).by_part()
    rest = oom.allocated_bytes - sum(parts.values())
    if rest < 0:  # tensors that are mapped from files, or shared, are none of malloc's
        return msgspec.structs.replace(oom, snapshot_note=note)
    return msgspec.structs.replace(
        oom,
        snapshot_note=note,
        parts={**parts, "unattributed": rest} if rest else parts,
        parts_note="the CPU has no trace of allocations: what is no known storage is not attributed",
    )


def _storages(probe: "Probe", cuda_index: int | None) -> Any:
    """Find what engine, model and optimizer hold on a device."""
    from .composition.storages import Storages
    from .composition.walk import Roots, walk

    found = Storages(cuda_index)
    walk(Roots(probe.engine(), probe.model(), probe.primary), found)
    return found


def _skip_memory(_probe: "Probe", _failed: Failed, oom: Oom) -> Oom:
    note = f"only the first {FULL_REPORTS} out-of-memory errors of a process have a snapshot"
    return msgspec.structs.replace(oom, snapshot_note=note)


def _add_hold(probe: "Probe", _failed: Failed, oom: Oom) -> Oom:
    hold = probe.hold
    if not hold.wanted:
        return oom
    seconds, words = peers(probe.about.world_size)
    return msgspec.structs.replace(
        oom,
        held=not hold.since,
        hold_seconds=hold.seconds,
        console=hold.console_allowed,
        peer_timeout_s=seconds,
        others=words,
    )


def _frames_of_thread(thread: int) -> list[FrameType]:
    frame = sys._current_frames().get(thread)
    found: list[FrameType] = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]
