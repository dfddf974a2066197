"""Finds the code that allocated a phase's transient, or memory left by steps, in the allocator's trace with stacks.

Pure functions over the entries of ``torch.cuda.memory._snapshot()["device_traces"]``: plain dictionaries with
``action``, ``addr``, ``size``, ``time_us`` and ``frames``.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ...messages.memory import StackGroup
from ..allocator.snapshot.rounding import round_size

MOST_GROUPS = 20
MOST_FRAMES = 25

Entry = dict[str, Any]


class Span(NamedTuple):
    """One occurrence of the armed phase, on the clock of the entries (microseconds since the epoch)."""

    begin_us: int
    end_us: int
    start_bytes: int
    """Allocated bytes at its start."""


class Blocks(NamedTuple):
    """Allocations, as indices of their entries in the trace."""

    total_bytes: int
    """Allocated bytes at that moment, including earlier blocks; 0: not computed."""
    found: list[int]
    kept: frozenset[int]
    """The members of ``found`` that outlived their phase."""


def blocks_at_peak(trace: Sequence[Entry], spans: Sequence[Span]) -> Blocks:
    """Return the blocks allocated in a phase and live at its peak, for the occurrence with the highest peak."""
    best: tuple[int, Span] | None = None
    best_place = -1
    for span in spans:
        freed = _free_action(trace, span.begin_us, span.end_us)
        now = span.start_bytes
        top, place = now, -1
        for index, entry in _within(trace, span.begin_us, span.end_us):
            if entry["action"] == "alloc":
                now += round_size(entry["size"])
                if now > top:
                    top, place = now, index
            elif entry["action"] == freed:
                now -= round_size(entry["size"])
        if best is None or top > best[0]:
            best, best_place = (top, span), place
    if best is None:
        return Blocks(0, [], frozenset())
    top, span = best
    freed = _free_action(trace, span.begin_us, span.end_us)
    live: dict[int, int] = {}
    at_peak: list[int] = []
    for index, entry in _within(trace, span.begin_us, span.end_us):
        if entry["action"] == "alloc":
            live[entry["addr"]] = index
        elif entry["action"] == freed:
            live.pop(entry["addr"], None)
        if index == best_place:
            at_peak = list(live.values())
    return Blocks(top, at_peak, frozenset(live.values()).intersection(at_peak))


def blocks_left(trace: Sequence[Entry], begin_us: int, border_us: int, end_us: int) -> Blocks:
    """Return the blocks allocated from ``begin_us`` to ``border_us`` and not freed until ``end_us``."""
    live: dict[int, int] = {}
    for index, entry in _within(trace, begin_us, end_us):
        if entry["action"] == "alloc":
            # A later allocation at an address means that the earlier block has been freed.
            live.pop(entry["addr"], None)
            if entry["time_us"] < border_us:
                live[entry["addr"]] = index
        elif entry["action"] == "free_completed":
            live.pop(entry["addr"], None)
    left = list(live.values())
    return Blocks(0, left, frozenset(left))


def grouped(trace: Sequence[Entry], blocks: Blocks, *, kept_counts: bool = False) -> tuple[list[StackGroup], int]:
    """Group blocks by their allocating stack.

    Args:
        kept_counts: order by all bytes, as for a leak, not by transient bytes.

    Returns:
        The first ``MOST_GROUPS`` groups, and the (transient, unless ``kept_counts``) bytes of all blocks with a stack.
    """
    found: dict[tuple[tuple[str, int, str], ...], list[int]] = {}
    for index in blocks.found:
        entry = trace[index]
        size = round_size(entry["size"])
        key = tuple((f["filename"], f["line"], f["name"]) for f in (entry.get("frames") or ())[:MOST_FRAMES])
        sums = found.setdefault(key, [0, 0, 0, 0])
        sums[0] += size
        sums[1] += 1
        sums[2] = max(sums[2], size)
        sums[3] += size if index in blocks.kept else 0
    groups = [
        StackGroup(total, count, _words(key), largest, kept)
        for key, (total, count, largest, kept) in sorted(
            found.items(), key=lambda item: (item[1][0] - (0 if kept_counts else item[1][3]), item[1][0]), reverse=True
        )
    ]
    attributed = sum(group.bytes - (0 if kept_counts else group.kept_bytes) for group in groups if group.frames)
    return groups[:MOST_GROUPS], attributed


def reaches_back(trace: Sequence[Entry], begin_us: int, ring: int) -> bool:
    """Return whether the trace, from a ring of ``ring`` entries, covers the time since ``begin_us``."""
    return len(trace) < ring or trace[0]["time_us"] <= begin_us


def _within(trace: Sequence[Entry], begin_us: int, end_us: int) -> Iterable[tuple[int, Entry]]:
    first = bisect_left(trace, begin_us, key=_time)
    last = bisect_right(trace, end_us, lo=first, key=_time)
    return ((index, trace[index]) for index in range(first, last))


def _free_action(trace: Sequence[Entry], begin_us: int, end_us: int) -> str:
    """Return the action at which the allocator's counters stop counting a block.

    That is the request to free it. A block used by another stream (``record_stream``, as for ZeRO-3's gathered
    parameters) completes later, often in the next phase. Completions are used only if the trace has no requests.
    """
    asked = any(entry["action"] == "free_requested" for _, entry in _within(trace, begin_us, end_us))
    return "free_requested" if asked else "free_completed"


def _time(entry: Entry) -> int:
    return entry["time_us"]


def _words(frames: tuple[tuple[str, int, str], ...]) -> list[str]:
    """Format frames of the trace (innermost first) as ``file:line function``, innermost last."""
    return [f"{file}:{line} {name}" for file, line, name in reversed(frames)]
