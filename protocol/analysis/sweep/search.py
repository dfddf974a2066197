"""What a sweep runs next: searches along one axis by real runs, the remaining budget, the order of configurations."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import msgspec

from ...sweep.rows import Budget, Planned, Row, Settings, group_of, key_of
from ..estimates.memory import Piece, pieces, sample_curve
from ..estimates.time import gpu_cost


class UndecidedError(Exception):
    """A run neither fitted nor ran out of memory, so the search cannot go on."""


class Tried(NamedTuple):
    """One run of a search."""

    fits: bool
    peak_bytes: float  # 0 if it did not fit


class Found(NamedTuple):
    """The result of a search for the largest value."""

    value: int | None  # none: the lowest value does not fit
    at_the_end: bool  # whether the highest value fits, so that larger ones may fit too
    tried: dict[int, Tried]


def largest(measure: Callable[[int], Tried], low: int, high: int, step: int = 1, guess: int | None = None) -> Found:
    """Return the largest value that fits, among ``low`` and multiples of ``step`` above it up to ``high``.

    The first run is at ``guess``, the largest value predicted to fit (None: at the lowest), the second at the adjacent
    value that confirms a correct guess. From a wrong guess the distance is doubled, then the interval between fitting
    and non-fitting values is halved. Raises ``UndecidedError`` of ``measure``.
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
    ``measure`` returns the peak of each phase at a value; None if it does not fit. If ``high`` does not fit, the range
    is halved until it does; if ``low`` does not, points and pieces are empty. Raises ``UndecidedError`` of ``measure``.
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
    left_seconds: float | None  # remaining seconds of the budget; None: no limit
    run_seconds: float | None  # median duration of the runs so far; None: none
    expected_seconds: float | None  # expected duration of the remaining runs; None: unknown
    used_money: float | None  # none: the price is unknown
    left_money: float | None


def left(budget: Budget, used_seconds: float, rows: Iterable[Row], runs_to_come: int) -> Remaining:
    """Return the used and the remaining budget."""
    took = run_seconds(list(rows))
    limit = None if budget.seconds is None else max(0.0, budget.seconds - used_seconds)
    return Remaining(
        used_seconds,
        limit,
        took,
        None if took is None else took * runs_to_come,
        money_of(budget, used_seconds),
        None if limit is None else money_of(budget, limit),
    )


def money_of(budget: Budget, seconds: float) -> float | None:
    """Return the cost of the sweep's GPUs for a time; None if the price or the number of GPUs is not known."""
    if budget.price_per_gpu_hour is None or not budget.gpus:
        return None
    return gpu_cost(seconds, budget.gpus, budget.price_per_gpu_hour)


START_SECONDS = 40.0  # assumed start of a run until one is measured: a 0.5B model on an H100 took 38 s


def with_durations(runs: Sequence[Planned], rows: Iterable[Row], steps: int, one_process: str = "") -> list[Planned]:
    """Return planned runs with their expected durations, from measured rows or the predicted time of a step.

    A configuration with a row takes as long again. Others take a start, the median of the measured ones, and their
    predicted steps; without a prediction as long as the median of all runs; without rows their duration is not known.
    ``steps``: of a run, warm-up included. ``one_process``: axis whose values share one process, which starts once, with
    the lowest value; empty: none.
    """
    done = [row for row in rows if row.verdict == "done" and row.seconds > 0]
    first: dict[str, int] = {}
    for run in runs if one_process else ():
        value, key = _at(run.settings, one_process), group_of(run.settings, one_process)
        first[key] = min(value, first.get(key, value))

    def starts(settings: Settings) -> bool:
        return not one_process or _at(settings, one_process) == first.get(group_of(settings, one_process))

    by_key: dict[str, list[float]] = {}
    for row in done:
        by_key.setdefault(key_of(row.settings), []).append(row.seconds)
    found = [row.seconds - steps * ms / 1e3 for row in done if (ms := row.step_ms) and starts(row.settings)]
    start = max(0.0, statistics.median(found)) if found else START_SECONDS

    def seconds(run: Planned) -> float | None:
        if own := by_key.get(key_of(run.settings)):
            return statistics.median(own)
        if run.predicted is not None and run.predicted.step_seconds:
            return start * starts(run.settings) + steps * run.predicted.step_seconds
        return run_seconds(done)

    return [msgspec.structs.replace(run, seconds=seconds(run)) for run in runs]


def _at(settings: Settings, axis: str) -> int:
    value = settings.get(axis)
    return value if isinstance(value, int) else 0


def run_seconds(rows: Sequence[Row]) -> float | None:
    """Return the median duration of the runs that ended by themselves; None if there are none."""
    times = [row.seconds for row in rows if row.verdict in ("done", "out-of-memory") and row.seconds > 0]
    return statistics.median(times) if times else None


def why_not_next(budget: Budget, used_seconds: float, rows: Sequence[Row], ending_seconds: float) -> str:
    """Return why no other run may start, as text; empty: one may.

    A run starts only if one of the usual duration ends within the budget, and more than ``ending_seconds``, the time
    that ending a run may take, are left.
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
