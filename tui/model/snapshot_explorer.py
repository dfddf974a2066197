"""State of the snapshot explorer: device, moment, mark, part of the window, view."""

import gc
from bisect import bisect_right

from ...protocol.analysis.allocator.snapshot.analysis import (
    Between,
    Change,
    Oom,
    between,
    difference,
    find_oom,
    live_stacks,
)
from ...protocol.analysis.allocator.snapshot.replay import Replay
from ...protocol.analysis.allocator.snapshot.stack_tree import Node, StackTree
from ...protocol.snapshot.model import ACTIONS, OWN_SPAN, Annotation
from ...protocol.text import gib
from .snapshot_bands import Band, bands_of

VIEWS = ("stacks", "blocks", "between", "segments", "report", "difference")
NARROWEST_WINDOW = 16
"""Minimum number of moments shown by the timeline."""


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
        self.version = 0
        """Incremented with every visible change."""
        self._number = next((number for number, replay in enumerate(replays) if replay.ooms), 0)
        self._trees: dict[bool, StackTree] = {}
        self._bands: dict[int, list[list[Band]]] = {}
        self._spans: dict[int, list[Annotation]] = {}
        self._oom: dict[int, Oom | None] = {}
        self._difference: dict[tuple[int, int], list[Change]] = {}
        self.mark: int | None = None
        self._begin()

    @property
    def replay(self) -> Replay:
        """The device in view."""
        return self.replays[self._number]

    @property
    def views(self) -> tuple[str, ...]:
        """The available views; the difference requires a second file."""
        return VIEWS if self.before else VIEWS[:-1]

    @property
    def oom(self) -> Oom | None:
        """The out-of-memory error of the device in view, if its trace has one."""
        if self._number not in self._oom:
            self._oom[self._number] = find_oom(self.replay)
        return self._oom[self._number]

    def _begin(self) -> None:
        self.first, self.last = -1, self.replay.last
        oom = self.replay.oom_index()
        self.cursor = oom if oom is not None else self.replay.peak_index
        self.mark = None
        self.version += 1

    def next_device(self) -> None:
        """Go to the next device."""
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
        self.version += 1

    def zoom(self, closer: bool) -> None:
        """Show half as much of the window, or twice as much, around the cursor."""
        width = self.last - self.first
        wanted = max(NARROWEST_WINDOW, width // 2) if closer else width * 2 + 1
        wanted = min(wanted, self.replay.last + 1)
        self.first = max(-1, min(self.cursor - wanted // 2, self.replay.last - wanted))
        self.last = self.first + wanted
        self.version += 1

    def set_mark(self) -> None:
        """Mark the cursor's moment; on the mark itself, remove it."""
        self.mark = None if self.mark == self.cursor else self.cursor
        self.version += 1

    def show(self, view: str) -> None:
        """Select a view."""
        if view in self.views:
            self.view = view
            self.version += 1

    def search(self, text: str) -> None:
        """Keep only stacks that contain a text."""
        self.find = text
        self.version += 1

    def toggle_fold(self) -> None:
        """Fold runs of library frames, or show every frame."""
        self.fold = not self.fold
        self.version += 1

    def toggle(self, path: tuple[tuple[int, ...], ...], shown: bool) -> None:
        """Open or close a branch."""
        self.opened[path] = not shown
        self.version += 1

    def between(self) -> Between | None:
        """Compare the mark with the cursor; None without a mark."""
        return None if self.mark is None else between(self.replay, self.mark, self.cursor)

    def difference(self) -> list[Change]:
        """Compare the end of the first file with the cursor of the second, on the device in view."""
        old = next((replay for replay in self.before if replay.device == self.replay.device), None)
        if old is None:
            return []
        key = (self._number, self.cursor)
        if key not in self._difference:
            self._difference = {key: difference(old, old.last, self.replay, self.cursor)}
        return self._difference[key]

    def tree(self) -> Node:
        """Return the tree of stacks at the cursor, with bytes."""
        tree = self._trees.get(self.fold)
        if tree is None or tree.snapshot is not self.replay.snapshot:
            tree = self._trees[self.fold] = StackTree(self.replay.snapshot, self.fold)
        return tree.weigh(live_stacks(self.replay, self.cursor), self.find)

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
        if self._number not in self._spans:
            self._spans[self._number] = [one for one in replay.snapshot.annotations if one.device == replay.device]
        spans = self._spans[self._number]
        until = bisect_right(spans, time, key=lambda span: span.begin_us)
        names = [span.name.removeprefix(OWN_SPAN) for span in spans[:until] if time and span.end_us >= time]
        if self.cursor >= 0 and (note := memoryview(replay.trace.notes).cast("I")[self.cursor]):
            names.append(replay.snapshot.notes[note])
        return " > ".join(names[-4:])

    def seconds(self) -> float | None:
        """Return the cursor's time since the first entry, seconds; None if times were not recorded."""
        now, begin = self.replay.time_of(self.cursor), self.replay.time_of(0)
        return (now - begin) / 1e6 if now and begin else None
