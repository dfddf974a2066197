"""A snapshot as plain data, printed by ``ftmon snapshot --json``. ``docs/snapshot.md`` documents every field."""

from typing import Any

from ....snapshot.model import Frame, Snapshot
from .analysis import Change, Oom, difference, find_oom, largest, live_stacks, place
from .fragmentation_text import fragmentation_words
from .layout import fragmentation, layout_at
from .replay import Replay


def report(snapshot: Snapshot, replays: list[Replay], top: int = 20) -> dict[str, Any]:
    """Return the description of a snapshot."""
    ooms = [found for replay in replays if (found := find_oom(replay)) is not None]
    oom = max(ooms, key=lambda found: _moment(replays, found), default=None)
    return {
        "file": snapshot.path,
        "devices": [_device(replay) for replay in replays],
        "top_stacks": _top_stacks(replays, top),
        "largest_blocks": _largest_blocks(replays, top),
        "oom": None if oom is None else _oom(snapshot, oom),
    }


def _moment(replays: list[Replay], oom: Oom) -> tuple[int, int]:
    """Return a sort key for the out-of-memory errors of several devices: time, then device."""
    replay = next(replay for replay in replays if replay.device == oom.device)
    return replay.time_of(oom.entry), -oom.device


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
        "blocks": _blocks(replay),
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


def _blocks(replay: Replay) -> int:
    return sum(segment.blocks for segment in replay.snapshot.segments if segment.device == replay.device)


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


def _oom(snapshot: Snapshot, oom: Oom) -> dict[str, Any]:
    return {
        "device": oom.device,
        "index": oom.entry,
        "requested_bytes": oom.requested_bytes,
        "device_free_bytes": oom.device_free_bytes,
        "allocated_bytes": oom.allocated_bytes,
        "reserved_bytes": oom.reserved_bytes,
        "free_bytes": oom.free_bytes,
        "usable_free_bytes": oom.usable_free_bytes,
        "largest_free_block_bytes": oom.largest_free_block_bytes,
        "kind": oom.kind,
        "verdict": oom.verdict,
        "stack": frames_json(snapshot.frames_of(oom.stack)),
    }


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
