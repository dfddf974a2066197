"""Memory of one rank over time, in columns that are fixed spans of time and pool by maximum.

A column starts at a multiple of its span since the epoch, so it never moves: new data raise the last column or start a
new one. A column has the highest peak of the phases and heartbeats within it. There are several levels of bounded
size, each four times coarser than the one below (1 s, 4 s, 16 s ...). Data dropped from a fine level are already in the
next one, and the coarsest level always covers the whole run, so that no maximum is lost.
"""

from bisect import bisect_left
from dataclasses import dataclass
from math import floor

from ...protocol.messages.control import Severity
from .alerts import SEVERITIES

EMPTY = -1  # a column, or a figure of it, without data
KEEP = 512  # minimum number of columns that a level keeps; at twice that number the oldest half is dropped
RATIO = 4


class Level:
    """Columns of ``span`` seconds; column ``first`` (spans since the epoch) is index 0 of the three lists."""

    __slots__ = ("figures", "first", "span")

    def __init__(self, span: int, first: int) -> None:
        self.span = span
        self.first = first
        self.figures: tuple[list[int], list[int], list[int]] = ([], [], [])  # Allocated, reserved and resident bytes

    def __len__(self) -> int:
        return len(self.figures[0])

    def reach(self, column: int) -> None:
        """Extend to hold ``column``, which is not before ``first``."""
        missing = column - self.first + 1 - len(self)
        for figures in self.figures if missing > 0 else ():
            figures += [EMPTY] * missing

    def reach_back(self, column: int) -> None:
        """Extend to the past to hold ``column``."""
        missing = self.first - column
        if missing > 0:
            for figures in self.figures:
                figures[:0] = [EMPTY] * missing
            self.first = column

    def trim(self, first: int) -> None:
        """Drop every column before ``first``."""
        drop = first - self.first
        if drop > 0:
            for figures in self.figures:
                del figures[:drop]
            self.first = first

    def lift(self, first: int, last: int, *highs: int) -> None:
        """Raise columns ``first`` to ``last`` that this level holds to at least these three figures."""
        begin, end = max(first - self.first, 0), min(last - self.first + 1, len(self))
        for figures, high in zip(self.figures, highs, strict=True):
            for index in range(begin, end):
                if high > figures[index]:
                    figures[index] = high

    def copy(self, end: int | None = None) -> "Level":
        """Copy this level, or what it has before column ``end``."""
        stop = None if end is None else max(end - self.first, 0)
        other = Level(self.span, self.first)
        allocated, reserved, resident = self.figures
        other.figures = allocated[:stop], reserved[:stop], resident[:stop]
        return other

    def highest(self, first: int, last: int) -> tuple[int, int, int]:
        """Return the highest figures of columns ``first`` to ``last``, ``EMPTY`` where there are none."""
        begin, end = max(first - self.first, 0), max(last - self.first + 1, 0)
        allocated, reserved, resident = (max(figures[begin:end], default=EMPTY) for figures in self.figures)
        return allocated, reserved, resident

    def slices(self, first: int, width: int) -> tuple[list[int], list[int], list[int]]:
        """Copy ``width`` columns from ``first`` on, ``EMPTY`` where this level has none."""
        begin = first - self.first
        before = [EMPTY] * min(max(-begin, 0), width)
        low, high = max(begin, 0), max(begin + width, 0)
        found = (before + figures[low:high] for figures in self.figures)
        allocated, reserved, resident = (each + [EMPTY] * (width - len(each)) for each in found)
        return allocated, reserved, resident


@dataclass(frozen=True, slots=True)
class Mark:
    """An event on the timeline: an alert's kind (``spike``, ``hang`` ...) and id."""

    time: float
    kind: str
    severity: Severity
    alert_id: int


@dataclass(slots=True)
class Columns:
    """A part of a timeline, oldest column first, with lists of equal length; bytes, or ``EMPTY`` (-1) for no data."""

    start: float  # seconds since the epoch at which the first column begins
    span: int
    allocated: list[int]
    reserved: list[int]
    resident: list[int]  # resident set size; `EMPTY` throughout on CUDA
    marks: list[Mark | None]


