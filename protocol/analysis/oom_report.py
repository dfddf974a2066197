"""Reports of failed allocations: of a run's ranks, whose latest state is kept, and from a snapshot.

A snapshot has the request, the free memory, and every block with its stack. It lacks step, phase, batch, and other
users of the device. The phase is derived from the failing stack, if possible.
"""

from typing import Any

import msgspec

from ..messages.control import RankState
from ..messages.memory import OomReport, RankMoment
from ..messages.telemetry import DeviceSample, Heartbeat, Hello, Oom, SegmentUse, StackGroup, Step
from ..snapshot.columns import Frame, Snapshot
from ..text import gib
from .allocator.allocations import columns
from .allocator.settings import SMALL_MOST_BYTES
from .allocator.snapshot_layout import Piece, layout_at
from .allocator.snapshot_replay import Replay, pending_states
from .allocator.snapshot_views import frames_json, live_stacks, place
from .deaths.detector import HostPressure
from .oom.detector import OomContext
from .oom.words import explain, remedy_words
from .remedies import remedies

SEGMENTS = 256
_HOLDERS = 20
_RANKS = 512
_PROCESSES = 32
_FULL = 0.95
_FRESH_S = 5.0
_PHASES = (
    ("optimizer", ("torch/optim/", "optimizer.py", "zero/stage", "_take_model_step")),
    ("backward", ("autograd/__init__.py", "autograd/graph.py", "_engine_run_backward", "checkpoint.py:backward")),
    ("forward", ("forward", "_call_impl", "cross_entropy")),
)


def report_of(snapshot: Snapshot, replays: list[Replay]) -> OomReport | None:
    """Return a report of the last out-of-memory error of a snapshot; None if there was none."""
    found = _last(replays)
    if found is None:
        return None
    return _report(_oom_of(snapshot, *found), OomContext(to_come=pending_states(*found)))


def description(snapshot: Snapshot, replays: list[Replay]) -> dict[str, Any] | None:
    """Return the last out-of-memory error for ``ftmon snapshot --json``; None if there was none."""
    found, report = _last(replays), report_of(snapshot, replays)
    if found is None or report is None:
        return None
    (replay, index), oom = found, report.oom
    names = ("requested_bytes", "device_free_bytes", "allocated_bytes", "reserved_bytes", "usable_free_bytes")
    return {
        "device": replay.device,
        "index": index,
        **{name: getattr(oom, name) for name in names},
        "free_bytes": oom.reserved_free_bytes,
        "largest_free_block_bytes": max((piece.largest_free_bytes for piece in layout_at(replay, index)), default=0),
        "kind": report.verdict.kind,
        "verdict": " ".join(verdict_lines(report, replay)),
        "stack": frames_json(failing_frames(replay)),
    }


def verdict_lines(report: OomReport, replay: Replay) -> list[str]:
    """Return why a device's last allocation failed, the figures, the first remedy, and who held most, a line each."""
    oom, verdict, index = report.oom, report.verdict, replay.oom_index()
    lines = [f"{verdict.title}. {verdict.text}", f"{'; '.join(verdict.evidence)}."]
    lines += [f"To try first: {remedy_words(remedy)}" for remedy in report.remedies[:1]]
    if index is not None and oom.allocated_bytes:
        stack, most = next(iter(live_stacks(replay, index).items()))
        times = f" in {most.blocks:,} blocks" if most.blocks > 1 else ""
        share = most.bytes / oom.allocated_bytes * 100
        where = place(replay.snapshot, stack)
        lines.append(f"Largest holder: {where}: {gib(most.bytes)}{times}, {share:.0f} % of allocated memory.")
    return lines


def failing_frames(replay: Replay) -> list[Frame]:
    """Return the stack of a device's last out-of-memory error, innermost first; empty if there was none."""
    index = replay.oom_index()
    return [] if index is None else replay.snapshot.frames_of(columns(replay.trace.stacks, "I")[index])


