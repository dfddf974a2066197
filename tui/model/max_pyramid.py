"""One resolution of a timeline: a bounded run of columns that are fixed spans of time, pooled by maximum."""

EMPTY = -1
"""A column, or a figure of it, without data."""

KEEP = 512
"""Minimum number of columns that a level keeps; at twice that number the oldest half is dropped."""

RATIO = 4
"""Ratio of the spans of two adjacent levels."""


class Level:
    """Columns of ``span`` seconds; column ``first`` (spans since the epoch) is index 0 of the three lists."""

    __slots__ = ("allocated", "first", "reserved", "resident", "span")

    def __init__(self, span: int, first: int) -> None:
        self.span = span
        self.first = first
        self.allocated: list[int] = []
        self.reserved: list[int] = []
        self.resident: list[int] = []

    def __len__(self) -> int:
        return len(self.allocated)

    def reach(self, column: int) -> None:
        """Extend to hold ``column``, which is not before ``first``."""
        missing = column - self.first + 1 - len(self.allocated)
        if missing > 0:
            empty = [EMPTY] * missing
            self.allocated += empty
            self.reserved += empty
            self.resident += empty

    def reach_back(self, column: int) -> None:
        """Extend to the past to hold ``column``."""
        missing = self.first - column
        if missing > 0:
            empty = [EMPTY] * missing
            self.allocated[:0] = empty
            self.reserved[:0] = empty
            self.resident[:0] = empty
            self.first = column

    def trim(self, first: int) -> None:
        """Drop every column before ``first``."""
        drop = first - self.first
        if drop > 0:
            del self.allocated[:drop]
            del self.reserved[:drop]
            del self.resident[:drop]
            self.first = first

    def lift(self, first: int, last: int, allocated: int, reserved: int, resident: int) -> None:
        """Raise columns ``first`` to ``last`` that this level holds to at least these figures."""
        for index in range(max(first - self.first, 0), min(last - self.first + 1, len(self.allocated))):
            if allocated > self.allocated[index]:
                self.allocated[index] = allocated
            if reserved > self.reserved[index]:
                self.reserved[index] = reserved
            if resident > self.resident[index]:
                self.resident[index] = resident

    def copy(self, end: int | None = None) -> "Level":
        """Copy this level, or what it has before column ``end``."""
        stop = None if end is None else max(end - self.first, 0)
        other = Level(self.span, self.first)
        other.allocated = self.allocated[:stop]
        other.reserved = self.reserved[:stop]
        other.resident = self.resident[:stop]
        return other

    def highest(self, first: int, last: int) -> tuple[int, int, int]:
        """Return the highest figures of columns ``first`` to ``last``, ``EMPTY`` where there are none."""
        begin, end = max(first - self.first, 0), last - self.first + 1
        if end <= begin:
            return EMPTY, EMPTY, EMPTY
        return (
            max(self.allocated[begin:end], default=EMPTY),
            max(self.reserved[begin:end], default=EMPTY),
            max(self.resident[begin:end], default=EMPTY),
        )

    def slices(self, first: int, width: int) -> tuple[list[int], list[int], list[int]]:
        """Copy ``width`` columns from ``first`` on, ``EMPTY`` where this level has none."""
        begin = first - self.first
        before = [EMPTY] * min(max(-begin, 0), width)
        low, high = max(begin, 0), max(begin + width, 0)
        out: list[list[int]] = []
        for figures in (self.allocated, self.reserved, self.resident):
            found = before + figures[low:high]
            out.append(found + [EMPTY] * (width - len(found)))
        return out[0], out[1], out[2]