class Timeline:
    """Allocated, reserved and resident peaks of one rank, with marks."""

    __slots__ = ("_dirty", "_fine", "_levels", "_marked", "current", "marks")

    def __init__(self) -> None:
        self._fine = Level(1, 0)
        self._levels = [self._fine]
        self._dirty: int | None = None  # oldest column of the finest level that is not merged into coarser levels yet
        self.marks: list[Mark] = []
        self._marked: set[int] = set()
        self.current: tuple[int, int, int] = (EMPTY, EMPTY, EMPTY)
        """The latest allocated, reserved and resident bytes, shown in columns after the newest data."""

    @property
    def start(self) -> float | None:
        """Begin of the oldest column, seconds since the epoch; None while empty."""
        top = self._levels[-1]
        return float(top.first * top.span) if len(top) else None

    @property
    def end(self) -> float | None:
        """End of the newest column; None while empty."""
        ends = [(level.first + len(level)) * level.span for level in self._levels if len(level)]
        # A coarse column ends later than its data; the finest level with data is the most precise.
        return float(ends[0]) if ends else None

    def add(self, time: float, allocated: int, reserved: int, resident: int = EMPTY) -> None:
        """Raise the column at ``time`` to these figures (bytes)."""
        second = int(time)
        self.add_range(second, second, allocated, reserved, resident)

    def add_range(self, first: int, last: int, allocated: int, reserved: int, resident: int = EMPTY) -> None:
        """Raise the one-second columns ``first`` to ``last`` (both included) to these figures (bytes)."""
        level = self._fine
        index = first - level.first
        end = last - level.first
        if index < 0 or end >= len(level):
            self._add_slowly(first, last, allocated, reserved, resident)
            return
        if self._dirty is None or first < self._dirty:
            self._dirty = first
        # Inlined for speed: this runs several times for every step of every rank.
        of_allocated, of_reserved, of_resident = level.figures
        while index <= end:
            if allocated > of_allocated[index]:
                of_allocated[index] = allocated
            if reserved > of_reserved[index]:
                of_reserved[index] = reserved
            if resident > of_resident[index]:
                of_resident[index] = resident
            index += 1

    def mark(self, mark: Mark) -> None:
        """Add a mark, or replace the one of the same alert."""
        if mark.alert_id in self._marked:
            if mark in self.marks[-8:]:
                return
            self.marks = [known for known in self.marks if known.alert_id != mark.alert_id]
        self._marked.add(mark.alert_id)
        if not self.marks or mark.time >= self.marks[-1].time:
            self.marks.append(mark)
            return
        self.marks.insert(bisect_left(self.marks, mark.time, key=lambda known: known.time), mark)

    def adopt(self, past: Level) -> None:
        """Add older history at a level's resolution (a power of ``RATIO`` seconds), after a seek or a late join.

        ``past`` is copied; known columns are kept, and if both have a column the higher figure counts.
        """
        if not len(past):
            return
        self._flush()
        if not len(self._levels[-1]):
            self._fine.first = past.first * past.span
        while self._levels[-1].span < past.span:
            self._add_level()
        position = next(index for index, level in enumerate(self._levels) if level.span >= past.span)
        known, merged = self._levels[position], past.copy()
        if len(known):
            merged.reach_back(known.first)
        for column in range(known.first, known.first + len(known)):
            merged.reach(column)
            merged.lift(column, column, *known.highest(column, column))
        self._levels[position] = merged
        if position == 0:
            self._fine = merged
            self._dirty = merged.first
        else:
            self._raise_above(position, merged.first)

    def window(self, width: int, now: float, span: int = 1) -> Columns:
        """Return the last ``width`` columns of ``span`` seconds, the last of which contains ``now``.

        If history is not available at that resolution (any more, or after a seek), a coarser column is used for its
        whole span.
        """
        return self._columns(floor(now / span) - width + 1, width, span)

    def whole(self, width: int) -> Columns:
        """Return everything from the first column on in at most ``width`` columns of 1, 2, 4, 8 ... seconds each."""
        begin, end = self.start, self.end
        if begin is None or end is None:
            return Columns(0.0, 1, [], [], [], [])
        last = end - 1
        span = 1
        while floor(last / span) - floor(begin / span) + 1 > max(width, 1):
            span *= 2
        first = floor(begin / span)
        return self._columns(first, floor(last / span) - first + 1, span)

    def _columns(self, first: int, width: int, span: int) -> Columns:
        self._flush()
        exact = next((level for level in self._levels if level.span == span), None)
        figures = exact.slices(first, width) if exact else ([EMPTY] * width, [EMPTY] * width, [EMPTY] * width)
        out = Columns(float(first * span), span, *figures, [None] * width)
        begin, end = self.start, self.end
        if begin is not None and end is not None:
            for index in range(max(0, int(begin // span) - first), min(width, int(end // span) + 1 - first)):
                if out.allocated[index] == EMPTY:
                    found = self._highest((first + index) * span, span)
                    out.allocated[index], out.reserved[index], out.resident[index] = found
        _fill_gaps(out, self.current)
        for mark in self.marks[bisect_left(self.marks, first * span, key=lambda known: known.time) :]:
            index = floor(mark.time / span) - first
            if index >= width:
                break
            before = out.marks[index]
            if before is None or SEVERITIES[before.severity] <= SEVERITIES[mark.severity]:
                out.marks[index] = mark
        return out

    def _highest(self, second: int, span: int) -> tuple[int, int, int]:
        """Return the highest figures of a column, from the coarsest level that resolves it, else from a coarser one."""
        position = max(index for index, level in enumerate(self._levels) if level.span <= span)
        for level in self._levels[position:]:
            first = second // level.span
            if first < level.first and level is not self._levels[-1]:
                continue
            found = level.highest(first, (second + span - 1) // level.span)
            if found[0] != EMPTY:
                return found
        return EMPTY, EMPTY, EMPTY

    def _add_slowly(self, first: int, last: int, allocated: int, reserved: int, resident: int) -> None:
        first = max(first, last - KEEP)
        level = self._fine
        if not len(level) and len(self._levels) == 1:
            level.first = first
        if first < level.first and (len(self._levels) > 1 or level.first - first > KEEP):
            self._flush()
            while self._levels[-1].first - first // self._levels[-1].span > KEEP or len(self._levels) == 1:
                self._add_level()
            for position, each in enumerate(self._levels):
                self._write(position, first // each.span, last // each.span, allocated, reserved, resident)
            return
        self._write(0, first, last, allocated, reserved, resident)
        self._dirty = first if self._dirty is None else min(self._dirty, first)

    def _write(self, position: int, first: int, last: int, allocated: int, reserved: int, resident: int) -> None:
        """Raise columns of one level, which grows to hold them; only the coarsest grows into the past."""
        level = self._levels[position]
        if not len(level):
            level.first = first
        if last - level.first >= 2 * KEEP:
            if position == 0:
                self._flush()
            if position + 1 == len(self._levels):
                self._add_level()
            level.trim(last - KEEP + 1)
        if first < level.first and position + 1 == len(self._levels):
            level.reach_back(max(first, level.first - KEEP))
        if last >= level.first:
            level.reach(last)
        level.lift(first, last, allocated, reserved, resident)

    def _add_level(self) -> None:
        below = self._levels[-1]
        level = Level(below.span * RATIO, below.first // RATIO)
        self._levels.append(level)
        self._raise_above(len(self._levels) - 2, below.first)
        if below is self._fine:
            self._dirty = None

    def _flush(self) -> None:
        if self._dirty is not None and len(self._levels) > 1:
            dirty, self._dirty = self._dirty, None
            self._raise_above(0, dirty)

    def _raise_above(self, position: int, first: int) -> None:
        above = position
        while (above := above + 1) < len(self._levels):  # a write may add a level
            below = self._levels[above - 1]
            end = below.first + len(below)
            first = max(first, below.first) // RATIO
            for column in range(first, -(-end // RATIO)):
                figures = below.highest(column * RATIO, column * RATIO + RATIO - 1)
                if figures[0] != EMPTY:
                    self._write(above, column, column, *figures)


def _fill_gaps(columns: Columns, current: tuple[int, int, int]) -> None:
    for figures, now in zip((columns.allocated, columns.reserved, columns.resident), current, strict=True):
        before = EMPTY
        index = 0
        while index < len(figures):
            if figures[index] != EMPTY:
                before = figures[index]
                index += 1
                continue
            end = index
            while end < len(figures) and figures[end] == EMPTY:
                end += 1
            edge = now if end == len(figures) else figures[end]
            fill = EMPTY if before == EMPTY else edge if end == len(figures) else min(before, edge)
            figures[index:end] = [fill] * (end - index)
            index = end
