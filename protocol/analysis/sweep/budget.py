"""What is left of a sweep's budget, and whether the next run fits into it."""

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from ...sweep.rows import Budget, Row


class Remaining(msgspec.Struct, frozen=True):
    """Used and remaining budget of a sweep."""

    used_seconds: float
    left_seconds: float | None
    """Of the budget; None: no limit."""
    run_seconds: float | None
    """Median of the runs so far; None: there was none."""
    expected_seconds: float | None
    """For the runs to come, at that; None: not known."""
    used_money: float | None
    """None: no price is known."""
    left_money: float | None


def left(budget: Budget, used_seconds: float, rows: Iterable[Row], runs_to_come: int) -> Remaining:
    """Return what was used and what is left.

    Args:
        budget: of the sweep.
        used_seconds: wall-clock time so far, all sessions.
        rows: of runs so far.
        runs_to_come: how many are planned and have no row.
    """
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
    """Return the median time of a run that ended by itself; None where there was none."""
    times = [row.seconds for row in rows if row.verdict in ("done", "out-of-memory") and row.seconds > 0]
    return statistics.median(times) if times else None


def why_not_next(budget: Budget, used_seconds: float, rows: Sequence[Row], ending_seconds: float = 0.0) -> str:
    """Return why no other run may begin, in words; empty: one may.

    A run begins only if one of the usual length ends within the budget.

    Args:
        budget: of the sweep.
        used_seconds: wall-clock time so far, all sessions.
        rows: of runs so far.
        ending_seconds: what ending a run may take; with less left, none begins.
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
