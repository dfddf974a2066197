"""Memory of a rank at the same point of every step, reduced to short series of minima at little cost per step.

A block's value is the minimum of its steps, because memory that a script keeps from a longer batch, such as an output,
is temporary. Blocks of 4 steps are joined to blocks of 16, and these to blocks of 64, so that slow growth is visible
too. Each series has the last ``trend.LENGTH`` blocks.
"""

from collections import deque

from .trend import LENGTH, LIKELY, SURE, climbs, mann_kendall, theil_sen

SIZES = (4, 16, 64)
"""Steps per block of each series."""
_JOINED = 4
RECENT = 8
STOPPED_SHARE = 0.2
NEW_SHARE = 0.5
"""Minimum share of a leak's rise that lies above all levels before the window, unlike that of a wandering level."""


class Series:
    """The last blocks of one size: memory level, a second figure that must grow with it, and the batch before."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.levels: deque[int] = deque(maxlen=LENGTH)
        self.seconds: deque[int] = deque(maxlen=LENGTH)
        self.batches: deque[int] = deque(maxlen=LENGTH)
        self.highest = 0
        """The highest level of all blocks that have left the series."""
        self.sure = 0
        """Number of consecutive checks at which it grew."""

    def add(self, level: int, second: int, batch: int) -> None:
        """Add a block."""
        levels = self.levels
        if len(levels) == LENGTH and levels[0] > self.highest:
            self.highest = levels[0]
        levels.append(level)
        self.seconds.append(second)
        self.batches.append(batch)

    def grows(self, floor: int) -> bool:
        """Return whether the series is a trend for the second consecutive time (rules: ``leak``)."""
        levels = self.levels
        rise = levels[-1] - levels[0]
        # The cheap test first: it usually fails.
        new_high = levels[-1] - self.highest >= NEW_SHARE * rise
        if len(levels) < LENGTH or rise < floor or not new_high or not self._is_trend(rise):
            self.sure = 0
            return False
        self.sure += 1
        return self.sure > 1

    def _is_trend(self, rise: int) -> bool:
        levels = list(self.levels)
        if mann_kendall(levels) < SURE or not climbs(levels):
            return False
        if self.seconds[-1] >= 0 and self.seconds[-1] - self.seconds[0] < rise // 2:
            return False
        return mann_kendall(list(self.batches)) < LIKELY

    @property
    def rate(self) -> float:
        """Bytes per step: the median of all slopes."""
        return theil_sen(list(self.levels)) / self.size

    def goes_on(self, rate: float) -> bool:
        """Return whether the last blocks still grow at ``STOPPED_SHARE`` of ``rate`` (bytes per step)."""
        recent = list(self.levels)[-RECENT:]
        least = STOPPED_SHARE * rate * self.size
        if len(recent) < RECENT or recent[-1] - recent[0] >= 2 * least * (RECENT - 1):
            return True
        return theil_sen(recent) >= least


class Levels:
    """The series of one rank."""

    def __init__(self) -> None:
        self.series = tuple(Series(size) for size in SIZES)
        self._steps = 0
        self._level = self._second = self._batch = 0

    def add(self, level: int, second: int, batch: int) -> int:
        """Add one step; return the number of series with a new block.

        Args:
            second: another figure that a leak raises too; negative: none.
            batch: positions of the previous batch, whose outputs may still be referenced.
        """
        steps = self._steps
        if steps & 3 == 0 or level < self._level:
            self._level, self._second, self._batch = level, second, batch
        self._steps = steps = steps + 1
        if steps & 3:
            return 0
        self.series[0].add(self._level, self._second, self._batch)
        count = 1
        while count < len(SIZES) and steps % SIZES[count] == 0:
            finer = self.series[count - 1]
            last = range(-_JOINED, 0)
            lowest = min(last, key=finer.levels.__getitem__)
            self.series[count].add(finer.levels[lowest], finer.seconds[lowest], finer.batches[lowest])
            count += 1
        return count