def _last(replays: list[Replay]) -> tuple[Replay, int] | None:
    found = [(replay, index) for replay in replays if (index := replay.oom_index()) is not None]
    return max(found, key=lambda one: one[0].time_of(one[1]), default=None)


def _report(oom: Oom, around: OomContext) -> OomReport:
    verdict = explain(oom, around)
    return OomReport(oom.rank, oom.step, oom.phase, oom.time, oom, verdict, remedies(oom, verdict, around))


def _oom_of(snapshot: Snapshot, replay: Replay, index: int) -> Oom:
    """Return an out-of-memory error as the message of a rank; rank and step are 0: unknown."""
    pieces, frames = layout_at(replay, index), failing_frames(replay)
    asked, stream = columns(replay.trace.sizes, "q")[index], columns(replay.trace.streams, "q")[index]
    device_free, reserved = replay.trace.device_free.get(index, 0), replay.at(replay.reserved, index)
    of_request = (stream, asked <= SMALL_MOST_BYTES, "")
    usable = [piece for piece in pieces if (piece.stream, piece.small, piece.pool) == of_request]
    return Oom(
        rank=0,
        step=0,
        phase=_phase_of(frames),
        time=replay.time_of(index) / 1e6,
        requested_bytes=asked,
        device_free_bytes=device_free,
        # Other users of the device are unknown: its capacity is at least this large.
        device_total_bytes=device_free + reserved,
        allocated_bytes=replay.at(replay.allocated, index),
        reserved_bytes=reserved,
        message=f"CUDA out of memory on device {replay.device}",
        stack=_stack(frames),
        room_bytes=device_free if device_free < asked else 0,
        reserved_free_bytes=sum(piece.free_bytes for piece in pieces),
        free_blocks=sum(len(piece.free_sizes) for piece in pieces),
        largest_free_bytes=max((piece.largest_free_bytes for piece in usable), default=0),
        usable_free_bytes=sum(piece.free_bytes for piece in usable),
        expandable=any(piece.expandable for piece in pieces),
        # Whether the first step was over is not in the snapshot.
        steps_done=1,
        holders=[
            StackGroup(tally.bytes, tally.blocks, _stack(snapshot.frames_of(stack)))
            for stack, tally in list(live_stacks(replay, index).items())[:_HOLDERS]
        ],
        segments=[_use(piece) for piece in sorted(pieces, key=lambda piece: -piece.size)[:SEGMENTS]],
        snapshot=snapshot.path,
    )


def _phase_of(frames: list[Frame]) -> str:
    """Return the phase derived from a stack (innermost first); empty if unknown."""
    words = " ".join(f"{frame.filename}:{frame.name}" for frame in frames)
    return next((phase for phase, marks in _PHASES if any(mark in words for mark in marks)), "")


def _stack(frames: list[Frame]) -> list[str]:
    """Return a stack as text, outermost first."""
    return [f"{frame.filename}:{frame.line} {frame.name}" for frame in reversed(frames)]


def _use(piece: Piece) -> SegmentUse:
    free = piece.free_sizes
    flags = ("s" if piece.small else "") + ("e" if piece.expandable else "") + ("p" if piece.pool else "")
    return SegmentUse(piece.size, piece.size - sum(free), max(free, default=0), len(free), flags)


