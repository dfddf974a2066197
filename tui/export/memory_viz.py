"""Writes a captured memory snapshot of a rank for PyTorch's viewer (https://pytorch.org/memory_viz).

The captured file is read as plain data in a separate process (``protocol.snapshot``) and written anew, with the keys
of ``torch.cuda.memory._dump_snapshot`` (PyTorch 2.1 and later), so that opening the result runs no code of a file from
elsewhere.
"""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...protocol.errors import UsageError
from ...protocol.messages.telemetry import SnapshotTaken
from ...protocol.recording.reader import Reader
from ...protocol.snapshot.columns import ACTIONS, ALLOCATED, FREE, OOM, STATES, Segment, Snapshot, Trace
from ...protocol.snapshot.reader import SnapshotReading
from .tables import replacing

_MOST = 1 << 20  # above any number of snapshots of a run
_FIELDS = ("allocated_size", "active_size", "requested_size")

Dict = dict[str, Any]


def write_snapshot(reader: Reader, rank: int, step: int | None, path: Path) -> str:
    """Write the last captured snapshot of a rank (in ``step``, if given); return which, in words.

    Raises:
        UsageError: there is no such snapshot, or the file cannot be written.
        SnapshotError: the captured file cannot be read.
        RecordingError: the recording cannot be read.
    """
    words, snapshot = captured(reader, rank, step)
    with replacing(path) as temporary, temporary.open("wb") as file:
        pickle.dump(as_pytorch(snapshot), file, protocol=4)
    return words


def captured(reader: Reader, rank: int, step: int | None) -> tuple[str, Snapshot]:
    """Return the last captured snapshot of a rank (in ``step``, if given), with words for it; errors are the same."""
    taken = [frame.message for frame in reader.sampled("snapshot", rank, _MOST)]
    found = [one for one in taken if isinstance(one, SnapshotTaken)]
    steps = sorted({one.step for one in found})
    if not found:
        raise UsageError(
            f"rank {rank} has no memory snapshot: 'ftmon capture RUN' captures one on a GPU while the run trains, and "
            "an out-of-memory error does"
        )
    if step is not None and step not in steps:
        raise UsageError(f"rank {rank} has no memory snapshot of step {step}; it has some of {str(steps)[1:-1]}")
    chosen = [one for one in found if step in (None, one.step)][-1]
    # Only the name: the run may have been moved, and a recording from elsewhere may name any file.
    source = reader.path.parent / "snapshots" / Path(chosen.path).name
    if not source.is_file():
        raise UsageError(f"{source}: the snapshot of step {chosen.step} is gone, or was not copied with the recording")
    with SnapshotReading(source) as reading:
        first = reading.snapshot()
        snapshot = first.with_stacks(reading.stacks())
    return f"rank {rank}, step {chosen.step}, {chosen.reason}", snapshot


def as_pytorch(snapshot: Snapshot) -> Dict:
    """Return a snapshot as ``torch.cuda.memory._snapshot`` does."""
    frames = [{"name": one.name, "filename": one.filename, "line": one.line} for one in snapshot.frames]
    stacks = [[frames[index] for index in stack] for stack in snapshot.stacks]
    traces = {trace.device: list(_entries(snapshot, trace, stacks)) for trace in snapshot.traces}
    spans = [
        {"name": span.name, "stage": stage, "device": span.device, "time_us": at}
        for span in snapshot.annotations
        for stage, at in (("START", span.begin_us), ("END", span.end_us))
    ]
    divisions = {str(2**power): parts for power, parts in enumerate(snapshot.divisions)}
    return {
        "segments": list(_segments(snapshot, stacks)),
        "device_traces": [traces.get(device, []) for device in range(max(traces, default=-1) + 1)],
        "allocator_settings": {"max_split_size": snapshot.max_split_size, "roundup_power2_divisions": divisions},
        "external_annotations": sorted(spans, key=lambda span: span["time_us"]),
    }


def _segments(snapshot: Snapshot, stacks: list[list[Dict]]) -> Iterator[Dict]:
    columns = (
        memoryview(snapshot.block_addresses).cast("Q"),
        memoryview(snapshot.block_sizes).cast("q"),
        memoryview(snapshot.block_requested).cast("q"),
        memoryview(snapshot.block_states),
        memoryview(snapshot.block_stacks).cast("I"),
    )
    for segment in snapshot.segments:
        own = slice(segment.first_block, segment.first_block + segment.blocks)
        blocks = list(zip(*(column[own] for column in columns), strict=True))
        sums = (
            sum(size for _, size, _, state, _ in blocks if state == ALLOCATED),
            sum(size for _, size, _, state, _ in blocks if state != FREE),
            sum(asked for _, _, asked, _, _ in blocks),
        )
        yield {
            **_segment(segment),
            **dict(zip(_FIELDS, sums, strict=True)),
            "frames": stacks[segment.stack],
            "blocks": [
                # PyTorch keeps the request of a block's last use; of a free one nothing reads it.
                {"address": at, "size": size, "requested_size": asked, "state": STATES[state], "frames": stacks[stack]}
                for at, size, asked, state, stack in blocks
            ],
        }


def _segment(segment: Segment) -> Dict:
    pool = tuple(int(part) for part in segment.pool.split(".")) if segment.pool else (0, 0)
    return {
        "device": segment.device,
        "address": segment.address,
        "total_size": segment.size,
        "stream": segment.stream,
        "segment_type": "small" if segment.small else "large",
        "segment_pool_id": pool,
        "is_expandable": segment.expandable,
    }


def _entries(snapshot: Snapshot, trace: Trace, stacks: list[list[Dict]]) -> Iterator[Dict]:
    columns = (
        trace.actions,
        memoryview(trace.addresses).cast("Q"),
        memoryview(trace.sizes).cast("q"),
        memoryview(trace.streams).cast("q"),
        memoryview(trace.times).cast("q"),
        memoryview(trace.stacks).cast("I"),
        memoryview(trace.notes).cast("I"),
    )
    for index, (action, address, size, stream, time_us, stack, note) in enumerate(zip(*columns, strict=True)):
        place = {"device_free": trace.device_free.get(index, 0)} if action == OOM else {"addr": address}
        yield {
            "action": ACTIONS[action],
            **place,
            "size": size,
            "stream": stream,
            "time_us": time_us,
            "frames": stacks[stack],
            "user_metadata": snapshot.notes[note],
        }
