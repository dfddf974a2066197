"""Memory in PyTorch's allocator at a failure, from its own snapshot: pieces, parts, stacks."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ....protocol.messages.blocks import SegmentUse, StackGroup
from ..phases.marks import Mark

SEGMENTS = 256
HOLDERS = 20
_FRAMES = 40
_SMALL_SEGMENT = 2 * 2**20
_SMALL_REQUEST = 2**20
_ALLOCATED = "active_allocated"
_FREE = "inactive"


class Pieces(NamedTuple):
    """Free memory within reserved segments, bytes."""

    free: int
    blocks: int
    usable: int
    """Free bytes in pieces that serve requests of the failed size, on its stream."""
    largest: int
    """The largest of those pieces."""
    expandable: bool


def pieces(segments: Sequence[dict[str, Any]], requested: int, stream: int) -> Pieces:
    """Add up the free memory in ``segments`` (of one device), for a request of ``requested`` bytes on ``stream``.

    Args:
        segments: from ``torch.cuda.memory._snapshot``.
        requested: the requested size: a small request needs a segment of 2 MiB.
        stream: the CUDA stream's handle.
    """
    free = blocks = usable = largest = 0
    expandable = any(segment.get("is_expandable", False) for segment in segments)
    small = requested <= (_SMALL_REQUEST if expandable else _SMALL_SEGMENT)
    for segment in segments:
        fits = (
            (segment["segment_type"] == "small") == small
            and segment["stream"] == stream
            and tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
        )
        for block in segment["blocks"]:
            if block["state"] != _FREE:
                continue
            size = block["size"]
            free += size
            blocks += 1
            if fits:
                usable += size
                largest = max(largest, size)
    return Pieces(free, blocks, usable, largest, expandable)


def uses(segments: Sequence[dict[str, Any]]) -> list[SegmentUse]:
    """Return the use of each segment, largest first, at most ``SEGMENTS``."""
    found: list[SegmentUse] = []
    for segment in sorted(segments, key=lambda segment: -segment["total_size"])[:SEGMENTS]:
        free = [block["size"] for block in segment["blocks"] if block["state"] == _FREE]
        flags = "s" if segment["segment_type"] == "small" else ""
        flags += "e" if segment.get("is_expandable", False) else ""
        flags += "p" if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0) else ""
        total = segment["total_size"]
        found.append(SegmentUse(total, total - sum(free), max(free, default=0), len(free), flags))
    return found


def holders(segments: Sequence[dict[str, Any]]) -> list[StackGroup]:
    """Group allocated bytes by allocating stack, most bytes first; empty if no stacks were recorded."""
    sums: dict[tuple[str, ...], list[int]] = {}
    for block in _allocated(segments):
        frames = block.get("frames") or ()
        if not frames:
            continue
        stack = tuple(f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in reversed(frames[:_FRAMES]))
        entry = sums.setdefault(stack, [0, 0, 0])
        entry[0] += block["size"]
        entry[1] += 1
        entry[2] = max(entry[2], block["size"])
    order = sorted(sums.items(), key=lambda item: -item[1][0])[:HOLDERS]
    return [StackGroup(total, count, list(stack), most) for stack, (total, count, most) in order]


def parts(
    segments: Sequence[dict[str, Any]],
    trace: Sequence[dict[str, Any]],
    known: Mapping[int, str],
    marks: Sequence[Mark],
    offset_ns: int,
    phase: str,
) -> tuple[dict[str, int], str]:
    """Divide the allocated bytes into the parts of ``protocol.messages.memory.PARTS``; they add up to it exactly.

    A block with a known storage belongs to that storage's part. The part of any other block follows from the phase of
    its allocation: activations in a forward, temporaries in the phase that failed.

    Args:
        segments: of one device.
        trace: its recorded entries, oldest first; empty where nothing was recorded.
        known: parts of the known storages, by address.
        marks: of the unfinished step.
        offset_ns: offset from a mark's time to nanoseconds since the epoch.
        phase: the phase that failed.

    Returns:
        Bytes by part, and the limits of their accuracy in words.
    """
    borders = [mark.ns + offset_ns for mark in marks]
    names: list[str] = []
    for mark in marks:
        names.append(mark.phase or (names[-1] if names else phase))
    born = {entry["addr"]: entry.get("time_us", 0) * 1000 for entry in trace if entry["action"] == "alloc"}
    reaches = bool(trace) and trace[0].get("time_us", 0) * 1000 <= (borders[0] if borders else 0)
    sums: dict[str, int] = {}
    for block in _allocated(segments):
        part = known.get(block["address"])
        if part is None:
            at = born.get(block["address"])
            index = bisect_right(borders, at) - 1 if at is not None else -1
            part = _part_of(names[index] if index >= 0 else "", phase, recorded=reaches or at is not None)
        sums[part] = sums.get(part, 0) + block["size"]
    note = "" if reaches else "allocations were not recorded for the whole step; by the failing phase instead"
    return sums, note


def _part_of(born_in: str, phase: str, *, recorded: bool) -> str:
    if not recorded:
        return {"forward": "activations", "backward": "activations", "optimizer": "temporaries"}.get(phase, "other")
    if born_in == "forward" and phase in ("forward", "backward"):
        return "activations"
    return "temporaries" if born_in == phase and phase else "other"


def _allocated(segments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        # Before torch 2.1 a block had no address of its own; those are not supported.
        block
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == _ALLOCATED
    ]
