"""A sweep's remaining budget, and whether the next run fits into it."""

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from ...sweep.rows import Budget, Row


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


def why_not_next(budget: Budget, used_seconds: float, rows: Sequence[Row], ending_seconds: float = 0.0) -> str:
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
