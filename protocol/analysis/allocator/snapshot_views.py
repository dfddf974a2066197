"""Queries of a snapshot, and its description for ``ftmon snapshot --json``; ``docs/snapshot.md`` has every field."""

from bisect import bisect_right
from heapq import nlargest
from operator import neg
from typing import Any, NamedTuple

from ...code_owner import library_of
from ...snapshot.columns import Frame, Snapshot
from .allocations import BEFORE
from .snapshot_layout import Tally, fragmentation, fragmentation_words, frame_words, layout_at
from .snapshot_replay import Replay, Totals, sums

NO_STACK = "no Python stack recorded"
"""For memory allocated before the window, by C++ threads (as in the backward pass), or without stacks."""


def by_size(totals: Totals) -> dict[int, Tally]:
    """Return totals ordered by bytes, largest first."""
    order = sorted(totals, key=lambda stack: (-totals[stack][0], stack))
    return {stack: Tally(*totals[stack]) for stack in order}


def live_stacks(replay: Replay, index: int) -> dict[int, Tally]:
    """Return the memory held by the program right after entry ``index``, by stack; it adds up to allocated memory."""
    return by_size(replay.totals_at(index))


def largest(replay: Replay, index: int, most: int) -> list[int]:
    """Return the largest allocations that are live right after entry ``index``."""
    of = replay.allocations
    live = replay.live_at(index)
    # For equal sizes the oldest come first. Comparing ready tuples is faster than a key function that makes them.
    ages = map(neg, map(of.begins.__getitem__, live))
    return [number for _, _, number in nlargest(most, zip(map(of.sizes.__getitem__, live), ages, live, strict=True))]


class Between(NamedTuple):
    """Changes from right after entry ``first`` to right after entry ``last``, by stack."""

    first: int
    last: int
    stayed: Totals  # allocated in between and still held at the end
    gone: Totals  # held at the start and freed in between
    came_and_went: Totals  # both allocated and freed in between


def total(of: Totals) -> Tally:
    """Return the sum of totals over all stacks."""
    return Tally(sum(size for size, _ in of.values()), sum(blocks for _, blocks in of.values()))


def between(replay: Replay, one: int, other: int) -> Between:
    """Return the changes between two moments, in either order."""
    first, last = sorted(max(BEFORE, min(moment, replay.last)) for moment in (one, other))
    of = replay.allocations
    low, high = (bisect_right(of.begins, moment, 0, of.in_window) for moment in (first, last))
    # Far fewer allocations are live at a moment than are made in between, and even fewer are live at both moments.
    kept = sums(of, [number for number in replay.live_at(first) if of.freed[number] > last])
    stayed, gone = _less(replay.totals_at(last), kept), _less(replay.totals_at(first), kept)
    return Between(first, last, stayed, gone, _less(sums(of, range(low, high)), stayed))


def _less(whole: Totals, part: Totals) -> Totals:
    """Return totals minus those of a part; stacks with no bytes left are omitted."""
    left = dict(whole)
    for stack, (size, blocks) in part.items():
        all_size, all_blocks = left.pop(stack)
        if all_blocks > blocks:
            left[stack] = all_size - size, all_blocks - blocks
    return left


class Change(NamedTuple):
    """Difference of a stack between two snapshots; positive if the second has more."""

    frames: tuple[Frame, ...]
    bytes: int
    blocks: int
    before: Tally
    after: Tally


def difference(before: Replay, first: int, after: Replay, second: int) -> list[Change]:
    """Compare live memory at a moment of one snapshot with a moment of another, by stack, largest change first.

    Stacks are equal if their functions, files and lines are; addresses are not comparable across processes.
    """
    tallies = [
        {tuple(replay.snapshot.frames_of(stack)): found for stack, found in live_stacks(replay, index).items()}
        for replay, index in ((before, first), (after, second))
    ]
    none = Tally(0, 0)
    changes: list[Change] = []
    for frames in {**tallies[0], **tallies[1]}:
        old, new = tallies[0].get(frames, none), tallies[1].get(frames, none)
        if old != new:
            changes.append(Change(frames, new.bytes - old.bytes, new.blocks - old.blocks, old, new))
    return sorted(changes, key=lambda change: (-abs(change.bytes), change.frames))


def place(snapshot: Snapshot, stack: int) -> str:
    """Return a stack as one phrase: its innermost call, and the innermost call in user code."""
    frames = snapshot.frames_of(stack)
    if not frames:
        return NO_STACK
    own = next((frame for frame in frames if not library_of(frame.filename)), frames[0])
    text = frame_words(frames[0]).replace("  ", " ")
    return text if own == frames[0] else f"{text} (from {frame_words(own).replace('  ', ' ')})"


