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

Figures = tuple[int, int, int]  # allocated, reserved and resident bytes
Level = dict[int, Figures]  # columns with data, by their start in spans since the epoch
_NONE = (EMPTY, EMPTY, EMPTY)


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

    __slots__ = ("_kept", "_levels", "_marked", "current", "marks")

    def __init__(self) -> None:
        self._levels: list[Level] = [{}]
        """By ``RATIO`` to the power of its index, seconds; what a column has, the coarser ones around it have too."""
        self._kept = [0]  # by level: the first column that has not been dropped
        self.marks: list[Mark] = []
        self._marked: set[int] = set()
        self.current: Figures = _NONE
        """The latest allocated, reserved and resident bytes, shown in columns after the newest data."""

    @property
    def start(self) -> float | None:
        """Begin of the oldest column, seconds since the epoch; None while empty."""
        top = self._levels[-1]
        return float(min(top) * RATIO ** (len(self._levels) - 1)) if top else None

    @property
    def end(self) -> float | None:
        """End of the newest column; None while empty."""
        # A coarse column ends later than its data; the finest level with data is the most precise.
        return next((float((max(one) + 1) * RATIO**index) for index, one in enumerate(self._levels) if one), None)

    def add(self, time: float, allocated: int, reserved: int, resident: int = EMPTY) -> None:
        """Raise the column at ``time`` to these figures (bytes)."""
        second = int(time)
        self.add_range(second, second, allocated, reserved, resident)

    def add_range(self, first: int, last: int, allocated: int, reserved: int, resident: int = EMPTY) -> None:
        """Raise the one-second columns ``first`` to ``last`` (both included) to these figures (bytes)."""
        for column in range(max(first, last - KEEP), last + 1):
            self._raise(column, (allocated, reserved, resident))

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

    def adopt(self, past: Level, span: int, end: int | None = None) -> None:
        """Add older history in columns of ``span`` seconds (a power of ``RATIO``), after a seek or a late join.

        Columns from ``end`` on are left out. Where a column is known already, the higher figures count.
        """
        while RATIO ** (len(self._levels) - 1) < span:
            self._add_level()
        position = next(index for index in range(len(self._levels)) if RATIO**index == span)
        for column, figures in past.items():
            if end is None or column < end:
                self._raise(column, figures, position)

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
        exact: Level = next((one for index, one in enumerate(self._levels) if RATIO**index == span), {})
        begin, end = self.start or 0.0, self.end or 0.0
        found = [exact.get(column, _NONE) for column in range(first, first + width)]
        for column in range(max(first, floor(begin / span)), min(first + width, floor(end / span) + 1)):
            if found[column - first][0] == EMPTY:
                found[column - first] = self._highest(column * span, span)
        allocated, reserved, resident = ([figures[index] for figures in found] for index in range(3))
        out = Columns(float(first * span), span, allocated, reserved, resident, [None] * width)
        _fill_gaps(out, self.current)
        for mark in self.marks[bisect_left(self.marks, first * span, key=lambda known: known.time) :]:
            index = floor(mark.time / span) - first
            if index >= width:
                break
            before = out.marks[index]
            if before is None or SEVERITIES[before.severity] <= SEVERITIES[mark.severity]:
                out.marks[index] = mark
        return out

    def _highest(self, second: int, span: int) -> Figures:
        """Return the highest figures of a column, from the coarsest level that resolves it, else from a coarser one."""
        finest = max(index for index in range(len(self._levels)) if RATIO**index <= span)
        for index in range(finest, len(self._levels)):
            size, level = RATIO**index, self._levels[index]
            if second // size >= self._kept[index] or index + 1 == len(self._levels):
                columns = range(second // size, (second + span - 1) // size + 1)
                if found := [level[column] for column in columns if column in level]:
                    return _highest(*found)
        return _NONE

    def _raise(self, column: int, figures: Figures, position: int = 0) -> None:
        """Raise a column of a level, and those around it of the coarser levels, to at least these figures."""
        for index in range(position, len(self._levels)):
            if column >= self._kept[index]:
                level = self._levels[index]
                known = level.get(column)
                if known is None:
                    level[column] = figures
                    if len(level) > 2 * KEEP:
                        self._trim(index)
                else:
                    (a, b, c), (x, y, z) = known, figures
                    if a >= x and b >= y and c >= z:
                        return
                    level[column] = (a if a > x else x), (b if b > y else y), (c if c > z else z)
            column //= RATIO

    def _trim(self, index: int) -> None:
        """Drop the oldest columns of a level, which are in the coarser ones."""
        if index + 1 == len(self._levels):
            self._add_level()
        level = self._levels[index]
        kept = sorted(level)[-KEEP:]
        self._levels[index], self._kept[index] = {column: level[column] for column in kept}, kept[0]

    def _add_level(self) -> None:
        below, position = self._levels[-1], len(self._levels)
        self._levels.append({})
        self._kept.append(0)
        for column, figures in below.items():
            self._raise(column // RATIO, figures, position)


def _highest(*figures: Figures) -> Figures:
    allocated, reserved, resident = map(max, zip(*figures, strict=True))
    return allocated, reserved, resident


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
