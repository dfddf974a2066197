"""Builds the rows of each view of the explorer from its state."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

from ...protocol.analysis.allocator.snapshot.analysis import NO_STACK, by_size, largest, place, total
from ...protocol.analysis.allocator.snapshot.fragmentation_text import fragmentation_words
from ...protocol.analysis.allocator.snapshot.layout import Piece, fragmentation, layout_at
from ...protocol.analysis.allocator.snapshot.replay import Replay
from ...protocol.analysis.allocator.snapshot.stack_tree import Key, Node, node_words
from ...protocol.analysis.allocator.snapshot.stacks import Tally, frame_words, matches
from ...protocol.code_owner import library_of
from ...protocol.text import gib, sanitize
from .snapshot_explorer import Explorer

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
    """Share of all bytes, 0 to 1."""
    depth: int = 0
    path: tuple[tuple[int, ...], ...] = ()
    branch: bool = False
    shown: bool = False
    tone: str = "text"
    signed: bool = False
    piece: Piece | None = None
    head: bool = False


class Rows(Sequence[Row]):
    """Rows that are built when they are shown: a screen shows only a few dozen of thousands."""

    def __init__(self, parts: Sequence[Any], make: Callable[[Any], Row]) -> None:
        self._parts, self._make = parts, make

    def __len__(self) -> int:
        """Count the rows."""
        return len(self._parts)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        """Build a row, or several."""
        if isinstance(index, slice):
            return [self._make(part) for part in self._parts[index]]
        return self._make(self._parts[index])


def rows_of(explorer: Explorer, width: int) -> Sequence[Row]:
    """List the rows of the selected view.

    ``width``: cells at which sentences are wrapped.
    """
    if explorer.view == "stacks":
        return _stacks(explorer)
    if explorer.view == "segments":
        return _segments(explorer)
    if explorer.view == "between":
        return _between(explorer)
    make = {"blocks": _blocks, "difference": _difference}.get(explorer.view)
    return list(make(explorer) if make is not None else _report(explorer, width))


class _Branch(NamedTuple):
    node: Node
    depth: int
    path: tuple[Key, ...]
    shown: bool


def _stacks(explorer: Explorer) -> Sequence[Row]:
    root = explorer.tree()
    without = root.of.without
    if root.bytes and root.bytes == without.bytes:
        return [Row("no stacks were recorded for these", root.bytes, root.blocks, 1.0, tone="dim")]
    total = max(1, root.bytes)
    branches: list[_Branch | Row] = list(_branches(explorer, root, (), 0, total))
    if without.bytes:
        branches.append(Row(NO_STACK, without.bytes, without.blocks, without.bytes / total, tone="dim"))
    return Rows(branches, lambda part: part if isinstance(part, Row) else _branch_row(part, total))


def _branches(explorer: Explorer, node: Node, path: tuple[Key, ...], depth: int, total: int) -> Iterator[_Branch]:
    # During a search, all matches are open, except for branches with very little memory.
    open_from = total * (_OPEN_FOUND_FROM if explorer.find else _OPEN_FROM)
    for child in node.ordered():
        below = (*path, child.frames)
        shown = explorer.opened.get(below, child.bytes >= open_from)
        yield _Branch(child, depth, below, shown)
        if shown:
            yield from _branches(explorer, child, below, depth + 1, total)


def _branch_row(branch: _Branch, total: int) -> Row:
    node = branch.node
    library = bool(library_of(node.of.tree.snapshot.frames[node.frames[-1]].filename))
    has_more = bool(node.children)
    return Row(
        node_words(node), node.bytes, node.blocks, node.bytes / total, branch.depth, branch.path,
        has_more, branch.shown and has_more, "dim" if library else "text",
    )  # fmt: skip


def _blocks(explorer: Explorer) -> Iterator[Row]:
    replay = explorer.replay
    of = replay.allocations
    total = max(1, replay.at(replay.allocated, explorer.cursor))
    for number in largest(replay, explorer.cursor, MOST_BLOCKS):
        if explorer.find and not matches(replay.snapshot, of.stacks[number], explorer.find):
            continue
        since = f"since {of.begins[number]:,}" if of.begins[number] >= 0 else "from before"
        size = of.sizes[number]
        waste = size - of.requested[number]
        more = f"  rounding {gib(waste)}" if waste >= 2**16 else ""
        yield Row(f"{since:<16} {place(replay.snapshot, of.stacks[number])}{more}", size, 1, size / total)


class _Part(NamedTuple):
    stack: int
    tally: Tally
    sign: int
    whole: int


def _between(explorer: Explorer) -> Sequence[Row]:
    found = explorer.between()
    if found is None:
        return [Row("no mark is set: m marks the cursor's moment, then move the cursor", tone="dim")]
    replay = explorer.replay
    change = replay.at(replay.allocated, found.last) - replay.at(replay.allocated, found.first)
    rows: list[Row | _Part] = [
        Row(f"from entry {found.first:,} to {found.last:,}: allocated", change, signed=True, head=True)
    ]
    for words, part, sign in (
        ("allocated and still held", found.stayed, 1),
        ("held before, freed in between", found.gone, -1),
        ("allocated and freed again in between", found.came_and_went, 1),
    ):
        whole = total(part)
        rows.append(Row(words, sign * whole.bytes, whole.blocks, head=True, signed=True))
        for stack, one in list(by_size(part).items())[:MOST_BLOCKS]:
            if not explorer.find or matches(replay.snapshot, stack, explorer.find):
                rows.append(_Part(stack, one, sign, max(1, whole.bytes)))
    return Rows(rows, lambda row: row if isinstance(row, Row) else _part_row(replay, row))


def _part_row(replay: Replay, part: _Part) -> Row:
    words, one = place(replay.snapshot, part.stack), part.tally
    return Row(words, part.sign * one.bytes, one.blocks, one.bytes / part.whole, 1, signed=True)


def _segments(explorer: Explorer) -> Sequence[Row]:
    pieces = layout_at(explorer.replay, explorer.cursor)
    return Rows(sorted(pieces, key=lambda piece: (-piece.size, piece.address)), _segment_row)


def _segment_row(piece: Piece) -> Row:
    kind = "small" if piece.small else "large"
    words = [kind, "expandable" if piece.expandable else "", f"pool {piece.pool}" if piece.pool else ""]
    stream = f"stream {piece.stream:#x}" if piece.stream else ""
    blocks = piece.active_blocks + len(piece.free_sizes)
    return Row(" ".join(filter(None, [*words, stream])), piece.size, blocks, piece=piece)


def _difference(explorer: Explorer) -> Iterator[Row]:
    old = next((replay for replay in explorer.before if replay.device == explorer.replay.device), None)
    if old is None:
        yield Row(
            f"{sanitize(Path(explorer.before[0].snapshot.path).name)} has no device {explorer.replay.device}",
            tone="dim",
        )
        return
    change = explorer.replay.at(explorer.replay.allocated, explorer.cursor) - old.allocated[-1]
    yield Row(
        f"more or less than at the end of {sanitize(Path(old.snapshot.path).name)}", change, signed=True, head=True
    )
    find = explorer.find.lower()
    for one in explorer.difference():
        if find and not any(find in frame.name.lower() or find in frame.filename.lower() for frame in one.frames):
            continue
        inner = frame_words(one.frames[0]) if one.frames else NO_STACK
        own = next((frame for frame in one.frames if not library_of(frame.filename)), None)
        words = f"{inner}  (from {frame_words(own)})" if own is not None and own != one.frames[0] else inner
        yield Row(words, one.bytes, one.blocks, 0.0, 1, signed=True)


def _report(explorer: Explorer, width: int) -> Iterator[Row]:
    replay = explorer.replay
    oom = explorer.oom
    if oom is not None:
        yield Row(f"out of memory at entry {oom.entry:,}", head=True, tone="error")
        yield from _wrapped([oom.verdict], width)
        yield from (Row(frame_words(frame), depth=2, tone="dim") for frame in replay.snapshot.frames_of(oom.stack))
    yield Row("fragmentation at the cursor", head=True)
    yield from _wrapped(fragmentation_words(fragmentation(layout_at(replay, explorer.cursor))), width)
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
    import textwrap

    for sentence in sentences:
        for index, line in enumerate(textwrap.wrap(sentence, max(20, width - 8), break_on_hyphens=False)):
            yield Row(line, depth=1 if index == 0 else 2)
