"""From the plain data of a snapshot's pickle to columns, checking what it claims to be on the way.

Formats differ by PyTorch's version: before 2.2 entries have no time, without ``stacks`` no frames, before 2.1 blocks
keep a ``history`` in place of ``requested_size`` and ``frames``. A missing key is no error; a wrong type is.
"""

from array import array
from collections.abc import Sequence
from typing import Any

from ..text import sanitize
from . import model
from .errors import SnapshotError
from .model import Annotation, Frame, Segment, Snapshot, Trace

_LARGEST = 2**47
"""No size beyond 128 TiB is believed."""
_DIVISIONS = 16
_PIECE = 8192
_STATES = {"inactive": model.FREE, "active_allocated": model.ALLOCATED}
_ACTIONS = {name: index for index, name in enumerate(model.ACTIONS)}


def compact(raw: Any, path: str) -> Snapshot:
    """Turn what ``torch.cuda.memory._snapshot()`` returned into columns; the data is used up on the way.

    Raises:
        SnapshotError: it has not the shape of a snapshot.
    """
    try:
        return _Compactor(path).snapshot(raw)
    except (TypeError, ValueError, OverflowError, AttributeError, KeyError, IndexError) as error:
        raise SnapshotError(f"{path}: not a memory snapshot: {sanitize(str(error), 80)}") from None


