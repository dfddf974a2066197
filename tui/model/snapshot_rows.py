"""The rows of each view of the explorer, from its state: what a list then draws."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ...protocol.snapshot.analysis import NO_STACK, largest, live_stacks, place, tally
from ...protocol.snapshot.layout import Piece, fragmentation, layout_at
from ...protocol.snapshot.stacks import Node, frame_words, library_of, matches, node_words, stack_tree
from ...protocol.snapshot.words import fragmentation_words
from ...protocol.text import gib
from .snapshot_explorer import Explorer

MOST_BLOCKS = 500
_OPEN_FROM = 0.02
"""A branch is open at first when it holds this share of everything, unless all below it is library code."""


class Row(NamedTuple):
    """One line: figures, words, and for a branch of the tree where it is and whether it is open."""

    words: str
    size: int | None = None
    blocks: int = 0
    share: float = 0.0
    """Of everything, 0 to 1."""
    depth: int = 0
    path: tuple[tuple[int, ...], ...] = ()
    branch: bool = False
    shown: bool = False
    tone: str = "text"
    signed: bool = False
    piece: Piece | None = None
    head: bool = False


def rows_of(explorer: Explorer, width: int) -> list[Row]:
    """List the rows of the view that is chosen.

    Args:
        explorer: the state.
        width: cells a row has, to break sentences at.
    """
    make = {
        "stacks": _stacks,
        "blocks": _blocks,
        "between": _between,
        "segments": _segments,
        "difference": _difference,
    }.get(explorer.view)
    return list(make(explorer) if make is not None else _report(explorer, width))


def _stacks(explorer: Explorer) -> Iterator[Row]:
    replay = explorer.replay
    tallies = live_stacks(replay, explorer.cursor)
    root = stack_tree(replay.snapshot, tallies, explorer.fold, explorer.find)
    if root.bytes and not root.children:
        yield Row("no stacks were recorded for these", root.bytes, root.blocks, 1.0, tone="dim")
    else:
        yield from _branches(explorer, root, (), 0, max(1, root.bytes))
        rest = root.bytes - sum(node.bytes for node in root.children.values())
        if rest and root.children:
            blocks = root.blocks - sum(node.blocks for node in root.children.values())
            yield Row(NO_STACK, rest, blocks, rest / root.bytes, tone="dim")


def _branches(
    explorer: Explorer, node: Node, path: tuple[tuple[int, ...], ...], depth: int, total: int
) -> Iterator[Row]:
    snapshot = explorer.replay.snapshot
    for child in node.ordered():
        below = (*path, child.frames)
        opened = bool(explorer.find) or child.bytes >= total * _OPEN_FROM
        shown = explorer.opened.get(below, opened)
        library = bool(library_of(snapshot.frames[child.frames[-1]].filename))
        yield Row(
            node_words(snapshot, child), child.bytes, child.blocks, child.bytes / total, depth, below,
            bool(child.children), shown and bool(child.children), "dim" if library else "text",
        )  # fmt: skip
        if shown:
            yield from _branches(explorer, child, below, depth + 1, total)


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


def _between(explorer: Explorer) -> Iterator[Row]:
    found = explorer.between()
    if found is None:
        yield Row("no mark is set: m marks the cursor's moment, then move the cursor", tone="dim")
        return
    replay = explorer.replay
    change = replay.at(replay.allocated, found.last) - replay.at(replay.allocated, found.first)
    yield Row(f"from entry {found.first:,} to {found.last:,}: allocated", change, signed=True, head=True)
    for words, numbers, sign in (
        ("allocated and still held", found.stayed, 1),
        ("held before, freed in between", found.gone, -1),
        ("allocated and freed again in between", found.came_and_went, 1),
    ):
        stacks = tally(replay, numbers)
        total = sum(one.bytes for one in stacks.values())
        yield Row(words, sign * total, len(numbers), head=True, signed=True)
        for stack, one in list(stacks.items())[:MOST_BLOCKS]:
            if explorer.find and not matches(replay.snapshot, stack, explorer.find):
                continue
            share = one.bytes / max(1, total)
            yield Row(place(replay.snapshot, stack), sign * one.bytes, one.blocks, share, 1, signed=True)


def _segments(explorer: Explorer) -> Iterator[Row]:
    pieces = layout_at(explorer.replay, explorer.cursor)
    for piece in sorted(pieces, key=lambda piece: (-piece.size, piece.address)):
        kind = "small" if piece.small else "large"
        words = [kind, "expandable" if piece.expandable else "", f"pool {piece.pool}" if piece.pool else ""]
        stream = f"stream {piece.stream:#x}" if piece.stream else ""
        yield Row(" ".join(filter(None, [*words, stream])), piece.size, len(piece.blocks), piece=piece)


def _difference(explorer: Explorer) -> Iterator[Row]:
    old = next((replay for replay in explorer.before if replay.device == explorer.replay.device), None)
    if old is None:
        yield Row(f"{Path(explorer.before[0].snapshot.path).name} has no device {explorer.replay.device}", tone="dim")
        return
    change = explorer.replay.at(explorer.replay.allocated, explorer.cursor) - old.allocated[-1]
    yield Row(f"more or less than at the end of {Path(old.snapshot.path).name}", change, signed=True, head=True)
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
        f"{replay.entries:,} trace entries, tied to the {len(of.known):,} blocks that stand at the end",
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
