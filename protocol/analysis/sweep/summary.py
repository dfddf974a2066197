"""Results of a sweep from its rows: pooled repeats, the curve over one axis, the fastest configuration."""

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from ...sweep.rows import Predicted, Row, Settings, Value, Verdict, key_of
from ..estimates.curve import TOLERANCE, Piece, pieces
from .figures import RESIDENT_ERROR


class Spread(msgspec.Struct, frozen=True):
    """A figure over repeats."""

    median: float
    low: float
    high: float


class Pooled(msgspec.Struct, frozen=True):
    """One configuration, over its repeats."""

    settings: Settings
    verdict: Verdict
    """``done`` if all repeats were; else the verdict of the first other one."""
    repeats: int
    rows: list[Row]
    peak_bytes: Spread | None = None
    """Peak of the highest rank; None: no step was measured. This and the next figures are over finished repeats."""
    peak_phase: str = ""
    step_ms: Spread | None = None
    tokens_per_second: Spread | None = None

    @property
    def predicted(self) -> Predicted | None:
        """Its prediction; None: none."""
        return next((row.predicted for row in self.rows if row.predicted), None)

    @property
    def on_cpu(self) -> bool:
        """Whether its peaks are resident sets of CPU ranks."""
        return any(row.on_cpu for row in self.rows)


class Curve(msgspec.Struct, frozen=True):
    """Measured peaks over one axis, for one combination of the others."""

    axis: str
    others: Settings
    points: dict[int, float]
    """Highest peak by value."""
    pieces: list[Piece]


def pool(rows: Iterable[Row]) -> list[Pooled]:
    """Pool rows by configuration, in the order of their first rows."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.verdict != "unfinished":
            found.setdefault(key_of(row.settings), []).append(row)
    return [_pooled(of) for of in found.values()]


def _pooled(rows: list[Row]) -> Pooled:
    done = [row for row in rows if row.verdict == "done" and any(rank.steps for rank in row.ranks)]
    failed: list[Verdict] = [row.verdict for row in rows if row.verdict != "done"]
    verdict: Verdict = failed[0] if failed else "done"
    top = max(done, key=lambda row: row.peak_bytes, default=None)
    return Pooled(
        rows[0].settings,
        verdict,
        len(rows),
        rows,
        _spread([row.peak_bytes for row in done]),
        top.peak_phase if top else "",
        _spread([row.step_ms for row in done]),
        _spread([row.tokens_per_second for row in done if row.tokens_per_second]),
    )


def _spread(values: Sequence[float]) -> Spread | None:
    return Spread(statistics.median(values), min(values), max(values)) if values else None


def fastest(pooled: Iterable[Pooled]) -> Pooled | None:
    """Return the configuration with the most tokens per second; with the shortest step if tokens are unknown."""
    done = [one for one in pooled if one.verdict == "done" and one.step_ms is not None]
    if not done:
        return None
    if all(one.tokens_per_second for one in done):
        return max(done, key=lambda one: one.tokens_per_second.median if one.tokens_per_second else 0.0)
    return min(done, key=lambda one: one.step_ms.median if one.step_ms else 0.0)


def curves(pooled: Sequence[Pooled], axis: str = "") -> list[Curve]:
    """Return the curves over ``axis`` with two points or more.

    Args:
        axis: the axis; empty: the one chosen by ``curve_axis``.
    """
    done = [one for one in pooled if one.verdict == "done" and one.peak_bytes is not None]
    axis = axis or curve_axis([one.settings for one in pooled])
    if not axis:
        return []
    groups: dict[str, list[Pooled]] = {}
    for one in done:
        others = {name: value for name, value in one.settings.items() if name != axis}
        if _whole(one.settings.get(axis)) is not None:
            groups.setdefault(key_of(others), []).append(one)
    found = (_curve(axis, group) for group in groups.values() if len(group) > 1)
    return [curve for curve in found if curve is not None]


def curve_axis(settings: Sequence[Settings]) -> str:
    """Return the axis for curves: the one with the most distinct integers; empty: none."""
    names = dict.fromkeys(name for one in settings for name in one)
    counts = {
        name: len({one.get(name) for one in settings})
        for name in names
        if all(_whole(one.get(name)) is not None for one in settings)
    }
    best = max(counts, key=lambda name: counts[name], default="")
    return best if best and counts[best] > 1 else ""


def _curve(axis: str, group: Sequence[Pooled]) -> Curve | None:
    by_value = {value: one for one in group if (value := _whole(one.settings[axis])) is not None}
    phases = {value: _phases(one) for value, one in sorted(by_value.items())}
    common = set.intersection(*(set(found) for found in phases.values()))
    if not common:
        return None
    tolerance = RESIDENT_ERROR if any(one.on_cpu for one in group) else TOLERANCE
    lines = pieces(
        {value: {name: found[name] for name in sorted(common)} for value, found in phases.items()}, tolerance
    )
    others = {name: value for name, value in group[0].settings.items() if name != axis}
    return Curve(axis, others, {value: max(found.values()) for value, found in phases.items()}, lines)


def _phases(one: Pooled) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for row in one.rows:
        for name, size in row.phase_peaks.items():
            found.setdefault(name, []).append(size)
    return {name: statistics.median(sizes) for name, sizes in found.items()}


def _whole(value: Value) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
