"""State of the snapshot explorer: device, moment, mark, window and view, with the rows of each view."""

import gc
import textwrap
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from ...protocol.analysis import oom_report
from ...protocol.analysis.allocator import snapshot_layout, snapshot_views
from ...protocol.analysis.allocator.allocations import columns
from ...protocol.analysis.allocator.snapshot_replay import Replay
from ...protocol.code_owner import library_of
from ...protocol.messages.telemetry import PHASES
from ...protocol.snapshot.columns import ACTIONS, OWN_SPAN, Annotation
from ...protocol.text import gib, sanitize

MOST_BANDS = 20_000  # maximum number of bands per row; a profiler may record more annotations than a screen can show


class Band(NamedTuple):
    """A part of the trace, from the state after entry ``first`` to that after ``last``."""

    first: int
    last: int
    name: str
    phase: str = ""  # name of the phase, if it is one of ftmon's


def bands_of(replay: Replay) -> list[list[Band]]:
    """List the bands of a device, the row of phases first; empty rows are omitted.

    Only the outermost of nested spans are drawn; the text names all at the cursor.
    """
    spans = [span for span in replay.snapshot.annotations if span.device == replay.device]
    own = [span for span in spans if span.name.startswith(OWN_SPAN)]
    phases = [span for span in own if span.name.removeprefix(OWN_SPAN) in PHASES]
    steps = [span for span in own if span.name.removeprefix(OWN_SPAN) not in PHASES]
    others = [span for span in spans if not span.name.startswith(OWN_SPAN)]
    rows = [_row(replay, phases), _row(replay, steps), _row(replay, _outermost(others)), _notes(replay)]
    return [row for row in rows if row]


def _row(replay: Replay, spans: Iterable[Annotation]) -> list[Band]:
    times = columns(replay.trace.times, "q")
    if not replay.entries or not times[0]:
        return []
    found: list[Band] = []
    for span in spans:
        first, last = bisect_left(times, span.begin_us), bisect_right(times, span.end_us) - 1
        if first <= last:
            name = span.name.removeprefix(OWN_SPAN)
            found.append(Band(first, last, name, name if name in PHASES and name != span.name else ""))
    return found[:MOST_BANDS]


def _outermost(spans: list[Annotation]) -> list[Annotation]:
    """Return the spans that are not inside another; if one contains all others, those directly inside it."""
    # Sorted by beginning, longer ones first: if the first one ends last, it contains all others.
    furthest = max((span.end_us for span in spans[1:]), default=0)
    first = 0
    while first < len(spans) - 1 and spans[first].end_us >= furthest:
        first += 1
    found: list[Annotation] = []
    for span in spans[first:]:
        if not found or span.end_us > found[-1].end_us:
            found.append(span)
    return found


def _notes(replay: Replay) -> list[Band]:
    notes = replay.snapshot.notes
    if len(notes) < 2:
        return []
    found: list[Band] = []
    at = 0
    for note, run in groupby(columns(replay.trace.notes, "I")):
        length = sum(1 for _ in run)
        if note:
            found.append(Band(at, at + length - 1, notes[note]))
        at += length
    return found[:MOST_BANDS]


VIEWS = ("stacks", "blocks", "between", "segments", "report", "difference")
NARROWEST_WINDOW = 16


def freeze_garbage_collector() -> None:
    """Exclude existing objects from garbage collection, and make it rarer: moves create many small dictionaries.

    For a process that only explores: no object of a snapshot is part of a cycle.
    """
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)


