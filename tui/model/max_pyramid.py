"""One resolution of a timeline: a bounded run of columns that are fixed spans of time, pooled by maximum."""

EMPTY = -1
"""A column, or a figure of it, without data."""

KEEP = 512
"""Minimum number of columns that a level keeps; at twice that number the oldest half is dropped."""

RATIO = 4
"""Ratio of the spans of two adjacent levels."""


class Level:
    """Columns of ``span`` seconds; column ``first`` (spans since the epoch) is index 0 of the three lists."""

    __slots__ = ("figures", "first", "span")

    def __init__(self, span: int, first: int) -> None:
        self.span = span
        self.first = first
        self.figures: tuple[list[int], list[int], list[int]] = ([], [], [])
        """Allocated, reserved and resident bytes."""

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
