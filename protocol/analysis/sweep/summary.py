"""Figures of a rank, and results of a sweep with their text: pooled repeats, curves, the fastest, columns, rows."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from ...messages.telemetry import PHASES, Hello, PhaseRecord, Step
from ...sweep.rows import (
    Budget,
    Goal,
    PhaseFigures,
    Plan,
    Planned,
    Predicted,
    RankRow,
    Row,
    Settings,
    Value,
    Verdict,
    key_of,
)
from ...text import cells_of, duration, gib
from ..estimates.memory import TOLERANCE, Piece, pieces
from ..health.series import MAD_TO_SIGMA
from ..words import describe_curve
from .search import Remaining, money_of

_BLOCKS = 16  # number of blocks for the error, because consecutive steps are correlated (clocks, data)
RESIDENT_ERROR = 0.01
"""Relative error of the resident set of CPU ranks: the kernel counts in batches, and glibc releases irregularly."""


def figures(
    rank: int, steps: Sequence[Step], warm_up: int, most: int | None = None, hello: Hello | None = None, nvml: int = 0
) -> RankRow:
    """Return a rank's figures.

    ``warm_up``: number of first steps to omit. ``most``: maximum number of steps that count; None: all that follow.
    ``nvml``: highest NVML memory of its process, bytes; 0: unknown.
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
    verdict: Verdict  # `done` if all repeats were; else the verdict of the first other one
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
    points: dict[int, float]  # highest peak by value
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

    Raises ``ValueError`` if no figure has this name; the text lists the valid names.
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


VERDICTS = {
    "done": "done",
    "out-of-memory": "out of memory",
    "hang": "hung",
    "crash": "crashed",
    "timeout": "timed out",
    "refused": "refused",
    "no-steps": "no steps",
    "unfinished": "not finished",
}
_USUAL = ("peak", "phase", "predicted", "ms/step", "tokens/s")
_UNITS = {"sequence_length": "token", "seq": "token", "seq_len": "token", "micro_batch": "row"}


def value_text(value: Value) -> str:
    """Return an axis's value, formatted for a table."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value) or '""'


def short_names(axes: Sequence[str]) -> dict[str, str]:
    """Return the last part of each axis's name if it is unique, else the name."""
    parts = [_name(axis) for axis in axes]
    return {axis: part if parts.count(part) == 1 else axis for axis, part in zip(axes, parts, strict=True)}


def settings_text(settings: Settings) -> str:
    """Return a configuration in one line: ``sequence_length=4,096 stage=3``."""
    names = short_names(list(settings))
    return " ".join(f"{names[name]}={value_text(value)}" for name, value in settings.items()) or "as configured"


def row_text(row: Row) -> str:
    """Return the outcome of a run: ``13.40 GiB in backward, 398 ms a step, 5,146 tokens/s``."""
    if row.verdict != "done":
        return failure_text(row)
    words = [f"{gib(row.peak_bytes)} in {row.peak_phase}" if row.peak_phase else "no memory was measured"]
    if off := deviation_text(row.predicted, row.peak_bytes, row.on_cpu):
        words.append(f"predicted {off}")
    if row.step_ms:
        words.append(f"{row.step_ms:,.1f} ms a step")
    if row.tokens_per_second:
        words.append(f"{row.tokens_per_second:,.0f} tokens/s")
    return ", ".join(words) + (f"; {row.note}" if row.note else "")


def deviation_text(predicted: Predicted | None, measured_bytes: float, on_cpu: bool) -> str:
    """Return the deviation of a predicted peak from the measured one, ``+4.3%``; empty: nothing to compare."""
    if predicted is None or not measured_bytes or on_cpu:
        return ""
    return f"{predicted.peak_bytes / measured_bytes - 1:+z.1%}"


def failure_text(row: Row) -> str:
    """Return how a run failed: ``out of memory in backward, rank 1, step 3: asked for 4.64 GiB``."""
    words = VERDICTS[row.verdict] + (f" in {row.phase}" if row.phase else "")
    words += (f", rank {row.rank}" if row.rank is not None else "") + (f", step {row.step}" if row.step else "")
    why = f"asked for {gib(row.asked_bytes)}" if row.asked_bytes else row.text
    return words + (f": {why}" if why else "") + (f"; {row.note}" if row.note else "")


def predicted_text(predicted: Predicted | None) -> str:
    """Return the prediction: ``10.88 GiB in optimizer, fits``; empty: none."""
    if predicted is None:
        return ""
    fits = {True: ", fits", False: ", does not fit", None: ""}[predicted.fits]
    return f"{gib(predicted.peak_bytes)} in {predicted.phase}{fits}"


def budget_text(budget: Budget) -> str:
    """Return the whole budget: ``2 h 00 m (28.64)``, with the cost in brackets, or ``no limit``."""
    if budget.seconds is None:
        return "no limit"
    return _time(budget, budget.seconds)


def _time(budget: Budget, seconds: float) -> str:
    return duration(seconds) + _money(money_of(budget, seconds))


def duration_text(plan: Plan, run: Planned) -> str:
    """Return the expected duration and cost of one run: ``2 m 58 s (0.71)``; empty: not known."""
    return "" if run.seconds is None else _time(plan.budget, run.seconds)