class _Compactor:
    def __init__(self, path: str) -> None:
        self.path = path
        self.frames: list[Frame] = []
        self.stacks: list[list[int]] = [[]]
        self.notes: list[str] = [""]
        self._note_of: dict[str, int] = {"": 0}
        self._frame_of: dict[Frame, int] = {}
        self._frame_by_id: dict[int, int] = {}
        self._stack_of: dict[tuple[int, ...], int] = {(): 0}
        self._stack_by_ids: dict[tuple[int, ...], int] = {(): 0}
        # Identities are keys here, so what they belong to must stay.
        self._kept: list[object] = []

    def snapshot(self, raw: Any) -> Snapshot:
        if isinstance(raw, list):
            raw = {"segments": raw}
        if not isinstance(raw, dict) or not isinstance(raw.get("segments"), list):
            raise SnapshotError(
                f"{self.path}: not a memory snapshot (a pickle without 'segments'): "
                "write one with torch.cuda.memory._dump_snapshot(path)"
            )
        traces = [self._trace(device, trace) for device, trace in enumerate(raw.get("device_traces") or [])]
        blocks = _Blocks()
        segments = [self._segment(segment, blocks) for segment in raw["segments"]]
        settings = raw.get("allocator_settings") or {}
        divisions = settings.get("roundup_power2_divisions") or {}
        return Snapshot(
            self.path, segments, blocks.addresses.tobytes(), blocks.sizes.tobytes(), blocks.requested.tobytes(),
            blocks.states.tobytes(), blocks.stacks.tobytes(), traces, self.frames, self.stacks, self.notes,
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
        oom = [index for index, action in enumerate(actions) if action == model.OOM]
        return Trace(
            device,
            actions,
            array("Q", [entry.get("addr") or 0 for entry in entries]).tobytes(),
            _sizes([entry.get("size") or 0 for entry in entries]).tobytes(),
            array("q", [entry.get("stream") or 0 for entry in entries]).tobytes(),
            array("q", [entry.get("time_us") or 0 for entry in entries]).tobytes(),
            self._stack_column([entry.get("frames") or () for entry in entries]).tobytes(),
            self._note_column([entry.get("user_metadata") for entry in entries]).tobytes(),
            # Some versions keep what was free in the entry's address.
            {i: _size(entries[i].get("device_free", entries[i].get("addr")) or 0) for i in oom},
        )

    def _segment(self, raw: dict[str, Any], blocks: "_Blocks") -> Segment:
        first, address = len(blocks.sizes), int(raw.get("address") or 0)
        at = address
        for block in raw.get("blocks") or []:
            size = _size(block["size"])
            history = (block.get("history") or [{}])[0]
            state = _STATES.get(str(block.get("state")), model.PENDING)
            asked = block.get("requested_size", history.get("real_size", size)) if state != model.FREE else 0
            blocks.addresses.append(block.get("address", at))
            blocks.sizes.append(size)
            blocks.requested.append(_size(asked))
            blocks.states.append(state)
            blocks.stacks.append(self._stack(block.get("frames", history.get("frames")) or ()))
            at += size
        pool = raw.get("segment_pool_id") or (0, 0)
        return Segment(
            _size(raw.get("device", 0)), address, _size(raw["total_size"]), int(raw.get("stream") or 0),
            raw.get("segment_type") == "small", bool(raw.get("is_expandable")),
            "" if tuple(pool) == (0, 0) else ".".join(str(int(part)) for part in pool[:2]),
            self._stack(raw.get("frames") or ()), first, len(blocks.sizes) - first,
        )  # fmt: skip

    def _note_column(self, notes: list[Any]) -> "array[int]":
        number = {note: self._note(note) for note in set(notes)}
        return array("I", map(number.__getitem__, notes))

    def _note(self, note: Any) -> int:
        text = sanitize(note, 200) if isinstance(note, str) else ""
        found = self._note_of.setdefault(text, len(self.notes))
        if found == len(self.notes):
            self.notes.append(text)
        return found

    def _stack_column(self, stacks: Sequence[Any]) -> "array[int]":
        """Number stacks; entries share their frames' dictionaries, so a stack is told by identities first.

        In short pieces: the identities of a million stacks at once would take hundreds of megabytes.
        """
        known = self._stack_by_ids
        column: array[int] = array("I")
        for begin in range(0, len(stacks), _PIECE):
            piece = stacks[begin : begin + _PIECE]
            keys = [tuple(map(id, frames)) for frames in piece]
            found = list(map(known.get, keys))
            if None in found:
                found = [self._numbered(key, frames) for key, frames in zip(keys, piece, strict=True)]
            column.extend(found)  # type: ignore[arg-type]  # no None is left
        return column

    def _numbered(self, key: tuple[int, ...], frames: Any) -> int:
        found = self._stack_by_ids.get(key)
        return self._new_stack(key, frames) if found is None else found

    def _stack(self, frames: Any) -> int:
        return self._numbered(tuple(map(id, frames)), frames)

    def _new_stack(self, key: tuple[int, ...], frames: Any) -> int:
        self._kept.extend(frames)
        numbers = tuple([self._frame(frame) for frame in frames])
        found = self._stack_of.get(numbers)
        if found is None:
            found = self._stack_of[numbers] = len(self.stacks)
            self.stacks.append(list(numbers))
        self._stack_by_ids[key] = found
        return found

    def _frame(self, raw: dict[str, Any]) -> int:
        found = self._frame_by_id.get(id(raw))
        if found is None:
            name, filename = raw.get("name") or "", raw.get("filename") or ""
            if not isinstance(name, str) or not isinstance(filename, str):
                raise TypeError("a frame whose name is no text")
            frame = Frame(sanitize(name, 300), sanitize(filename, 1000), _size(raw.get("line") or 0))
            found = self._frame_of.setdefault(frame, len(self.frames))
            if found == len(self.frames):
                self.frames.append(frame)
            self._frame_by_id[id(raw)] = found
        return found


class _Blocks:
    def __init__(self) -> None:
        self.addresses: array[int] = array("Q")
        self.sizes: array[int] = array("q")
        self.requested: array[int] = array("q")
        self.states: array[int] = array("B")
        self.stacks: array[int] = array("I")


def _size(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < _LARGEST:
        raise ValueError(f"a size that is none: {str(value)[:40] if isinstance(value, int | float | str) else '?'}")
    return value


def _sizes(values: list[Any]) -> "array[int]":
    column: array[int] = array("q", values)
    if column and not 0 <= min(column) <= max(column) < _LARGEST:
        raise ValueError("a size that is none")
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
