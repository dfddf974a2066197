"""Writes a captured step for other tools: a snapshot for PyTorch's memory viewer, or its memory as a flame graph.

The captured file is read as plain data in a separate process (``protocol.snapshot``). For the viewer
(https://pytorch.org/memory_viz) it is written anew, with the keys of ``torch.cuda.memory._dump_snapshot`` (PyTorch 2.1
and later), so that opening the result runs no code of a file from elsewhere.

A flame graph (https://www.brendangregg.com/flamegraphs.html) has a box for each call, as wide as the memory that it and
the calls above it hold at the moment of the step's highest allocated memory: as SVG without scripts, or as folded
stacks, ``outer;inner bytes`` a line, the input of flamegraph.pl and https://www.speedscope.app.
"""

import pickle
import zlib
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from ...protocol.analysis.allocator.snapshot_layout import Node, frame_words, stack_tree
from ...protocol.analysis.allocator.snapshot_replay import Replay
from ...protocol.analysis.allocator.snapshot_views import NO_STACK, live_stacks
from ...protocol.code_owner import library_of
from ...protocol.errors import UsageError
from ...protocol.messages.telemetry import SnapshotTaken
from ...protocol.recording.reader import Reader
from ...protocol.snapshot.columns import ACTIONS, ALLOCATED, FREE, OOM, STATES, Segment, Snapshot, Trace
from ...protocol.snapshot.reader import open_snapshot
from ...protocol.text import counted, gib
from .tables import replacing

_MOST = 1 << 20  # above any number of snapshots of a run
_FIELDS = ("allocated_size", "active_size", "requested_size")

Dict = dict[str, Any]


def write_snapshot(reader: Reader, rank: int, step: int | None, path: Path) -> str:
    """Write the last captured snapshot of a rank (in ``step``, if given); return which, in words.

    Raises ``UsageError`` if there is none or the file cannot be written, ``SnapshotError`` if the captured file,
    ``RecordingError`` if the recording cannot be read.
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
    return f"rank {rank}, step {chosen.step}, {chosen.reason}", open_snapshot(source)


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


_WIDTH, _ROW, _HEAD, _FOOT, _SIDE = 1200, 17, 44, 10, 10
_LETTER = 6.1  # width of a letter in the font
_NARROWEST = 0.4  # px of a box that is drawn
_STYLE = """
text { font: 10.5px ui-monospace, 'DejaVu Sans Mono', monospace; fill: #1c2530 }
.title { font-size: 14px } rect { stroke: #fff; stroke-width: 0.5 }
"""


class Memory(NamedTuple):
    """The memory of one device at the highest moment of its trace, by stack."""

    snapshot: Snapshot
    stacks: dict[int, tuple[int, int]]  # bytes and blocks by number of the stack; 0: memory without one
    root: Node

    @property
    def bytes(self) -> int:
        """All allocated memory."""
        return self.root.bytes


def write_flame_graph(reader: Reader, rank: int, step: int | None, path: Path) -> str:
    """Write the flame graph of the last captured snapshot of a rank (in ``step``, if given); return which, in words.

    It is SVG if the name ends with ``.svg``, else folded stacks. Raises as ``write_snapshot``.
    """
    words, snapshot = captured(reader, rank, step)
    memory = highest(snapshot)
    words = f"{words}: {gib(memory.bytes)} allocated at the highest moment, {counted(len(memory.stacks), 'stack')}"
    lines = svg(memory, words) if path.suffix == ".svg" else folded(memory)
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    return words


def highest(snapshot: Snapshot) -> Memory:
    """Return the memory of the device that had most of it allocated."""
    replay = max((Replay(snapshot, device) for device in snapshot.devices()), key=lambda one: one.peak_bytes)
    tallies = live_stacks(replay, replay.peak_index)
    stacks = {stack: (tally.bytes, tally.blocks) for stack, tally in tallies.items()}
    return Memory(snapshot, stacks, stack_tree(snapshot, tallies, fold=False))


def folded(memory: Memory) -> Iterator[str]:
    """Yield a line for each stack, outermost call first, with its bytes; largest first."""
    for stack, (size, _) in memory.stacks.items():
        frames = [_word(frame_words(one)) for one in reversed(memory.snapshot.frames_of(stack))]
        yield f"{';'.join(frames) or NO_STACK} {size}"


def _word(text: str) -> str:
    """Return a frame for a folded stack, where a semicolon ends a frame, and the last blank precedes the bytes."""
    return " ".join(text.replace(";", ",").split())


def svg(memory: Memory, title: str) -> Iterator[str]:
    """Yield the lines of a picture: callers below, each box as wide as its memory, which its tooltip names."""
    boxes = [*_boxes(memory)]
    rows = 1 + max((box.depth for box in boxes), default=0)
    height = _HEAD + rows * _ROW + _FOOT
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    yield f'<style>{_STYLE}</style><rect width="{_WIDTH}" height="{height}" fill="#fff"/>'
    yield f'<text class="title" x="{_SIDE}" y="26">{escape(_cut(title, 160))}</text>'
    for box in boxes:
        y = height - _FOOT - (box.depth + 1) * _ROW
        fits = int((box.width - 4) / _LETTER)
        label = f'<text x="{box.x + 3:.1f}" y="{y + 12}">{escape(_cut(box.name, fits))}</text>' if fits > 3 else ""
        share = box.bytes / memory.bytes if memory.bytes else 0.0
        tip = f"{box.name}: {gib(box.bytes)}, {share:.1%}, {counted(box.blocks, 'block')}"
        place = f'x="{box.x:.1f}" y="{y}" width="{box.width:.1f}" height="{_ROW}" fill="{box.colour}"'
        yield f"<g><title>{escape(tip)}</title><rect {place}/>{label}</g>"
    yield "</svg>"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 2]}.."


class _Box(NamedTuple):
    x: float
    width: float
    depth: int
    name: str
    bytes: int
    blocks: int
    colour: str


def _boxes(memory: Memory) -> Iterator[_Box]:
    scale = (_WIDTH - 2 * _SIDE) / max(1, memory.bytes)
    frames = memory.snapshot.frames
    waiting = [(memory.root, float(_SIDE), 0)]
    while waiting:
        node, x, depth = waiting.pop()
        if node.bytes * scale < _NARROWEST:
            continue
        frame = frames[node.frames[-1]] if node.frames else None
        name, colour = ("all", "#d9dee5") if frame is None else (frame_words(frame), _colour(frame.filename))
        yield _Box(x, node.bytes * scale, depth, name, node.bytes, node.blocks, colour)
        for child in node.ordered():
            waiting.append((child, x, depth + 1))
            x += child.bytes * scale
        size, blocks = memory.stacks.get(0, (0, 0))
        if frame is None and size * scale >= _NARROWEST:
            yield _Box(x, size * scale, 1, NO_STACK, size, blocks, "#e8ebef")


def _colour(filename: str) -> str:
    """Return a colour by file: warm for user code, cool for libraries."""
    number = zlib.crc32(filename.encode(errors="replace"))
    hue = (190 + number % 40) if library_of(filename) else (10 + number % 45)
    return f"hsl({hue} 70% {68 + number // 64 % 12}%)"