class Explorer:
    """The state of the explorer, without Textual.

    A moment is the index of a trace entry; -1 is the moment before the first. ``first`` and ``last`` are the moments at
    the timeline's edges.
    """

    def __init__(self, replays: list[Replay], before: list[Replay] | None = None) -> None:
        self.replays = replays
        self.before = before or []
        self.view = VIEWS[5] if self.before else VIEWS[0]
        self.fold = True
        self.find = ""
        self.opened: dict[tuple[tuple[int, ...], ...], bool] = {}
        """Branches that were opened or closed by hand, by their path."""
        self._number = next((number for number, replay in enumerate(replays) if replay.ooms), 0)
        self._trees: dict[bool, snapshot_layout.StackTree] = {}
        self._bands: dict[int, list[list[Band]]] = {}
        self._ooms: dict[int, list[str]] = {}
        self.mark: int | None = None
        self._begin()

    @property
    def replay(self) -> Replay:
        """The device in view."""
        return self.replays[self._number]

    @property
    def choices(self) -> object:
        """A value that changes with all that the views depend on."""
        moments = self.first, self.last, self.cursor, self.mark
        return self._number, moments, self.view, self.fold, self.find, tuple(self.opened.items())

    @property
    def views(self) -> tuple[str, ...]:
        """The available views; the difference requires a second file."""
        return VIEWS if self.before else VIEWS[:-1]

    @property
    def oom(self) -> list[str]:
        """Why the last allocation of the device in view failed, in words; empty if none failed."""
        if self._number not in self._ooms:
            report = oom_report.report_of(self.replay.snapshot, [self.replay])
            self._ooms[self._number] = oom_report.verdict_lines(report, self.replay) if report is not None else []
        return self._ooms[self._number]

    def _begin(self) -> None:
        self.first, self.last = -1, self.replay.last
        oom = self.replay.oom_index()
        self.cursor = oom if oom is not None else self.replay.peak_index
        self.mark = None

    def next_device(self) -> None:
        self._number = (self._number + 1) % len(self.replays)
        self.opened.clear()
        self._begin()

    def move(self, moment: int) -> None:
        """Put the cursor on a moment; the timeline scrolls if it is out of view."""
        self.cursor = max(-1, min(moment, self.replay.last))
        if not self.first <= self.cursor <= self.last:
            width = self.last - self.first
            self.first = max(-1, min(self.cursor - width // 2, self.replay.last - width))
            self.last = self.first + width

    def zoom(self, closer: bool) -> None:
        """Show half as much of the window, or twice as much, around the cursor."""
        width = self.last - self.first
        wanted = max(NARROWEST_WINDOW, width // 2) if closer else width * 2 + 1
        wanted = min(wanted, self.replay.last + 1)
        self.first = max(-1, min(self.cursor - wanted // 2, self.replay.last - wanted))
        self.last = self.first + wanted

    def set_mark(self) -> None:
        """Mark the cursor's moment; on the mark itself, remove it."""
        self.mark = None if self.mark == self.cursor else self.cursor

    def show(self, view: str) -> None:
        if view in self.views:
            self.view = view

    def search(self, text: str) -> None:
        self.find = text

    def toggle_fold(self) -> None:
        """Fold runs of library frames, or show every frame."""
        self.fold = not self.fold

    def toggle(self, path: tuple[tuple[int, ...], ...], shown: bool) -> None:
        """Open or close a branch."""
        self.opened[path] = not shown

    def tree(self) -> snapshot_layout.Node:
        """Return the tree of stacks at the cursor, with bytes."""
        tree = self._trees.get(self.fold)
        if tree is None or tree.snapshot is not self.replay.snapshot:
            tree = self._trees[self.fold] = snapshot_layout.StackTree(self.replay.snapshot, self.fold)
        return tree.weigh(snapshot_views.live_stacks(self.replay, self.cursor), self.find)

    def entry_words(self) -> str:
        """Return the entry at the cursor in words: ``alloc 4.64 GiB``."""
        replay = self.replay
        if self.cursor < 0:
            return "before the first entry" if replay.entries else "the end; no history was recorded"
        size = memoryview(replay.trace.sizes).cast("q")[self.cursor]
        name = ACTIONS[replay.trace.actions[self.cursor]].replace("_", " ")
        return f"{name} {gib(size)}" if size else name

    @property
    def bands(self) -> list[list[Band]]:
        """Rows of bands recorded with the current device's trace."""
        if self._number not in self._bands:
            self._bands[self._number] = bands_of(self.replay)
        return self._bands[self._number]

    def annotation_words(self) -> str:
        """Return the names of the spans at the cursor, outermost first, and the entry's own note."""
        replay = self.replay
        time = replay.time_of(self.cursor)
        spans = [one for one in replay.snapshot.annotations if one.device == replay.device]
        names = [span.name.removeprefix(OWN_SPAN) for span in spans if time and span.begin_us <= time <= span.end_us]
        if self.cursor >= 0 and (note := memoryview(replay.trace.notes).cast("I")[self.cursor]):
            names.append(replay.snapshot.notes[note])
        return " > ".join(names[-4:])

    def seconds(self) -> float | None:
        """Return the cursor's time since the first entry, seconds; None if times were not recorded."""
        now, begin = self.replay.time_of(self.cursor), self.replay.time_of(0)
        return (now - begin) / 1e6 if now and begin else None


MOST_BLOCKS = 500
_OPEN_FOUND_FROM = 0.001
_OPEN_FROM = 0.02
"""A branch is initially open if it has at least this share of all bytes, unless it contains only library code."""


class Row(NamedTuple):
    """One line: figures, text, and for a branch of the tree its path and whether it is open."""

    words: str
    size: int | None = None
    blocks: int = 0
    share: float = 0.0
    depth: int = 0
    path: tuple[tuple[int, ...], ...] = ()
    branch: bool = False
    shown: bool = False
    tone: str = "text"
    signed: bool = False
    piece: snapshot_layout.Piece | None = None
    head: bool = False


def rows_of(explorer: Explorer, width: int) -> list[Row]:
    """List the rows of the selected view; ``width``: cells at which sentences are wrapped."""
    if explorer.view == "report":
        return list(_report(explorer, width))
    make = {"stacks": _stacks, "blocks": _blocks, "between": _between, "segments": _segments}
    return list(make.get(explorer.view, _difference)(explorer))


def _stacks(explorer: Explorer) -> Iterator[Row]:
    root = explorer.tree()
    without, total = root.of.without, max(1, root.bytes)
    if root.bytes and root.bytes == without.bytes:
        yield Row("no stacks were recorded for these", root.bytes, root.blocks, 1.0, tone="dim")
        return
    yield from _branches(explorer, root, (), 0, total)
    if without.bytes:
        yield Row(snapshot_views.NO_STACK, without.bytes, without.blocks, without.bytes / total, tone="dim")


def _branches(
    explorer: Explorer, node: snapshot_layout.Node, path: tuple[snapshot_layout.Key, ...], depth: int, total: int
) -> Iterator[Row]:
    # During a search, all matches are open, except for branches with very little memory.
    open_from = total * (_OPEN_FOUND_FROM if explorer.find else _OPEN_FROM)
    for child in node.ordered():
        below = (*path, child.frames)
        branch = bool(child.children)
        shown = branch and explorer.opened.get(below, child.bytes >= open_from)
        library = library_of(explorer.replay.snapshot.frames[child.frames[-1]].filename)
        yield Row(
            snapshot_layout.node_words(child), child.bytes, child.blocks, child.bytes / total, depth, below,
            branch, shown, "dim" if library else "text",
        )  # fmt: skip
        if shown:
            yield from _branches(explorer, child, below, depth + 1, total)


def _blocks(explorer: Explorer) -> Iterator[Row]:
    replay = explorer.replay
    of = replay.allocations
    total = max(1, replay.at(replay.allocated, explorer.cursor))
    for number in snapshot_views.largest(replay, explorer.cursor, MOST_BLOCKS):
        if explorer.find and not snapshot_layout.matches(replay.snapshot, of.stacks[number], explorer.find):
            continue
        since = f"since {of.begins[number]:,}" if of.begins[number] >= 0 else "from before"
        size = of.sizes[number]
        waste = size - of.requested[number]
        words = f"{since:<16} {snapshot_views.place(replay.snapshot, of.stacks[number])}"
        yield Row(words + (f"  rounding {gib(waste)}" if waste >= 2**16 else ""), size, 1, size / total)


def _between(explorer: Explorer) -> Iterator[Row]:
    if explorer.mark is None:
        yield Row("no mark is set: m marks the cursor's moment, then move the cursor", tone="dim")
        return
    replay = explorer.replay
    found = snapshot_views.between(replay, explorer.mark, explorer.cursor)
    change = replay.at(replay.allocated, found.last) - replay.at(replay.allocated, found.first)
    yield Row(f"from entry {found.first:,} to {found.last:,}: allocated", change, signed=True, head=True)
    for words, part, sign in (
        ("allocated and still held", found.stayed, 1),
        ("held before, freed in between", found.gone, -1),
        ("allocated and freed again in between", found.came_and_went, 1),
    ):
        whole = snapshot_views.total(part)
        yield Row(words, sign * whole.bytes, whole.blocks, head=True, signed=True)
        for stack, one in list(snapshot_views.by_size(part).items())[:MOST_BLOCKS]:
            if not explorer.find or snapshot_layout.matches(replay.snapshot, stack, explorer.find):
                words, share = snapshot_views.place(replay.snapshot, stack), one.bytes / max(1, whole.bytes)
                yield Row(words, sign * one.bytes, one.blocks, share, 1, signed=True)


def _segments(explorer: Explorer) -> Iterator[Row]:
    pieces = snapshot_layout.layout_at(explorer.replay, explorer.cursor)
    for piece in sorted(pieces, key=lambda piece: (-piece.size, piece.address)):
        kind = "small" if piece.small else "large"
        words = [kind, "expandable" if piece.expandable else "", f"pool {piece.pool}" if piece.pool else ""]
        stream = f"stream {piece.stream:#x}" if piece.stream else ""
        blocks = piece.active_blocks + len(piece.free_sizes)
        yield Row(" ".join(filter(None, [*words, stream])), piece.size, blocks, piece=piece)


def _difference(explorer: Explorer) -> Iterator[Row]:
    old = next((replay for replay in explorer.before if replay.device == explorer.replay.device), None)
    name = sanitize(Path((old or explorer.before[0]).snapshot.path).name)
    if old is None:
        yield Row(f"{name} has no device {explorer.replay.device}", tone="dim")
        return
    change = explorer.replay.at(explorer.replay.allocated, explorer.cursor) - old.allocated[-1]
    yield Row(f"more or less than at the end of {name}", change, signed=True, head=True)
    find = explorer.find.lower()
    for one in snapshot_views.difference(old, old.last, explorer.replay, explorer.cursor):
        if find and not any(find in frame.name.lower() or find in frame.filename.lower() for frame in one.frames):
            continue
        inner = snapshot_layout.frame_words(one.frames[0]) if one.frames else snapshot_views.NO_STACK
        own = next((frame for frame in one.frames if not library_of(frame.filename)), None)
        if own is not None and own != one.frames[0]:
            inner += f"  (from {snapshot_layout.frame_words(own)})"
        yield Row(inner, one.bytes, one.blocks, 0.0, 1, signed=True)


def _report(explorer: Explorer, width: int) -> Iterator[Row]:
    replay = explorer.replay
    if explorer.oom:
        yield Row(f"out of memory at entry {replay.oom_index():,}", head=True, tone="error")
        yield from _wrapped(explorer.oom, width)
        for frame in oom_report.failing_frames(replay):
            yield Row(snapshot_layout.frame_words(frame), depth=2, tone="dim")
    yield Row("fragmentation at the cursor", head=True)
    fragmentation = snapshot_layout.fragmentation(snapshot_layout.layout_at(replay, explorer.cursor))
    yield from _wrapped(snapshot_layout.fragmentation_words(fragmentation), width)
    yield Row("how sure the figures are", head=True)
    of = replay.allocations
    sure = [
        f"{replay.entries:,} trace entries, tied to the {len(of.known):,} blocks that are allocated at the end",
        f"{of.unsure:,} blocks from before the window ended in it; the figures may be {gib(of.unsure_bytes)} low"
        if of.unsure_bytes
        else "every block's size is exact",
    ]
    if of.lost:
        sure.append(f"{of.lost:,} frees are missing from the trace")
    yield from _wrapped(sure, width)


def _wrapped(sentences: Iterable[str], width: int) -> Iterator[Row]:
    for sentence in sentences:
        for index, line in enumerate(textwrap.wrap(sentence, max(20, width - 8), break_on_hyphens=False)):
            yield Row(line, depth=1 if index == 0 else 2)
