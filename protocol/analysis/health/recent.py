"""Robust statistics of short series: medians and the median absolute deviation."""

from collections.abc import Iterable, Sequence

MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution in units of its median absolute deviation."""


def median(values: Iterable[float]) -> float:
    """Return the median; the upper one of two for an even count. ``values`` must not be empty."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def spread(values: Sequence[float], center: float | None = None) -> float:
    """Return a robust standard deviation: the scaled median absolute deviation from ``center`` (default: median)."""
    if not values:
        return 0.0
    middle = median(values) if center is None else center
    return MAD_TO_SIGMA * median([abs(value - middle) for value in values])


def tail(values: Sequence[float]) -> float:
    """Return the standard deviation of a normal distribution with the same 90th percentile of magnitudes."""
    ordered = sorted([abs(value) for value in values])
    return ordered[len(ordered) * 9 // 10] / 1.645 if ordered else 0.0