class LatestByRank:
    """The latest messages of each rank and each device; one assignment per message."""

    def __init__(self) -> None:
        self._hellos: dict[int, Hello] = {}
        self._beats: dict[int, Heartbeat] = {}
        self._steps: dict[int, Step] = {}
        self._gpus: dict[str, DeviceSample] = {}
        self._hosts: dict[str, DeviceSample] = {}

    def hello(self, hello: Hello) -> None:
        """Record a rank's device, and forget the state of an earlier process of that rank."""
        known = self._hellos.get(hello.rank)
        if known is not None and (known.pid, known.start_ticks) != (hello.pid, hello.start_ticks):
            self._beats.pop(hello.rank, None)
            self._steps.pop(hello.rank, None)
        self._hellos[hello.rank] = hello

    def beat(self, beat: Heartbeat) -> None:
        """Keep a rank's current phase and step."""
        self._beats[beat.rank] = beat

    def step(self, step: Step) -> None:
        self._steps[step.rank] = step

    def sample(self, sample: DeviceSample) -> None:
        """Keep the latest sample of a device."""
        if sample.kind == "gpu":
            self._gpus[sample.uuid or f"{sample.host} {sample.index}"] = sample
        else:
            self._hosts[sample.host] = sample

    def report(self, t: float, oom: Oom, states: dict[int, RankState]) -> OomReport:
        """Return the report of a failed allocation, with the state of all ranks at ``t``."""
        hello = self._hellos.get(oom.rank)
        if hello is not None and not oom.capacity_bytes:  # of a probe that did not report the device
            oom = msgspec.structs.replace(oom, measure=hello.memory_measure)
        sample = self._device_of(hello, oom.measure) if hello is not None else None
        processes = sorted(sample.processes, key=lambda one: -one.used_bytes)[:_PROCESSES] if sample is not None else []
        # Any process may use host memory; for a device, only the processes that compute on it are listed.
        around = OomContext(hello, processes if oom.measure == "cuda" else ())
        ranks = sorted(self._hellos.keys() | self._beats.keys() | states.keys())[:_RANKS]
        return msgspec.structs.replace(
            _report(oom, around),
            ranks=[self._moment(t, rank, states.get(rank), oom) for rank in ranks],
            processes=processes,
            device_used_bytes=sample.used_bytes if sample is not None else 0,
        )

    def pressure(self, t: float, rank: int) -> HostPressure | None:
        """Return the use of a rank's host memory just before ``t``; None if it was not full, or unknown."""
        hello = self._hellos.get(rank)
        sample = self._hosts.get(hello.host) if hello is not None else None
        if sample is None or t - sample.time > _FRESH_S or sample.used_bytes < _FULL * sample.total_bytes:
            return None
        held = next((process.used_bytes for process in sample.processes if process.rank == rank), 0)
        return HostPressure(max(0.0, t - sample.time), sample.used_bytes, sample.total_bytes, held)

    def _moment(self, t: float, rank: int, state: RankState | None, oom: Oom) -> RankMoment:
        hello, beat, step = self._hellos.get(rank), self._beats.get(rank), self._steps.get(rank)
        sample = self._device_of(hello, hello.memory_measure) if hello is not None else None
        peak = step.peak_phase if step is not None else None
        if rank == oom.rank:  # its own report is newer than its last heartbeat
            beat = Heartbeat(rank, oom.step, oom.phase, 0.0, 0, oom.time, oom.micro_step)
            beat = msgspec.structs.replace(beat, allocated=oom.allocated_bytes, reserved=oom.reserved_bytes)
        return RankMoment(
            rank,
            state.state if state is not None else "starting",
            beat.step if beat is not None else step.step + 1 if step is not None else 0,
            beat.phase if beat is not None else "",
            beat.micro_step if beat is not None else 0,
            beat.allocated if beat is not None else 0,
            beat.reserved if beat is not None else 0,
            peak.peak_span.peak if peak is not None else 0,
            list(step.batch_shape) if step is not None else [],
            beat.collective if beat is not None else "",
            round(max(0.0, t - beat.time), 3) if beat is not None else 0.0,
            f"{hello.host} {hello.device.kind} {hello.device.index}" if hello is not None else "",
            sample.used_bytes if sample is not None else 0,
            sample.total_bytes if sample is not None else 0,
        )

    def _device_of(self, hello: Hello, measure: str) -> DeviceSample | None:
        if measure != "cuda":
            return self._hosts.get(hello.host)
        # CUDA numbers the visible devices, NVML all devices: only the UUID is the same for both.
        return self._gpus.get(hello.device.uuid) or self._gpus.get(f"{hello.host} {hello.device.index}")
