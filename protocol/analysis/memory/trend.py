"""Tests a short series for a trend: Mann-Kendall's test, Theil-Sen's slope, and a test for single jumps.

Mann-Kendall's S is the number of pairs of values in which the later one is larger, minus those in which it is smaller.
For 16 values without a trend, of any distribution, S reaches ``SURE`` with a probability of 6e-7 (exact, by counting
permutations).
"""

from collections.abc import Sequence
from itertools import pairwise

LENGTH = 16
"""Length of the series."""
SURE = 96
"""S of a trend; 120 if every pair rises."""
LIKELY = 56
"""S of a possible trend (1 in 175 by chance)."""
JUMP = 0.3
"""Maximum share of a trend's rise between two consecutive values."""
QUARTER = 0.1
"""Minimum share of a trend's rise between the medians of consecutive quarters."""


def mann_kendall(values: Sequence[float]) -> int:
    """Return S of a series; pairs of equal values count as 0."""
    total = 0
    for place, early in enumerate(values):
        for late in values[place + 1 :]:
            total += (late > early) - (late < early)
    return total


def theil_sen(values: Sequence[float]) -> float:
    """Return the median slope of all pairs, in units of the values per position."""
    count = len(values)
    slopes = sorted(
        (values[late] - values[early]) / (late - early) for early in range(count) for late in range(early + 1, count)
    )
    middle = len(slopes) // 2
    return slopes[middle] if len(slopes) % 2 else (slopes[middle - 1] + slopes[middle]) / 2


def climbs(values: Sequence[float]) -> bool:
    """Return whether the whole series rises, as opposed to a level that changed once or twice."""
    whole = max(values) - min(values)
    if whole <= 0 or max(late - early for early, late in pairwise(values)) > JUMP * whole:
        return False
    size = len(values) // 4
    middles = [sorted(values[place : place + size])[size // 2] for place in range(0, 4 * size, size)]
    return all(late - early >= QUARTER * whole for early, late in pairwise(middles))