def report(snapshot: Snapshot, replays: list[Replay], top: int = 20) -> dict[str, Any]:
    """Return the description of a snapshot, without a failed allocation (``oom_report``)."""
    return {
        "file": snapshot.path,
        "devices": [_device(replay) for replay in replays],
        "top_stacks": _top_stacks(replays, top),
        "largest_blocks": _largest_blocks(replays, top),
    }


def frames_json(frames: list[Frame]) -> list[dict[str, Any]]:
    """Return frames as dictionaries, innermost first."""
    return [frame._asdict() for frame in frames]


def _device(replay: Replay) -> dict[str, Any]:
    found = fragmentation(layout_at(replay, replay.last))
    return {
        "device": replay.device,
        "allocated_bytes": replay.allocated[-1],
        "active_bytes": replay.active[-1],
        "requested_bytes": replay.requested[-1],
        "reserved_bytes": replay.reserved[-1],
        "segments": found.segments,
        "blocks": sum(one.blocks for one in replay.snapshot.segments if one.device == replay.device),
        "free_bytes": found.free,
        "free_blocks": found.free_blocks,
        "largest_free_block_bytes": found.largest_free,
        "rounding_bytes": found.rounding,
        "pending_free_bytes": found.pending,
        "expandable_bytes": found.expandable,
        "streams": found.streams,
        "private_pools": found.pools,
        "trace_entries": replay.entries,
        "peak_allocated_bytes": replay.peak_bytes,
        "peak_index": replay.peak_index,
        "peak_time_us": replay.time_of(replay.peak_index),
        "peak_reserved_bytes": max(replay.reserved),
        "unsure_blocks": replay.allocations.unsure,
        "unsure_bytes": replay.allocations.unsure_bytes,
        "unmatched_entries": replay.allocations.lost,
        "ooms": len(replay.ooms),
        "fragmentation": fragmentation_words(found),
    }


def _top_stacks(replays: list[Replay], top: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {
            "device": replay.device,
            "bytes": tally.bytes,
            "count": tally.blocks,
            "frames": frames_json(replay.snapshot.frames_of(stack)),
        }
        for replay in replays
        for stack, tally in live_stacks(replay, replay.peak_index).items()
    ]
    return sorted(found, key=lambda one: -one["bytes"])[:top]


def _largest_blocks(replays: list[Replay], top: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {
            "device": replay.device,
            "address": replay.allocations.addresses[number],
            "bytes": replay.allocations.sizes[number],
            "requested_bytes": replay.allocations.requested[number],
            "allocated_index": replay.allocations.begins[number],
            "place": place(replay.snapshot, replay.allocations.stacks[number]),
        }
        for replay in replays
        for number in largest(replay, replay.peak_index, top)
    ]
    return sorted(found, key=lambda one: -one["bytes"])[:top]


def difference_report(before: list[Replay], after: list[Replay], top: int = 20) -> dict[str, Any]:
    """Return the differences between the ends of two snapshots, by device."""
    devices: list[dict[str, Any]] = []
    changes: list[dict[str, Any]] = []
    for old in before:
        new = next((replay for replay in after if replay.device == old.device), None)
        if new is None:
            continue
        devices.append({
            "device": old.device,
            "allocated_bytes": new.allocated[-1] - old.allocated[-1],
            "active_bytes": new.active[-1] - old.active[-1],
            "requested_bytes": new.requested[-1] - old.requested[-1],
            "reserved_bytes": new.reserved[-1] - old.reserved[-1],
            "peak_allocated_bytes": new.peak_bytes - old.peak_bytes,
        })  # fmt: skip
        changes += [_change(old.device, one) for one in difference(old, old.last, new, new.last)]
    both = {replay.device for replay in before} & {replay.device for replay in after}
    alone = {"before": before, "after": after}
    return {
        "devices": devices,
        "only": {name: [one.device for one in replays if one.device not in both] for name, replays in alone.items()},
        "top_stacks": sorted(changes, key=lambda one: -abs(one["bytes"]))[:top],
    }


def _change(device: int, change: Change) -> dict[str, Any]:
    return {
        "device": device,
        "bytes": change.bytes,
        "count": change.blocks,
        "before_bytes": change.before.bytes,
        "after_bytes": change.after.bytes,
        "frames": frames_json(list(change.frames)),
    }
