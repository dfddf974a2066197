"""Converts the plain data of a snapshot's pickle to columns, and checks its structure.

Formats differ by PyTorch version: before 2.2 entries have no time, without ``stacks`` no frames, and before 2.1 blocks
have a ``history`` instead of ``requested_size`` and ``frames``. A missing key is not an error; a wrong type is.
"""

from array import array
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from typing import Any, NamedTuple

from ..text import sanitize
from . import model
from .errors import SnapshotError
from .model import Annotation, Segment, Snapshot, StackColumns, Trace
from .stack_column import Stacks

_LARGEST = 2**47
"""Sizes of 128 TiB and more are invalid."""
_DIVISIONS = 16
_STATES = {"inactive": model.FREE, "active_allocated": model.ALLOCATED}
_ACTIONS = {name: index for index, name in enumerate(model.ACTIONS)}


def compact(raw: Any, path: str) -> Snapshot:
    """Return the result of ``torch.cuda.memory._snapshot()`` as columns; the data is consumed.

    Raises:
        SnapshotError: it does not have the structure of a snapshot.
    """
    made = Compactor(path)
    return made.snapshot(raw).with_stacks(made.stack_columns())


@contextmanager
def _checked(path: str) -> Generator[None, None, None]:
    try:
        yield
    except (TypeError, ValueError, OverflowError, AttributeError, KeyError, IndexError) as error:
        raise SnapshotError(f"{path}: not a memory snapshot: {sanitize(str(error), 80)}") from None


