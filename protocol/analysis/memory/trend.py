"""Tests a short series for a trend: Mann-Kendall's test, Theil-Sen's slope, and whether it is one jump.

Mann-Kendall's S counts the pairs of values in which the later one is larger, less those in which it is smaller. For 16
values without a trend, in whatever distribution, S reaches ``SURE`` with a probability of 6e-7 (exact, by counting
permutations).
"""

from collections.abc import Sequence
from itertools import pairwise

LENGTH = 16
"""Of the series that are judged."""
SURE = 96
"""S of a trend; 120 is every pair rising."""
LIKELY = 56
"""S of what may be one (1 in 175 by chance)."""
JUMP = 0.3
"""Of a trend, no single rise makes so much of the whole."""
QUARTER = 0.1
"""And from each quarter of the series to the next, the median rises by so much of the whole."""


def mann_kendall(values: Sequence[float]) -> int:
    """Return S of a series in its order; equal values count for nothing."""
    total = 0
    for place, early in enumerate(values):
        for late in values[place + 1 :]:
            total += (late > early) - (late < early)
    return total


def theil_sen(values: Sequence[float]) -> float:
    """Return the median of the slopes of all pairs, in units a value."""
    count = len(values)
    slopes = sorted(
        (values[late] - values[early]) / (late - early) for early in range(count) for late in range(early + 1, count)
    )
    middle = len(slopes) // 2
    return slopes[middle] if len(slopes) % 2 else (slopes[middle - 1] + slopes[middle]) / 2


def climbs(values: Sequence[float]) -> bool:
    """Return a climb from a level that changed once or twice: all of the series rises, and no single rise makes it."""
    whole = max(values) - min(values)
    if whole <= 0 or max(late - early for early, late in pairwise(values)) > JUMP * whole:
        return False
    size = len(values) // 4
    middles = [sorted(values[place : place + size])[size // 2] for place in range(0, 4 * size, size)]
    return all(late - early >= QUARTER * whole for early, late in pairwise(middles))
