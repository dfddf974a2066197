"""What a sweep runs next: searches along one axis by real runs, the remaining budget, the order of configurations."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import msgspec

from ...sweep.rows import Budget, Planned, Row
from ..estimates.memory import Piece, pieces, sample_curve


class UndecidedError(Exception):
    """A run neither fitted nor ran out of memory, so the search cannot go on."""


class Tried(NamedTuple):
    """One run of a search."""

    fits: bool
    peak_bytes: float
    """0 if it did not fit."""


class Found(NamedTuple):
    """The result of a search for the largest value."""

    value: int | None
    """None: the lowest value does not fit."""
    at_the_end: bool
    """Whether the highest value fits, so that larger ones may fit too."""
    tried: dict[int, Tried]


def largest(measure: Callable[[int], Tried], low: int, high: int, step: int = 1, guess: int | None = None) -> Found:
    """Return the largest value that fits, among ``low`` and multiples of ``step`` above it up to ``high``.

    The first run is at the guess, the second at the adjacent value that confirms a correct guess. From a wrong guess
    the distance is doubled, then the interval between fitting and non-fitting values is halved.

    Args:
        guess: the largest value predicted to fit; None: the search starts at the lowest value.

    Raises:
        UndecidedError: from ``measure``.
    """
    last = (high - low) // step
    tried: dict[int, Tried] = {}
    below, above = -1, last + 1  # the largest value known to fit, the smallest known not to fit
    at = 0 if guess is None else min(max((guess - low) // step, 0), last)
    distance = 1
    while above - below > 1:
        value = low + at * step
        if value not in tried:
            tried[value] = measure(value)
        if tried[value].fits:
            below = at
        else:
            above = at
        if below < 0:
            at = max(0, above - distance)
        elif above > last:
            at = min(last, below + distance)
        else:
            at = (below + above) // 2
        distance *= 2
    return Found(low + below * step if below >= 0 else None, below == last, tried)


def phase_curve(
    measure: Callable[[int], Mapping[str, float] | None],
    low: int,
    high: int,
    predicted: Sequence[Piece],
) -> tuple[dict[int, Mapping[str, float]], list[Piece]]:
    """Return measured points of the peak's curve and its pieces, with as few runs as straight pieces need.

    The crossovers of a predicted curve divide the range: each part then needs runs at its ends and its middle.

    Args:
        measure: returns the peak of each phase at a value; None if it does not fit.
        high: highest value; if it does not fit, the range is halved until it does.

    Returns:
        Points and pieces; both empty if ``low`` does not fit.

    Raises:
        UndecidedError: from ``measure``.
    """
    measured = cache(measure)

    def certain(x: int) -> Mapping[str, float]:
        found = measured(x)
        if found is None:
            raise UndecidedError(f"{x:,} does not fit, though {high:,} does")
        return found

    if measured(low) is None:
        return {}, []
    while high > low and measured(high) is None:
        high = (low + high) // 2
    cuts = sorted({math.floor(piece.end) for piece in predicted if low < piece.end < high - 1})
    points: dict[int, Mapping[str, float]] = {low: certain(low)}
    for begin, end in pairwise([low, *cuts, high]):
        points |= sample_curve(certain, begin, end)
    points = dict(sorted(points.items()))
    common = set.intersection(*(set(phases) for phases in points.values()))
    same = {x: {name: size for name, size in phases.items() if name in common} for x, phases in points.items()}
    return points, pieces(same)


class Remaining(msgspec.Struct, frozen=True):
    """Used and remaining budget of a sweep."""

    used_seconds: float
    left_seconds: float | None
    """Remaining seconds of the budget; None: no limit."""
    run_seconds: float | None
    """Median duration of the runs so far; None: none."""
    expected_seconds: float | None
    """Expected duration of the remaining runs; None: unknown."""
    used_money: float | None
    """None: the price is unknown."""
    left_money: float | None


def left(budget: Budget, used_seconds: float, rows: Iterable[Row], runs_to_come: int) -> Remaining:
    """Return the used and the remaining budget."""
    took = run_seconds(list(rows))
    limit = None if budget.seconds is None else max(0.0, budget.seconds - used_seconds)
    price = budget.price_per_hour
    return Remaining(
        used_seconds,
        limit,
        took,
        None if took is None else took * runs_to_come,
        None if price is None else used_seconds / 3600 * price,
        None if price is None or limit is None else limit / 3600 * price,
    )


def run_seconds(rows: Sequence[Row]) -> float | None:
    """Return the median duration of the runs that ended by themselves; None if there are none."""
    times = [row.seconds for row in rows if row.verdict in ("done", "out-of-memory") and row.seconds > 0]
    return statistics.median(times) if times else None


def why_not_next(budget: Budget, used_seconds: float, rows: Sequence[Row], ending_seconds: float) -> str:
    """Return why no other run may start, as text; empty: one may.

    A run starts only if one of the usual duration ends within the budget.

    Args:
        ending_seconds: time that ending a run may take; with less left, none starts.
    """
    if budget.seconds is None:
        return ""
    remaining = budget.seconds - used_seconds
    took = run_seconds(rows)
    if remaining <= ending_seconds:
        return "the budget is used up"
    if took is not None and took > remaining:
        return f"{remaining:.0f} s are left of the budget, and a run takes {took:.0f} s"
    return ""


def order(runs: Sequence[Planned], *, fail_fast: bool) -> list[Planned]:
    """Return configurations with the risky ones last, or first with ``fail_fast``: then a failure ends the sweep.

    First those predicted to fit, then those without a prediction, then those predicted not to fit; within each by
    predicted peak. Without predictions the order is kept.
    """
    ordered = sorted(runs, key=_risk)
    return ordered[::-1] if fail_fast and any(run.predicted for run in runs) else ordered


def _risk(run: Planned) -> tuple[int, int]:
    if run.predicted is None:
        return 1, 0
    rank = {True: 0, None: 1, False: 2}[run.predicted.fits]
    return rank, run.predicted.nvml_bytes
