"""A snapshot as compact columns: about 40 MB for a million trace entries, without an object for each.

Columns are bytes in this machine's order, read through ``memoryview.cast``, and sent unchanged by the reading process,
which makes them from the plain data of the pickle and checks its structure. Addresses are unsigned 64-bit, sizes in
bytes, times in microseconds since 1970, stacks are indices into ``stacks``.

Formats differ by PyTorch version: before 2.2 entries have no time, without ``stacks`` no frames, and before 2.1 blocks
have a ``history`` instead of ``requested_size`` and ``frames``. A missing key is not an error; a wrong type is.
"""

from array import array
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from typing import Any, NamedTuple

import msgspec

from ..errors import FtmonError
from ..text import sanitize

ACTIONS = (
    "other", "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
    "segment_unmap", "oom", "snapshot", "user_defined",
)  # fmt: skip
"""Actions of trace entries; a column holds the index. Unknown actions are ``other``."""
ALLOC, FREE_REQUESTED, FREE_COMPLETED = 1, 2, 3
SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM = 4, 5, 6, 7, 8
STATES = ("inactive", "active_allocated", "active_pending_free")
"""States of a block: free, allocated, or freed by the program while a stream still uses it."""
FREE, ALLOCATED, PENDING = 0, 1, 2
OWN_SPAN = "ftmon "  # prefix of the names of steps and phases that ftmon's probe records as annotations


class Frame(NamedTuple):
    """One call of a stack."""

    name: str
    filename: str
    line: int


class Trace(msgspec.Struct, frozen=True):
    """Actions of one device's allocator, oldest first; all columns have the same length."""

    device: int
    actions: bytes  # `B`: indices into `ACTIONS`
    addresses: bytes  # `Q`; 0 for `oom`
    sizes: bytes  # `q`: bytes *requested* for allocations, frees and `oom`; the segment's size for segments
    streams: bytes  # `q`
    times: bytes  # `q`; 0 if the version of PyTorch records none
    stacks: bytes  # `I`
    notes: bytes  # `I`: index into `Snapshot.notes` of the entry's user metadata; 0: none
    device_free: dict[int, int] = {}  # free bytes on the device as the driver reports them, by index of the `oom` entry

    def __len__(self) -> int:
        return len(self.actions)


class Segment(msgspec.Struct, frozen=True):
    """Memory that the driver allocated in one piece; of an expandable segment, one mapped range."""

    device: int
    address: int
    size: int
    stream: int
    small: bool  # it serves requests of up to 1 MiB
    expandable: bool
    pool: str  # `""` for the shared pool, else a private pool's identifier (CUDA graphs, `MemPool`)
    stack: int
    first_block: int
    blocks: int


class Annotation(msgspec.Struct, frozen=True):
    """A named span that was recorded with the trace."""

    device: int
    name: str
    begin_us: int
    end_us: int


class Snapshot(msgspec.Struct, frozen=True):
    """One snapshot: the allocator's final state, and the recorded actions before it.

    If it was made without stacks, ``stacks`` and the columns of indices into it are empty.
    """

    path: str
    segments: list[Segment]
    block_addresses: bytes  # `Q`, the blocks of all segments in order
    block_sizes: bytes  # `q`: size of the block, rounding included
    block_requested: bytes  # `q`: size that the program requested; 0 for a free block
    block_states: bytes  # `B`: indices into `STATES`
    block_stacks: bytes  # `I`
    traces: list[Trace]
    frames: list[Frame]
    stacks: list[list[int]]  # indices of the frames of each stack, innermost first; stack 0 is empty
    notes: list[str]
    annotations: list[Annotation] = []
    divisions: list[int] = []  # `roundup_power2_divisions` for requests of 1, 2, 4 ... MiB; empty or below 2: none.
    max_split_size: int = -1  # blocks of at least this size were not split, bytes; -1: no limit

    def devices(self) -> list[int]:
        """Return the devices with segments or trace entries; device 0 if there are none."""
        found = {segment.device for segment in self.segments} | {trace.device for trace in self.traces if len(trace)}
        return sorted(found) or [0]

    def trace(self, device: int) -> Trace | None:
        """Return a device's trace, or None."""
        return next((trace for trace in self.traces if trace.device == device), None)

    def frames_of(self, stack: int) -> list[Frame]:
        """Return a stack's frames, innermost first."""
        return [self.frames[index] for index in self.stacks[stack]]


_LARGEST_LINE = 2**47


class Stacks:
    """All frames and stacks of a snapshot, each distinct one once; ``stacks[0]`` is the empty one.

    Entries share their frames' dictionaries, so a stack is identified by the frames' identities.
    """

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.stacks: list[list[int]] = [[]]
        self._frame_of: dict[Frame, int] = {}
        self._frame_by_id: dict[int, int] = {}
        self._number_of: dict[tuple[int, ...], int] = {(): 0}
        self._by_ids: dict[tuple[int, ...], int] = {(): 0}
        # Identities are keys here, so their objects must stay alive.
        self._kept: list[Any] = []

    def column(self, stacks: Sequence[Any]) -> "array[int]":
        """Return the numbers of a column of stacks, each a list of dictionaries, innermost first."""
        return array("I", map(self.number, stacks))

    def number(self, frames: Any) -> int:
        """Return the number of one stack."""
        key = tuple(map(id, frames))
        found = self._by_ids.get(key)
        if found is None:
            self._kept.append(frames)
            numbers = tuple([self._frame(frame) for frame in frames])
            found = self._by_ids[key] = self._number_of.setdefault(numbers, len(self.stacks))
            if found == len(self.stacks):
                self.stacks.append(list(numbers))
        return found

    def _frame(self, raw: dict[str, Any]) -> int:
        found = self._frame_by_id.get(id(raw))
        if found is None:
            name, filename, line = raw.get("name") or "", raw.get("filename") or "", raw.get("line") or 0
            if not isinstance(name, str) or not isinstance(filename, str):
                raise TypeError("a frame whose name is no text")
            if not isinstance(line, int) or not 0 <= line < _LARGEST_LINE:
                raise ValueError("a frame whose line is no number")
            frame = Frame(sanitize(name, 300), sanitize(filename, 1000), line)
            found = self._frame_of.setdefault(frame, len(self.frames))
            if found == len(self.frames):
                self.frames.append(frame)
            self._frame_by_id[id(raw)] = found
        return found


