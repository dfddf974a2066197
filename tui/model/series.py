"""A figure over all steps of a run in bounded memory: buckets of 1, 2, 4, 8 ... steps that merge as the run grows."""

from dataclasses import dataclass

CAPACITY = 1024
"""Maximum number of buckets."""


@dataclass(frozen=True, slots=True)
class Point:
    """One bucket: the mean of the values of the steps from ``step`` on; ``count``: steps times ranks."""

    step: int
    mean: float
    count: int


class StepSeries:
    """Values keyed by step number, from any number of ranks, in any order."""

    def __init__(self) -> None:
        self.per = 1
        """Steps per bucket."""
        self.version = 0
        self._buckets: dict[int, tuple[float, int]] = {}
        """Sum and number of the values."""

    def __len__(self) -> int:
        return len(self._buckets)

    def add(self, step: int, mean: float, count: int = 1) -> None:
        """Add ``count`` values of a step, or of several that a recording has pooled; no NaN, no infinities."""
        self._put(step // self.per, mean * count, count)
        while len(self._buckets) > CAPACITY:
            self._halve()
        self.version += 1

    def adopt(self, past: "StepSeries", before: int) -> None:
        """Prepend the steps of ``past`` before ``before`` to those known here (which are not older).

        ``past`` is not changed. Its buckets that reach to ``before`` or beyond are omitted.
        """
        while self.per < past.per:
            self._halve()
        for key, (total, count) in past._buckets.items():
            if key < before // past.per:
                self.add(key * past.per, total / count, count)
        self.version += 1

    def points(self) -> list[Point]:
        """Return the buckets, oldest first."""
        return [Point(key * self.per, total / count, count) for key, (total, count) in sorted(self._buckets.items())]

    def means(self, width: int) -> list[float]:
        """Return the whole run's means pooled into at most ``width`` values, oldest first: a sparkline."""
        means = [point.mean for point in self.points()]
        group = max(1, -(-len(means) // width))
        return [
            sum(means[index : index + group]) / len(means[index : index + group])
            for index in range(0, len(means), group)
        ]

    def _put(self, key: int, total: float, count: int) -> None:
        before = self._buckets.get(key, (0.0, 0))
        self._buckets[key] = before[0] + total, before[1] + count

    def _halve(self) -> None:
        """Merge adjacent buckets, doubling the steps per bucket."""
        self.per *= 2
        old, self._buckets = self._buckets, {}
        for key, (total, count) in old.items():
            self._put(key // 2, total, count)
