"""Text of a sweep: one line for a configuration, a row, the remaining budget, and the result."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ...sweep.rows import Budget, Goal, Plan, Planned, Predicted, Row, Settings, Value, Verdict, key_of
from ...text import cells_of, duration, gib
from ..estimates.memory import Piece
from ..words import describe_curve
from . import summary
from .search import Remaining, money_of
from .summary import Curve, Pooled, Spread, curve_axis, curves, fastest, pool

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
    return summary.with_range(spread.median, spread.low, spread.high, digits) if spread is not None else "-"


def table(pooled: Sequence[Pooled], wanted: Sequence[str] = ()) -> list[list[str]]:
    """Return the rows of a table as texts, its header first.

    Args:
        wanted: names of ``columns`` that replace the usual ones.
    """
    axes = list(dict.fromkeys(name for one in pooled for name in one.settings))
    names = short_names(axes)
    lines = [[*(names[axis] for axis in axes), *(wanted or _USUAL), "result"]]
    for one in pooled:
        failed = next((row for row in one.rows if row.verdict != "done"), one.rows[-1])
        lines.append(
            [
                *(value_text(one.settings.get(axis)) for axis in axes),
                *([summary.pooled_text(one.rows, name) for name in wanted] if wanted else _usual(one)),
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
