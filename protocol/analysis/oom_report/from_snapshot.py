"""Reads an out-of-memory error from a memory snapshot, for ``ftmon oom FILE``.

A snapshot has the request, the free memory, and every block with its stack. It lacks step, phase, batch, and other
users of the device. The phase is derived from the failing stack, if possible.
"""

from ...messages.blocks import SegmentUse, StackGroup
from ...messages.oom import OomReport
from ...messages.telemetry import Oom
from ...snapshot.model import FREE, Frame, Snapshot
from ..allocator.snapshot.analysis import find_oom, live_stacks
from ..allocator.snapshot.layout import Piece, layout_at
from ..allocator.snapshot.pending_states import pending_states
from ..allocator.snapshot.replay import Replay
from ..oom.verdict import OomContext
from ..oom.words import explain
from ..remedies import remedies

SEGMENTS = 256
_HOLDERS = 20
_PHASES = (
    ("optimizer", ("torch/optim/", "optimizer.py", "zero/stage", "_take_model_step")),
    ("backward", ("autograd/__init__.py", "autograd/graph.py", "_engine_run_backward", "checkpoint.py:backward")),
    ("forward", ("forward", "_call_impl", "cross_entropy")),
)


def report_of(snapshot: Snapshot, replays: list[Replay]) -> OomReport | None:
    """Return a report of the last out-of-memory error of a snapshot; None if there was none."""
    found = [(replay, index) for replay in replays if (index := replay.oom_index()) is not None]
    if not found:
        return None
    replay, index = max(found, key=lambda one: one[0].time_of(one[1]))
    oom = oom_of(snapshot, replay)
    if oom is None:
        return None
    around = OomContext(to_come=pending_states(replay, index))
    verdict = explain(oom, around)
    return OomReport(oom.rank, oom.step, oom.phase, oom.time, oom, verdict, remedies(oom, verdict, around))


def oom_of(snapshot: Snapshot, replay: Replay) -> Oom | None:
    """Return the last out-of-memory error of one device as the message of a rank; rank and step are 0: unknown."""
    found = find_oom(replay)
    if found is None:
        return None
    pieces = layout_at(replay, found.entry)
    frames = snapshot.frames_of(found.stack)
    return Oom(
        rank=0,
        step=0,
        phase=phase_of(frames),
        time=replay.time_of(found.entry) / 1e6,
        requested_bytes=found.requested_bytes,
        device_free_bytes=found.device_free_bytes,
        # Other users of the device are unknown: its capacity is at least this large.
        device_total_bytes=found.device_free_bytes + found.reserved_bytes,
        allocated_bytes=found.allocated_bytes,
        reserved_bytes=found.reserved_bytes,
        message=f"CUDA out of memory on device {replay.device}",
        stack=[_words(frame) for frame in reversed(frames)],
        room_bytes=found.device_free_bytes if found.device_free_bytes < found.requested_bytes else 0,
        reserved_free_bytes=found.free_bytes,
        free_blocks=sum(1 for piece in pieces for block in piece.blocks if block.state == FREE),
        largest_free_bytes=found.largest_usable_bytes,
        usable_free_bytes=found.usable_free_bytes,
        expandable=any(piece.expandable for piece in pieces),
        # Whether the first step was over is not in the snapshot.
        steps_done=1,
        holders=_holders(snapshot, replay, found.entry),
        segments=[_use(piece) for piece in sorted(pieces, key=lambda piece: -piece.size)[:SEGMENTS]],
        snapshot=snapshot.path,
    )


def phase_of(frames: list[Frame]) -> str:
    """Return the phase derived from a stack (innermost first); empty if unknown."""
    words = " ".join(f"{frame.filename}:{frame.name}" for frame in frames)
    return next((phase for phase, marks in _PHASES if any(mark in words for mark in marks)), "")


def _holders(snapshot: Snapshot, replay: Replay, index: int) -> list[StackGroup]:
    tallies = list(live_stacks(replay, index).items())[:_HOLDERS]
    return [
        StackGroup(tally.bytes, tally.blocks, [_words(frame) for frame in reversed(snapshot.frames_of(stack))])
        for stack, tally in tallies
    ]


def _use(piece: Piece) -> SegmentUse:
    free = [block.size for block in piece.blocks if block.state == FREE]
    flags = ("s" if piece.small else "") + ("e" if piece.expandable else "") + ("p" if piece.pool else "")
    return SegmentUse(piece.size, piece.size - sum(free), max(free, default=0), len(free), flags)


def _words(frame: Frame) -> str:
    return f"{frame.filename}:{frame.line} {frame.name}"
