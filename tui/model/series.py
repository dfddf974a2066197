"""A figure over all steps of a run in bounded memory: buckets of 1, 2, 4, 8 ... steps that merge as the run grows."""

from dataclasses import dataclass

CAPACITY = 1024
"""Maximum number of buckets."""


@dataclass(frozen=True, slots=True)
class Point:
    """One bucket: ``steps`` steps from ``step`` on, with the mean and the extremes of their values."""

    step: int
    steps: int
    mean: float
    low: float
    high: float
    count: int
    """Number of values: steps times ranks."""


class StepSeries:
    """Values keyed by step number, from any number of ranks, in any order."""

    __slots__ = ("_counts", "_first", "_highs", "_lows", "_sums", "per", "version")

    def __init__(self) -> None:
        self.per = 1
        """Steps per bucket."""
        self.version = 0
        self._first = 0
        self._sums: list[float] = []
        self._counts: list[int] = []
        self._lows: list[float] = []
        self._highs: list[float] = []

    def __len__(self) -> int:
        return len(self._sums)

    @property
    def first_step(self) -> int | None:
        """The oldest bucket's first step; None while empty."""
        return next(((self._first + at) * self.per for at, count in enumerate(self._counts) if count), None)

    def add(self, step: int, value: float) -> None:
        """Add one rank's value for one step; the caller excludes NaN and infinities."""
        self.add_pooled(step, value, value, value, 1)

    def add_pooled(self, step: int, mean: float, low: float, high: float, count: int) -> None:
        """Add ``count`` values of steps at and after ``step`` that a recording has pooled."""
        index = step // self.per - self._first
        if not 0 <= index < len(self._sums):
            index = self._make_room(step)
        self._sums[index] += mean * count
        self._counts[index] += count
        if low < self._lows[index]:
            self._lows[index] = low
        if high > self._highs[index]:
            self._highs[index] = high
        self.version += 1

    def adopt(self, past: "StepSeries", before: int) -> None:
        """Prepend the steps of ``past`` before ``before`` to those known here (which are not older).

        ``past`` is not changed. Its buckets that reach to ``before`` or beyond are omitted.
        """
        own = self.points()
        keep = max(0, before // past.per - past._first)
        self.per, self._first = past.per, past._first
        self._sums, self._counts = past._sums[:keep], past._counts[:keep]
        self._lows, self._highs = past._lows[:keep], past._highs[:keep]
        for point in own:
            self.add_pooled(point.step, point.mean, point.low, point.high, point.count)
        self.version += 1

    def points(self, last: int | None = None) -> list[Point]:
        """Return the buckets that have values, oldest first; only the last ``last`` of them if given."""
        start = 0 if last is None else max(0, len(self._sums) - last)
        return [
            Point(
                (self._first + index) * self.per,
                self.per,
                self._sums[index] / self._counts[index],
                self._lows[index],
                self._highs[index],
                self._counts[index],
            )
            for index in range(start, len(self._sums))
            if self._counts[index]
        ]

    def means(self, width: int) -> list[float]:
        """Return the whole run's means pooled into at most ``width`` values, oldest first: a sparkline."""
        points = self.points()
        if not points or width < 1:
            return []
        group = -(-len(points) // width)
        return [
            sum(point.mean for point in points[index : index + group]) / len(points[index : index + group])
            for index in range(0, len(points), group)
        ]

    def _make_room(self, step: int) -> int:
        if not self._sums:
            self._first = step // self.per
        low = min(self._first, step // self.per)
        high = max(self._first + len(self._sums) - 1, step // self.per)
        while high - low >= CAPACITY:
            self._halve()
            low = min(self._first, step // self.per)
            high = max(self._first + len(self._sums) - 1, step // self.per)
        before, after = self._first - low, high - (self._first + len(self._sums) - 1)
        infinite = float("inf")
        self._sums = [0.0] * before + self._sums + [0.0] * after
        self._counts = [0] * before + self._counts + [0] * after
        self._lows = [infinite] * before + self._lows + [infinite] * after
        self._highs = [-infinite] * before + self._highs + [-infinite] * after
        self._first = low
        return step // self.per - low

    def _halve(self) -> None:
        """Merge adjacent buckets, doubling the steps per bucket."""
        infinite = float("inf")
        if self._first % 2:
            self._sums.insert(0, 0.0)
            self._counts.insert(0, 0)
            self._lows.insert(0, infinite)
            self._highs.insert(0, -infinite)
            self._first -= 1
        if len(self._sums) % 2:
            self._sums.append(0.0)
            self._counts.append(0)
            self._lows.append(infinite)
            self._highs.append(-infinite)
        pairs = range(0, len(self._sums), 2)
        self._sums = [self._sums[i] + self._sums[i + 1] for i in pairs]
        self._counts = [self._counts[i] + self._counts[i + 1] for i in pairs]
        self._lows = [min(self._lows[i], self._lows[i + 1]) for i in pairs]
        self._highs = [max(self._highs[i], self._highs[i + 1]) for i in pairs]
        self._first //= 2
        self.per *= 2
