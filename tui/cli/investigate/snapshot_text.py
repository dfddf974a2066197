"""Renders a snapshot as lines of text."""

from collections.abc import Iterator

from ....protocol.analysis.allocator.snapshot.analysis import (
    NO_STACK,
    difference,
    find_oom,
    largest,
    live_stacks,
    place,
)
from ....protocol.analysis.allocator.snapshot.fragmentation_text import fragmentation_words
from ....protocol.analysis.allocator.snapshot.layout import fragmentation, layout_at
from ....protocol.analysis.allocator.snapshot.replay import Replay
from ....protocol.analysis.allocator.snapshot.stack_tree import Node, node_words, stack_tree
from ....protocol.analysis.allocator.snapshot.stacks import frame_words
from ....protocol.text import gib, sanitize

_STACKS_SHOWN, _DEPTH = 8, 12


def lines(replays: list[Replay], top: int) -> list[str]:
    """Return the description of a snapshot, device by device."""
    return [line for replay in replays for line in (*_device(replay, top), "")][:-1]


def _device(replay: Replay, top: int) -> Iterator[str]:
    snapshot = replay.snapshot
    yield f"{sanitize(snapshot.path)}  device {replay.device}"
    yield (
        f"at its end: allocated {gib(replay.allocated[-1])}, active {gib(replay.active[-1])}, "
        f"requested {gib(replay.requested[-1])}, reserved {gib(replay.reserved[-1])}"
    )
    moment = "before the first entry" if replay.peak_index < 0 else f"at entry {replay.peak_index:,}"
    if replay.entries:
        yield f"{replay.entries:,} trace entries; highest allocated {gib(replay.peak_bytes)} {moment}"
    else:
        yield "no history was recorded: torch.cuda.memory._record_memory_history() before the part of interest"
    of = replay.allocations
    if of.unsure_bytes:
        yield f"{of.unsure} blocks older than the trace have no exact size; figures may be {gib(of.unsure_bytes)} low"
    if of.lost:
        yield f"{of.lost:,} frees are missing from the trace, which has gaps"
    if (oom := find_oom(replay)) is not None:
        yield ""
        yield f"out of memory at entry {oom.entry:,}: {oom.verdict}"
        yield from (f"    {frame_words(frame)}" for frame in snapshot.frames_of(oom.stack)[:_DEPTH])
    yield ""
    yield "fragmentation at the end"
    yield from (f"  {line}" for line in fragmentation_words(fragmentation(layout_at(replay, replay.last))))
    yield ""
    yield f"live at the highest point, {gib(replay.peak_bytes)}, by stack (library frames folded)"
    yield from _tree(stack_tree(snapshot, live_stacks(replay, replay.peak_index)), top)
    yield ""
    yield "largest blocks then"
    for number in largest(replay, replay.peak_index, min(top, _STACKS_SHOWN)):
        yield f"  {gib(of.sizes[number]):>12}  {place(snapshot, of.stacks[number])}"


def _tree(root: Node, most: int) -> Iterator[str]:
    """Yield the largest branches, ``most`` lines altogether."""
    left = most
    waiting = [(node, 0) for node in reversed(root.ordered())]
    while waiting and left:
        node, depth = waiting.pop()
        left -= 1
        words = node_words(node)
        yield f"  {gib(node.bytes):>12} {node.blocks:>7,}  {'  ' * depth}{words}"
        waiting += [(child, depth + 1) for child in reversed(node.ordered())]
    if root.bytes and not root.children:
        yield f"  {gib(root.bytes):>12} {root.blocks:>7,}  no stacks were recorded"
    if waiting:
        yield f"  {'':>12} {'':>7}  and {len(waiting):,} more branches (--top shows more)"


def difference_lines(before: list[Replay], after: list[Replay], top: int) -> list[str]:
    """Return the differences in live memory at the ends of two snapshots, by stack."""
    lines = [f"from {sanitize(before[0].snapshot.path)} to {sanitize(after[0].snapshot.path)}"]
    for old in before:
        new = next((replay for replay in after if replay.device == old.device), None)
        if new is None:
            lines.append(f"device {old.device}: only in the first")
            continue
        lines.append(
            f"device {old.device}: allocated {_signed(new.allocated[-1] - old.allocated[-1])}, "
            f"reserved {_signed(new.reserved[-1] - old.reserved[-1])}, "
            f"highest allocated {_signed(new.peak_bytes - old.peak_bytes)}"
        )
        for change in difference(old, old.last, new, new.last)[:top]:
            where = " < ".join(frame_words(frame).replace("  ", " ") for frame in change.frames[:3])
            lines.append(f"  {_signed(change.bytes):>13} {change.blocks:>+7,}  {where or NO_STACK}")
    lines += [
        f"device {new.device}: only in the second" for new in after if new.device not in {o.device for o in before}
    ]
    return lines


def _signed(count: int) -> str:
    return ("+" if count > 0 else "") + gib(count)