class SnapshotError(FtmonError):
    """A file that cannot be opened as a PyTorch memory snapshot; the command ends with status 2."""

    exit_status = 2


_LARGEST = 2**47  # sizes of 128 TiB and more are invalid
_DIVISIONS = 16
_STATES = {"inactive": FREE, "active_allocated": ALLOCATED}
_ACTIONS = {name: index for index, name in enumerate(ACTIONS)}


@contextmanager
def _checked(path: str) -> Generator[None, None, None]:
    try:
        yield
    except (TypeError, ValueError, OverflowError, AttributeError, KeyError, IndexError) as error:
        raise SnapshotError(f"{path}: not a memory snapshot: {sanitize(str(error), 80)}") from None


def compact(raw: Any, path: str, *, with_stacks: bool = True) -> Snapshot:
    """Return the columns of a pickle's plain data; raise ``SnapshotError`` for data without a snapshot's structure."""
    with _checked(path):
        return _Compactor(path, Stacks() if with_stacks else None).snapshot(raw)


class _Compactor:
    def __init__(self, path: str, stacks: Stacks | None) -> None:
        self._path, self._stacks = path, stacks
        self._note_of: dict[str, int] = {"": 0}

    def _stack_column(self, stacks: list[Any]) -> bytes:
        return b"" if self._stacks is None else self._stacks.column(stacks).tobytes()

    def snapshot(self, raw: Any) -> Snapshot:
        if isinstance(raw, list):
            raw = {"segments": raw}
        if not isinstance(raw, dict) or not isinstance(raw.get("segments"), list):
            raise SnapshotError(
                f"{self._path}: not a memory snapshot (a pickle without 'segments'): "
                "write one with torch.cuda.memory._dump_snapshot(path)"
            )
        traces = [self._trace(device, trace) for device, trace in enumerate(raw.get("device_traces") or [])]
        segments, blocks = self._segments(raw["segments"])
        settings = raw.get("allocator_settings") or {}
        divisions = settings.get("roundup_power2_divisions") or {}
        found = ([], []) if self._stacks is None else (self._stacks.frames, self._stacks.stacks)
        return Snapshot(
            self._path, segments, blocks.addresses.tobytes(), blocks.sizes.tobytes(), blocks.requested.tobytes(),
            blocks.states, blocks.stacks, traces, *found, list(self._note_of),
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
        oom = [index for index, action in enumerate(actions) if action == OOM]
        return Trace(
            device,
            actions,
            array("Q", [entry.get("addr") or 0 for entry in entries]).tobytes(),
            _sizes([entry.get("size") or 0 for entry in entries], oom).tobytes(),
            array("q", [entry.get("stream") or 0 for entry in entries]).tobytes(),
            array("q", [entry.get("time_us") or 0 for entry in entries]).tobytes(),
            self._stack_column([entry.get("frames") or () for entry in entries]),
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
                self._stacks.number(segment.get("frames") or ()) if self._stacks is not None else 0, first, len(blocks),
            ))  # fmt: skip
        return segments, self._blocks(segments, list(chain.from_iterable(of_segment)))

    def _blocks(self, segments: list[Segment], raw: list[dict[str, Any]]) -> "_Blocks":
        # Column by column, because hundreds of thousands of blocks are common.
        sizes = _sizes([block["size"] for block in raw])
        states = bytes([_STATES.get(str(block.get("state")), PENDING) for block in raw])
        addresses: list[Any] = [block.get("address") for block in raw]
        if None in addresses:
            of_segment = [(each.address, sizes[each.first_block : each.first_block + each.blocks]) for each in segments]
            # The last is a segment's end, which is not an address of a block.
            addresses = [at for begin, own in of_segment for at in list(accumulate(own, initial=begin))[:-1]]
        asked = [block.get("requested_size") for block in raw]
        frames = [block.get("frames") for block in raw]
        if None in asked or None in frames:
            history = [(block.get("history") or [{}])[0] for block in raw]
            asked = [
                old.get("real_size", size) if size_asked is None else size_asked
                for size_asked, old, size in zip(asked, history, sizes, strict=True)
            ]
            frames = [old.get("frames") if found is None else found for found, old in zip(frames, history, strict=True)]
        wanted = [0 if state == FREE else size for state, size in zip(states, asked, strict=True)]
        stacks = self._stack_column([found or () for found in frames])
        return _Blocks(array("Q", addresses), sizes, _sizes(wanted), states, stacks)

    def _note_column(self, notes: list[Any]) -> "array[int]":
        text_of = {note: sanitize(note, 200) if isinstance(note, str) else "" for note in set(notes)}
        for text in text_of.values():
            self._note_of.setdefault(text, len(self._note_of))
        number = {note: self._note_of[text] for note, text in text_of.items()}
        return array("I", map(number.__getitem__, notes))


class _Blocks(NamedTuple):
    addresses: "array[int]"
    sizes: "array[int]"
    requested: "array[int]"
    states: bytes
    stacks: bytes


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
