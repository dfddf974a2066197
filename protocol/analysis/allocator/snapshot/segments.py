"""The segments of a device at any moment of the window, computed backwards from their state at the end."""

from bisect import bisect_left, bisect_right, insort
from typing import NamedTuple

from ....snapshot.model import SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, Snapshot, Trace
from .rounding import SMALL_MOST

_STRIDE = 512
_MOST_KEPT = 4_000_000
"""Maximum number of ranges stored in all states together, one reference each."""


class Range(NamedTuple):
    """A segment, or a mapped range of an expandable one, at a moment."""

    address: int
    size: int
    stream: int
    small: bool
    expandable: bool
    pool: str
    """A private pool's identifier; ``""`` for the shared one, and for segments that were gone by the end."""

    @property
    def end(self) -> int:
        """The first address after it."""
        return self.address + self.size


class SegmentHistory:
    """Undoes changes of segments from the end backwards; the state is stored at regular intervals."""

    def __init__(self, snapshot: Snapshot, device: int, trace: Trace, entries: list[int]) -> None:
        self._trace, self._entries = trace, entries
        self._addresses, self._sizes, self._streams = (
            memoryview(column).cast(code)  # type: ignore[call-overload]  # typeshed wants a literal
            for column, code in ((trace.addresses, "Q"), (trace.sizes, "q"), (trace.streams, "q"))
        )
        last = [
            Range(one.address, one.size, one.stream, one.small, one.expandable, one.pool)
            for one in snapshot.segments
            if one.device == device
        ]
        state = _State(last)
        self._stride = max(_STRIDE, len(entries) * (len(last) + 1) // _MOST_KEPT)
        self._kept: list[list[Range]] = []
        """States after all changes, after all but ``stride``, all but ``2 * stride``, and so on."""
        for undone in range(len(entries) + 1):
            if undone % self._stride == 0:
                self._kept.append(state.ranges())
            if undone < len(entries):
                self._undo(state, entries[len(entries) - 1 - undone])

    def at(self, index: int) -> list[Range]:
        """Return the ranges right after entry ``index``, by address."""
        undone = len(self._entries) - bisect_right(self._entries, index)
        kept = undone // self._stride
        if undone % self._stride == 0:
            return self._kept[kept]
        state = _State(self._kept[kept])
        for number in range(kept * self._stride, undone):
            self._undo(state, self._entries[len(self._entries) - 1 - number])
        return state.ranges()

    def _undo(self, state: "_State", entry: int) -> None:
        action, address, size = self._trace.actions[entry], self._addresses[entry], self._sizes[entry]
        stream = self._streams[entry]
        if action == SEGMENT_ALLOC:
            state.remove(address)
        elif action == SEGMENT_FREE:
            state.put(Range(address, size, stream, size <= 2 * SMALL_MOST, False, ""))
        elif action == SEGMENT_MAP:
            state.cut(address, address + size)
        else:
            state.join(address, size, stream)


class _State:
    """Ranges by address; a later one at the same address replaces the one before."""

    def __init__(self, ranges: list[Range]) -> None:
        self._at = {one.address: one for one in ranges}
        self._starts = sorted(self._at)

    def ranges(self) -> list[Range]:
        return [self._at[start] for start in self._starts]

    def put(self, one: Range) -> None:
        if one.address not in self._at:
            insort(self._starts, one.address)
        self._at[one.address] = one

    def remove(self, address: int) -> None:
        if self._at.pop(address, None) is not None:
            del self._starts[bisect_left(self._starts, address)]

    def cut(self, address: int, end: int) -> None:
        """Remove the addresses from ``address`` to ``end`` from expandable ranges."""
        first = max(0, bisect_right(self._starts, address) - 1)
        for start in self._starts[first : bisect_left(self._starts, end)]:
            one = self._at[start]
            if not one.expandable or one.end <= address:
                continue
            self.remove(start)
            for begin, stop in ((start, address), (end, one.end)):
                if begin < stop:
                    self.put(one._replace(address=begin, size=stop - begin))

    def join(self, address: int, size: int, stream: int) -> None:
        """Restore an unmapped range, merged with adjacent expandable ranges."""
        place = bisect_left(self._starts, address)
        before = self._at[self._starts[place - 1]] if place else None
        if before is not None and not (before.end == address and before.expandable and before.stream == stream):
            before = None
        after = self._at.get(address + size)
        if after is not None and not (after.expandable and after.stream == stream):
            after = None
        if before is not None:
            address, size = before.address, before.size + size
            self.remove(before.address)
        if after is not None:
            size += after.size
            self.remove(after.address)
        like = before or after
        self.put(Range(address, size, stream, like is not None and like.small, True, like.pool if like else ""))
