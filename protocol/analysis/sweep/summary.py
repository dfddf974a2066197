"""Figures of a rank, and results of a sweep: pooled repeats, the curve over one axis, the fastest, columns by name."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import msgspec

from ...messages.telemetry import PHASES, Hello, PhaseRecord, Step
from ...sweep.rows import PhaseFigures, Predicted, RankRow, Row, Settings, Value, Verdict, key_of
from ...text import gib
from ..estimates.memory import TOLERANCE, Piece, pieces
from ..health.series import MAD_TO_SIGMA

_BLOCKS = 16
"""Number of blocks for the error, because consecutive steps are correlated (clocks, data)."""
RESIDENT_ERROR = 0.01
"""Relative error of the resident set of CPU ranks: the kernel counts in batches, and glibc releases irregularly."""


def figures(
    rank: int, steps: Sequence[Step], warm_up: int, most: int | None = None, hello: Hello | None = None, nvml: int = 0
) -> RankRow:
    """Return a rank's figures.

    Args:
        warm_up: number of first steps to omit.
        most: maximum number of steps that count; None: all that follow.
        nvml: highest NVML memory of its process, bytes; 0: unknown.
    """
    measured = steps[warm_up:] if most is None else steps[warm_up : warm_up + most]
    device = hello.device.name if hello is not None else ""
    if not measured:
        return RankRow(rank, nvml_bytes=nvml, device=device)
    times = [step.training_us / 1e3 for step in measured]
    seconds = sum(times) / 1e3
    names = dict.fromkeys(record.name for step in measured for record in step.phases)
    return RankRow(
        rank,
        steps=len(measured),
        step_ms=statistics.median(times),
        step_ms_low=min(times),
        step_ms_high=max(times),
        step_ms_error=standard_error(times),
        tokens_per_second=sum(step.tokens for step in measured) / seconds if seconds > 0 else 0.0,
        phases={name: _phase([r for step in measured for r in step.phases if r.name == name]) for name in names},
        reserved_peak_bytes=max((record.reserved.peak for step in steps for record in step.phases), default=0),
        nvml_bytes=nvml,
        device=device,
        loss=measured[-1].loss,
    )


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the median of a correlated series; 0 for fewer than 3 values.

    The series is divided into up to 16 blocks; the robust scatter of their medians is the error of one block.
    """
    if len(values) < 3:
        return 0.0
    count = min(_BLOCKS, len(values))
    cuts = [round(len(values) * number / count) for number in range(count + 1)]
    blocks = [statistics.median(values[begin:end]) for begin, end in pairwise(cuts)]
    middle = statistics.median(blocks)
    deviation = MAD_TO_SIGMA * statistics.median(abs(block - middle) for block in blocks)
    return deviation * math.sqrt(math.pi / 2) / math.sqrt(len(blocks))


def _phase(records: Sequence[PhaseRecord]) -> PhaseFigures:
    device = [record.device_us / 1e3 for record in records if record.device_us is not None]
    host = [record.host_us / 1e3 for record in records]
    return PhaseFigures(
        allocated_peak_bytes=max(record.allocated.peak for record in records),
        reserved_peak_bytes=max(record.reserved.peak for record in records),
        resident_peak_bytes=max((record.resident.peak for record in records if record.resident), default=0),
        host_ms=statistics.median(host),
        device_ms=statistics.median(device) if device else None,
        ms_error=standard_error(device or host),
    )


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
    """Return the curves over ``axis`` (empty: the one chosen by ``curve_axis``) with two points or more."""
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
    points = {value: {name: found[name] for name in sorted(common)} for value, found in phases.items()}
    lines = pieces(points, tolerance)
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


Figure = float | None
_PHASES = tuple(phase for phase in PHASES if phase != "init")


def _highest(of: Callable[[RankRow], float]) -> Callable[[Row], Figure]:
    """Return a function for a figure's maximum over ranks; it returns None for a row without ranks."""
    return lambda row: max((value for rank in row.ranks if (value := of(rank))), default=None)


def _loss(row: Row) -> Figure:
    losses = [rank.loss for rank in row.ranks if rank.loss is not None]
    return sum(losses) / len(losses) if losses else None


_OF_A_RUN: dict[str, Callable[[Row], Figure]] = {
    "peak": _highest(lambda rank: rank.peak_bytes),
    "reserved": _highest(lambda rank: rank.reserved_peak_bytes),
    "nvml": _highest(lambda rank: rank.nvml_bytes),
    "step_ms": _highest(lambda rank: rank.step_ms),
    "tokens_per_second": lambda row: row.tokens_per_second or None,
    "loss": _loss,
    "seconds": lambda row: row.seconds,
}
_OF_A_PHASE: dict[str, Callable[[PhaseFigures], float]] = {
    "peak": lambda figures: figures.peak_bytes,
    "allocated": lambda figures: figures.allocated_peak_bytes,
    "reserved": lambda figures: figures.reserved_peak_bytes,
    "ms": lambda figures: figures.device_ms if figures.device_ms is not None else figures.host_ms,
}
NAMES = (*_OF_A_RUN, *(f"PHASE.{name}" for name in _OF_A_PHASE))
"""Valid column names: a figure of the whole run (``peak``, ``loss``) or of a phase (``backward.peak``)."""


def check(name: str) -> None:
    """Check the name of a column.

    Raises:
        ValueError: no figure has this name; the text lists the valid names.
    """
    phase, dot, figure = name.partition(".")
    if name in _OF_A_RUN or (dot and phase in _PHASES and figure in _OF_A_PHASE):
        return
    raise ValueError(f"are {', '.join(NAMES)} (PHASE: {', '.join(_PHASES)})")


def value(row: Row, name: str) -> Figure:
    """Return a figure of a row: bytes, milliseconds, tokens per second, seconds or the loss; None: not available.

    Over several ranks it is the maximum; for tokens per second the sum, for the loss the mean.
    """
    if name in _OF_A_RUN:
        return _OF_A_RUN[name](row)
    phase, _, figure = name.partition(".")
    found = [_OF_A_PHASE[figure](rank.phases[phase]) for rank in row.ranks if phase in rank.phases]
    return max((one for one in found if one), default=None)


def pooled_text(rows: Sequence[Row], name: str) -> str:
    """Return a figure over the finished repeats of a configuration, formatted for a table; empty: none."""
    found = (value(row, name) for row in rows if row.verdict == "done")
    return text([one for one in found if one is not None], name)


def text(values: Sequence[float], name: str) -> str:
    """Return a figure over repeats, formatted for a table: the median, and half the range if they differ."""
    if not values:
        return ""
    figure = name.rpartition(".")[2]
    if figure in ("peak", "allocated", "reserved", "nvml"):
        return gib(round(statistics.median(values)))
    digits = {"loss": 4, "tokens_per_second": 0}.get(figure, 1)
    return with_range(statistics.median(values), min(values), max(values), digits)


def with_range(median: float, low: float, high: float, digits: int) -> str:
    """Return a median, with half the range if it is not 0."""
    half = (high - low) / 2
    return f"{median:,.{digits}f}{f' ±{half:,.{digits}f}' if half else ''}"