def cost_lines(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """Return the expected time and cost of the runs without a row, and what coarser steps would save."""
    budget = plan.budget
    done = Counter(key_of(row.settings) for row in rows)
    open_runs = [(run, max(0, plan.repeats - done[key_of(run.settings)])) for run in plan.runs]
    count = sum(times for _, times in open_runs)
    price = f"; {budget.gpus} x {budget.price_per_gpu_hour:g} an hour" if budget.price_per_gpu_hour else ""
    if plan.search is not None and plan.search.goal != "fastest":
        return [f"time: how many runs a search takes is not known before; a run at most {_time(budget, plan.timeout)}"]
    known = [(run, times) for run, times in open_runs if run.seconds is not None]
    if not count:
        return []
    if len(known) < len(open_runs):
        most = f"{_time(budget, count * plan.timeout)}, at most {_time(budget, plan.timeout)} a run{price}"
        return [f"time: not known before a run is measured; {count:,} runs take at most {most}"]
    total = _sum(known)
    lines = [f"time: about {_time(budget, total)} for {count:,} runs, {_time(budget, total / count)} a run{price}"]
    axis = curve_axis([run.settings for run in plan.runs])
    values = sorted({value for run in plan.runs if isinstance(value := run.settings.get(axis), int)})
    for step in (2, 4):
        if len(values) > 2 * step:
            kept = [one for one in known if one[0].settings[axis] in values[::step]]
            runs = sum(times for _, times in kept)
            saved = _time(budget, total - _sum(kept))
            lines.append(f"  every {step}{'nd' if step == 2 else 'th'} {_name(axis)}: {runs:,} runs, saves {saved}")
    return lines


def _sum(runs: Iterable[tuple[Planned, int]]) -> float:
    return sum((run.seconds or 0.0) * times for run, times in runs)


def left_text(left: Remaining) -> str:
    """Return the used and remaining budget: ``4 m 10 s used, 1 h 55 m left; the rest takes about 12 m 00 s``."""
    words = f"{duration(left.used_seconds)} used{_money(left.used_money)}"
    if left.left_seconds is not None:
        words += f", {duration(left.left_seconds)} left{_money(left.left_money)}"
    if left.expected_seconds:
        words += f"; the rest takes about {duration(left.expected_seconds)}"
    return words


def _money(money: float | None) -> str:
    return f" ({money:,.2f})" if money is not None else ""


def spread_text(spread: Spread | None, digits: int = 1) -> str:
    """Return a median with half its range: ``398.2 ±1.4``; ``-`` for None."""
    return with_range(spread.median, spread.low, spread.high, digits) if spread is not None else "-"


def table(pooled: Sequence[Pooled], wanted: Sequence[str] = ()) -> list[list[str]]:
    """Return the rows of a table as texts, its header first; ``wanted``: ``columns`` that replace the usual ones."""
    axes = list(dict.fromkeys(name for one in pooled for name in one.settings))
    names = short_names(axes)
    lines = [[*(names[axis] for axis in axes), *(wanted or _USUAL), "result"]]
    for one in pooled:
        failed = next((row for row in one.rows if row.verdict != "done"), one.rows[-1])
        lines.append(
            [
                *(value_text(one.settings.get(axis)) for axis in axes),
                *([pooled_text(one.rows, name) for name in wanted] if wanted else _usual(one)),
                "done" if one.verdict == "done" else failure_text(failed),
            ]
        )
    return lines


def _usual(one: Pooled) -> list[str]:
    off = deviation_text(one.predicted, one.peak_bytes.median if one.peak_bytes else 0.0, one.on_cpu)
    if one.predicted is not None and not one.peak_bytes:
        off = gib(one.predicted.peak_bytes)
    return [
        gib(one.peak_bytes.median) if one.peak_bytes else "",
        one.peak_phase,
        off,
        spread_text(one.step_ms) if one.step_ms else "",
        spread_text(one.tokens_per_second, digits=0) if one.tokens_per_second else "",
    ]


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with aligned columns; the last column is not padded."""
    widths = [max(cells_of(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join(text + " " * (width - cells_of(text)) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def unit_of(axis: str) -> str:
    """Return the unit of an axis: ``token``, ``row``, or the axis's own name."""
    return _UNITS.get(_name(axis), _name(axis))


def _name(axis: str) -> str:
    return axis.rpartition(".")[2]


def curve_lines(found: Sequence[Curve]) -> list[str]:
    """Return one sentence per curve."""
    lines: list[str] = []
    for curve in found:
        where = f" ({settings_text(curve.others)})" if curve.others else ""
        lines.append(f"peak by {_name(curve.axis)}{where}: {describe_pieces(curve.pieces, curve.axis)}")
    return lines


def result_lines(rows: Sequence[Row], plan: Plan | None) -> list[str]:
    """Return the lines below a sweep's table: its curves and the fastest configuration."""
    pooled = pool(rows)
    lines = curve_lines(curves(pooled, plan.search.axis if plan and plan.search else ""))
    best = fastest(pooled)
    if best is not None and len(pooled) > 1:
        speed = f"{best.step_ms.median:,.1f} ms a step" if best.step_ms else ""
        if best.tokens_per_second:
            speed = f"{best.tokens_per_second.median:,.0f} tokens/s"
        lines.append(f"fastest: {settings_text(best.settings)}, {speed}")
    return lines


def goal_text(goal: Goal, axis: str) -> str:
    """Return the goal of a search as text."""
    return {
        "largest": f"the largest {_name(axis)} that fits",
        "fastest": "the fastest configuration that fits",
        "phases": f"where the leading phase changes over {_name(axis)}",
    }[goal]


def describe_pieces(found: Sequence[Piece], axis: str) -> str:
    """Return a sentence about the pieces of a curve over an axis."""
    return describe_curve(found, unit_of(axis))


def counts_text(counts: Mapping[Verdict, int]) -> str:
    """Return the number of runs per outcome: ``38 done, 2 out of memory``."""
    return ", ".join(f"{count} {VERDICTS[verdict]}" for verdict, count in counts.items()) or "nothing yet"