class Compactor:
    """Makes the columns in two parts, so that a reader can begin before the stacks are ready."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._trace_frames: list[list[Any]] = []
        self._block_frames: list[Any] = []
        self._segment_frames: list[Any] = []
        self.notes: list[str] = [""]
        self._note_of: dict[str, int] = {"": 0}

    def snapshot(self, raw: Any) -> Snapshot:
        """Return the snapshot without the stacks.

        Raises:
            SnapshotError: the data does not have the structure of a snapshot.
        """
        with _checked(self.path):
            return self._snapshot(raw)

    def stack_columns(self) -> StackColumns:
        """Return the stacks of the snapshot that ``snapshot`` returned.

        Raises:
            SnapshotError: a stack is invalid.
        """
        with _checked(self.path):
            stacks = Stacks()
            traces = [stacks.column(frames).tobytes() for frames in self._trace_frames]
            blocks = stacks.column(self._block_frames).tobytes()
            segments = [stacks.number(frames) for frames in self._segment_frames]
            return StackColumns(stacks.frames, stacks.stacks, traces, blocks, segments)

    def _snapshot(self, raw: Any) -> Snapshot:
        if isinstance(raw, list):
            raw = {"segments": raw}
        if not isinstance(raw, dict) or not isinstance(raw.get("segments"), list):
            raise SnapshotError(
                f"{self.path}: not a memory snapshot (a pickle without 'segments'): "
                "write one with torch.cuda.memory._dump_snapshot(path)"
            )
        traces = [self._trace(device, trace) for device, trace in enumerate(raw.get("device_traces") or [])]
        segments, blocks = self._segments(raw["segments"])
        settings = raw.get("allocator_settings") or {}
        divisions = settings.get("roundup_power2_divisions") or {}
        return Snapshot(
            self.path, segments, blocks.addresses.tobytes(), blocks.sizes.tobytes(), blocks.requested.tobytes(),
            blocks.states, b"", traces, [], [], self.notes,
            _annotations(raw.get("external_annotations") or []),
            [_size(divisions.get(str(2**power), 0)) for power in range(_DIVISIONS)],
            int(settings.get("max_split_size", -1)),
        )  # fmt: skip

    def _trace(self, device: int, entries: Any) -> Trace:
        if not isinstance(entries, list):
            raise TypeError("a device's trace is no list")
        names = [entry.get("action") for entry in entries]
        number = {name: _ACTIONS.get(str(name), 0) for name in set(names)}
        actions = bytes(map(number.__getitem__, names))
        self._trace_frames.append([entry.get("frames") or () for entry in entries])
        oom = [index for index, action in enumerate(actions) if action == model.OOM]
        return Trace(
            device,
            actions,
            array("Q", [entry.get("addr") or 0 for entry in entries]).tobytes(),
            _sizes([entry.get("size") or 0 for entry in entries], oom).tobytes(),
            array("q", [entry.get("stream") or 0 for entry in entries]).tobytes(),
            array("q", [entry.get("time_us") or 0 for entry in entries]).tobytes(),
            b"",
            self._note_column([entry.get("user_metadata") for entry in entries]).tobytes(),
            # Some versions store the free bytes in the entry's address.
            {i: _size(entries[i].get("device_free", entries[i].get("addr")) or 0) for i in oom},
        )

    def _segments(self, raw: list[dict[str, Any]]) -> tuple[list[Segment], "_Blocks"]:
        of_segment: list[list[dict[str, Any]]] = [segment.get("blocks") or [] for segment in raw]
        firsts = list(accumulate(map(len, of_segment), initial=0))
        segments: list[Segment] = []
        for segment, first, blocks in zip(raw, firsts, of_segment, strict=False):
            pool = segment.get("segment_pool_id") or (0, 0)
            segments.append(Segment(
                _size(segment.get("device", 0)), int(segment.get("address") or 0), _size(segment["total_size"]),
                int(segment.get("stream") or 0), segment.get("segment_type") == "small",
                bool(segment.get("is_expandable")),
                "" if tuple(pool) == (0, 0) else ".".join(str(int(part)) for part in pool[:2]),
                0, first, len(blocks),
            ))  # fmt: skip
            self._segment_frames.append(segment.get("frames") or ())
        return segments, self._blocks(segments, list(chain.from_iterable(of_segment)))

    def _blocks(self, segments: list[Segment], raw: list[dict[str, Any]]) -> "_Blocks":
        # Column by column, because hundreds of thousands of blocks are common.
        sizes = _sizes([block["size"] for block in raw])
        states = bytes([_STATES.get(str(block.get("state")), model.PENDING) for block in raw])
        addresses: list[Any] = [block.get("address") for block in raw]
        if None in addresses:
            addresses = [
                at
                for segment in segments
                for at in accumulate(
                    sizes[segment.first_block : segment.first_block + segment.blocks], initial=segment.address
                )
            ]
            # ``accumulate`` also yields each segment's end, which is not an address of a block.
            for number, segment in reversed(list(enumerate(segments))):
                del addresses[segment.first_block + segment.blocks + number]
        asked = [block.get("requested_size") for block in raw]
        frames = [block.get("frames") for block in raw]
        if None in asked or None in frames:
            history = [(block.get("history") or [{}])[0] for block in raw]
            asked = [
                old.get("real_size", size) if size_asked is None else size_asked
                for size_asked, old, size in zip(asked, history, sizes, strict=True)
            ]
            frames = [old.get("frames") if found is None else found for found, old in zip(frames, history, strict=True)]
        wanted = [0 if state == model.FREE else size for state, size in zip(states, asked, strict=True)]
        self._block_frames = [found or () for found in frames]
        return _Blocks(array("Q", addresses), sizes, _sizes(wanted), states)

    def _note_column(self, notes: list[Any]) -> "array[int]":
        number = {note: self._note(note) for note in set(notes)}
        return array("I", map(number.__getitem__, notes))

    def _note(self, note: Any) -> int:
        text = sanitize(note, 200) if isinstance(note, str) else ""
        found = self._note_of.setdefault(text, len(self.notes))
        if found == len(self.notes):
            self.notes.append(text)
        return found


class _Blocks(NamedTuple):
    addresses: "array[int]"
    sizes: "array[int]"
    requested: "array[int]"
    states: bytes


def _size(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST:
        raise ValueError(f"an invalid size: {str(value)[:40] if isinstance(value, int | float | str) else '?'}")
    return value


def _sizes(values: list[Any], failed: Sequence[int] = ()) -> "array[int]":
    """Return sizes as a column; those at the indexes ``failed`` are of failed requests, and may be of any size."""
    column: array[int] = array("q", values)
    if not column:
        return column
    given = column[:] if max(column) >= _LARGEST else column
    for index in failed if given is not column else ():
        given[index] = 0
    if min(column) < 0 or max(given) >= _LARGEST:
        raise ValueError("an invalid size")
    return column


def _annotations(raw: list[dict[str, Any]]) -> list[Annotation]:
    """Pair starts with ends of the same name and device, innermost first."""
    open_at: dict[tuple[int, str], list[int]] = {}
    spans: list[Annotation] = []
    for one in raw:
        name, device, time = sanitize(str(one.get("name", "")), 200), int(one.get("device") or 0), one.get("time_us")
        if not isinstance(time, int) or not abs(time) < 2**63:
            continue
        begins = open_at.setdefault((device, name), [])
        if one.get("stage") == "START":
            begins.append(time)
        elif begins:
            spans.append(Annotation(device, name, begins.pop(), time))
    return sorted(spans, key=lambda span: (span.begin_us, -span.end_us))
