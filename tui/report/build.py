"""Makes a report of loaded data (charts, tables, time, cost) and renders it as text, CSV or Parquet."""

import csv
import io
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from ...protocol.analysis.estimates.memory import RATES, TOLERANCE, WHOLE_STEP, bands, pieces
from ...protocol.analysis.estimates.time import gpu_cost
from ...protocol.analysis.sweep.summary import Curve as MeasuredCurve
from ...protocol.analysis.sweep.summary import (
    aligned,
    curve_axis,
    curve_lines,
    curves,
    pool,
    result_lines,
    settings_text,
    table,
    unit_of,
)
from ...protocol.analysis.words import describe_curve
from ...protocol.errors import UsageError
from ...protocol.host.process import write_private
from ...protocol.recording.curves import mean_loss
from ...protocol.recording.results import StepPoint, TrainingPoint
from ...protocol.sweep.rows import RankRow, Row, Settings, key_of
from ...protocol.text import counted, duration, gib, sanitize
from ..plotext_figure import draw, new_figure, rows
from .data import OUT_OF_MEMORY, Chart, CsvData, Curve, Data, Report, RunData, Section, SweepData

GIB = 2**30
_LENGTHS = ("sequence_length", "seq", "seq_len", "length", "seq_length", "sequence", "len", "context", "tokens", "x")


def build(found: Sequence[Data], price_per_gpu_hour: float | None = None) -> Report:
    """Return the report of one or several sources; those with the same horizontal axis share a first picture."""
    sections = [section(one, price_per_gpu_hour) for one in found]
    together = _together(sections) if len(found) > 1 else None
    names = ", ".join(one.name for one in found)
    return Report(names, [together, *sections] if together is not None else sections)


def section(data: Data, price_per_gpu_hour: float | None) -> Section:
    """Return the section of one run, sweep or file."""
    if isinstance(data, CsvData):
        return _csv(data)
    return _sweep(data, price_per_gpu_hour) if isinstance(data, SweepData) else _run(data, price_per_gpu_hour)


def _together(sections: Sequence[Section]) -> Section | None:
    by_axis: dict[tuple[str, str, str, str, bool], list[list[Curve]]] = {}
    for one in sections:
        for chart in one.charts:
            named = [msgspec.structs.replace(each, name=f"{one.title} {each.name}".strip()) for each in chart.curves]
            by_axis.setdefault((chart.title, chart.x_name, chart.unit, chart.band, chart.from_zero), []).append(named)
    shared = [
        Chart(title, x_name, unit, [*chain(*found)], band=band, from_zero=from_zero)
        for (title, x_name, unit, band, from_zero), found in by_axis.items()
        if len(found) > 1
    ]
    return Section("in one picture", charts=shared) if shared else None


def _run(data: RunData, price: float | None) -> Section:
    facts = [*data.facts, *_spent(data.seconds, data.gpus, price)]
    resident = any(point.resident_peak for series in data.series.values() for point in series)
    memory = [_over_steps("resident", data, lambda point: (point.resident_peak or 0) / GIB)] if resident else []
    memory.append(_over_steps("allocated", data, lambda point: point.allocated_peak / GIB))
    memory.append(_over_steps("reserved", data, lambda point: point.reserved_peak / GIB))
    nvml = [rank.nvml_bytes / GIB for rank in data.ranks if rank.nvml_bytes]
    notes = [f"NVML: {min(nvml):.2f} to {max(nvml):.2f} GiB a process at the highest"] if nvml else []
    charts = [
        Chart("memory peak of a step", "step", "GiB", [curve for curve in memory if curve.xs], notes=notes),
        Chart("time of a step", "step", "ms", [_over_steps("", data, lambda point: point.host_ms)]),
    ]
    measured = [chart for chart in charts if any(any(curve.high) for curve in chart.curves)]
    unknown = counted(len(data.not_finite), "step")
    lost = [f"loss not finite in {unknown}, first in step {data.not_finite[0]:,}"] if data.not_finite else []
    return Section(data.name, facts, [*measured, *_training(data)], _phases(data.ranks), lost)


_LARGEST = 1e30  # of a drawn loss: sums and axes stay finite
_METRICS = 4
_MOST_MARKS = 64


def _training(data: RunData) -> Iterator[Chart]:
    """Yield the charts of loss, learning rate and the evaluations' other results, those that the run has."""
    evaluations = {(one.name, one.step): one for one in data.evaluations}  # the last of a step counts
    losses = {key: one.loss for key, one in evaluations.items() if one.loss is not None}
    curves = [_loss_curve(data), *(msgspec.structs.replace(one, sparse=True) for one in _evaluated(losses))]
    if any(curve.xs for curve in curves):
        marks = [(float(step), "loss not finite") for step in _stretches(data.not_finite)][:_MOST_MARKS]
        band = "lowest and highest of ranks and pooled steps"
        yield Chart("loss", "step", "", [one for one in curves if one.xs], marks, band=band, from_zero=False)
    rates: dict[int, list[float]] = {}
    for point in chain(*data.training.values()):
        if _drawable(point.lr):
            rates.setdefault(point.step, []).append(point.lr)
    if rates:
        yield Chart("learning rate", "step", "", [_curve("", rates)])
    names = dict.fromkeys(name for one in data.evaluations for name in one.metrics)
    for name in list(names)[:_METRICS]:
        found = {key: one.metrics[name] for key, one in evaluations.items() if name in one.metrics}
        curves = _evaluated(found)
        if curves:
            yield Chart(f"evaluation: {name}", "step", "", curves, from_zero=False)


def _drawable(value: float | None) -> TypeGuard[float]:
    return value is not None and abs(value) <= _LARGEST  # not so of NaN


def _loss_curve(data: RunData) -> Curve:
    """Return the training loss: mean over ranks, weighted by label tokens if they are known."""
    by_step: dict[int, dict[int, TrainingPoint]] = {}
    for rank, series in data.training.items():
        for point in series:
            if _drawable(point.loss) and _drawable(point.low_loss) and _drawable(point.high_loss):
                by_step.setdefault(point.step, {})[rank] = point  # the last, if a restarted job repeats the step
    points = [(step, list(found.values())) for step, found in sorted(by_step.items())]
    return Curve(
        "training",
        [float(step) for step, _ in points],
        [min(one.low_loss or 0.0 for one in found) for _, found in points],
        [mean_loss([(one.loss or 0.0, one.label_tokens) for one in found]) or 0.0 for _, found in points],
        [max(one.high_loss or 0.0 for one in found) for _, found in points],
    )


def _evaluated(values: Mapping[tuple[str, int], float]) -> list[Curve]:
    """Return a curve for each split or data set, from the values by its name and step."""
    by_name: dict[str, dict[int, list[float]]] = {}
    for (name, step), value in values.items():
        if _drawable(value):
            by_name.setdefault(name, {})[step] = [value]
    return [
        _curve(name if name == "evaluation" else f"evaluation {name}", found) for name, found in sorted(by_name.items())
    ]


def _stretches(steps: Sequence[int]) -> list[int]:
    """Return the first of each stretch of consecutive steps."""
    return [step for before, step in pairwise([-2, *steps]) if step != before + 1]


def _spent(seconds: float, gpus: int, price: float | None) -> Iterator[tuple[str, str]]:
    yield "time", duration(seconds)
    if price is not None:
        yield "cost", f"{gpu_cost(seconds, gpus, price):,.2f} for {counted(gpus, 'GPU')} at {price:,.2f} a GPU hour"


def _over_steps(name: str, data: RunData, value: Callable[[StepPoint], float]) -> Curve:
    by_step: dict[int, list[float]] = {}
    for series in data.series.values():
        for point in series:
            by_step.setdefault(point.step, []).append(value(point))
    return _curve(name, by_step)


def _curve(name: str, values: dict[int, list[float]], *, predicted: bool = False) -> Curve:
    xs = sorted(values)
    return Curve(
        name,
        [float(x) for x in xs],
        [min(values[x]) for x in xs],
        [statistics.median(values[x]) for x in xs],
        [max(values[x]) for x in xs],
        predicted,
    )


def _phases(ranks: Iterable[RankRow]) -> list[list[str]]:
    measured = [rank for rank in ranks if rank.phases]
    if not measured:
        return []
    lines = [["phase", "peak, lowest rank", "median", "highest", "time, lowest", "median", "highest"]]
    for name in dict.fromkeys(name for rank in measured for name in rank.phases):
        found = [rank.phases[name] for rank in measured if name in rank.phases]
        peaks = [one.peak_bytes for one in found]
        times = [one.device_ms if one.device_ms is not None else one.host_ms for one in found]
        sizes = [gib(size) for size in (min(peaks), statistics.median(peaks), max(peaks))]
        lines.append([name, *sizes, *(f"{ms:,.1f} ms" for ms in (min(times), statistics.median(times), max(times)))])
    return lines


def _sweep(data: SweepData, price: float | None) -> Section:
    results = data.results
    rows = list(results.answered().values())
    pooled = pool(rows)
    plan = results.plan
    axis = (plan.search.axis if plan and plan.search else "") or curve_axis([one.settings for one in pooled])
    rate = price if price is not None else (plan.budget.price_per_gpu_hour if plan else None)
    gpus = plan.budget.gpus if plan and plan.budget.gpus else max((len(row.ranks) for row in rows), default=0)
    facts = [
        ("sweep file", results.header.source),
        ("host", results.header.host),
        ("steps", f"{results.header.steps} after {results.header.warm_up} of warm-up"),
        ("runs", f"{len(rows)} of {len(pooled)} configurations"),
        *_spent(results.seconds_used(), gpus, rate),
    ]
    charts = _sweep_charts(rows, axis, curves(pooled, axis)) if axis else []
    drawn = {note for chart in charts for note in chart.notes}
    notes = [line for line in result_lines(rows, plan) if line not in drawn]
    return Section(data.name, facts, charts, table(pooled, plan.columns if plan else ()) if pooled else [], notes)


def _sweep_charts(rows: Sequence[Row], axis: str, fitted: Sequence[MeasuredCurve]) -> list[Chart]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if _whole(row, axis) is not None:
            groups.setdefault(key_of(_others(row, axis)), []).append(row)
    peaks, memory, times = list[Curve](), list[Curve](), list[Curve]()
    # A prediction for GPUs is not comparable with peaks of the resident set.
    on_cpu = any(row.on_cpu for row in rows)
    for group in groups.values():
        done = [row for row in group if row.verdict == "done"]
        others = _others(group[0], axis)
        name = settings_text(others) if others else ""
        peaks.append(_of_ranks(name, done, axis, lambda rank: rank.peak_bytes / GIB))
        predicted = {
            x: [row.predicted.peak_bytes / GIB]
            for row in group
            if row.predicted is not None and not on_cpu and (x := _whole(row, axis)) is not None
        }
        peaks.append(_curve(f"{name} predicted".strip(), predicted, predicted=True))
        reserved = _of_ranks(f"{name} reserved".strip(), done, axis, lambda rank: rank.reserved_peak_bytes / GIB)
        nvml = _of_ranks(f"{name} NVML".strip(), done, axis, lambda rank: rank.nvml_bytes / GIB)
        memory += [curve for curve in (reserved, nvml) if any(curve.high)]
        times.append(_of_ranks(name, done, axis, lambda rank: rank.step_ms))
    failed = {x for row in rows if row.verdict == "out-of-memory" and (x := _whole(row, axis)) is not None}
    crossovers = {round(piece.end) for curve in fitted for piece in curve.pieces[:-1]}
    marks = [(float(x), OUT_OF_MEMORY) for x in sorted(failed)]
    marks += [(float(x), "crossover") for x in sorted(crossovers)]
    x_name = _x_name(axis)
    charts = [
        Chart("memory peak", x_name, "GiB", [curve for curve in peaks if curve.xs], marks, curve_lines(fitted)),
        Chart("reserved and NVML", x_name, "GiB", memory),
        Chart("time of a step", x_name, "ms", [curve for curve in times if curve.xs]),
    ]
    return [chart for chart in charts if any(len(curve.xs) > 1 for curve in chart.curves)]


def _of_ranks(name: str, rows: Sequence[Row], axis: str, figure: Callable[[RankRow], float]) -> Curve:
    values: dict[int, list[float]] = {}
    for row in rows:
        x = _whole(row, axis)
        if x is not None:
            values.setdefault(x, []).extend(figure(rank) for rank in row.ranks if rank.steps)
    return _curve(name, {x: found for x, found in values.items() if found})


_MOST_PIECES = 5
_TOLERANCES = (TOLERANCE, 0.01, 0.03)
"""Of others' measurements, which are noisier than those of the same step: the first with few enough pieces."""


def _csv(data: CsvData) -> Section:
    charts: list[Chart] = []
    measured = [one for one in data.measurements if one.figures]
    lengths = [one.length for one in measured]
    x_name = _x_name(data.mapping.length)
    failed = sorted({one.length for one in data.measurements} - set(lengths))
    marks = [(float(x), OUT_OF_MEMORY) for x in failed]
    for figure in data.mapping.figures:
        found = bands(data.measurements, figure)
        scale, unit = (1, "iterations/s") if figure in RATES else (GIB, "GiB")
        low, median, high = ([getattr(one, of) / scale for one in found] for of in ("lowest", "median", "highest"))
        curve = Curve(figure, [float(band.length) for band in found], low, median, high)
        notes: list[str] = []
        if len(found) > 1 and unit == "GiB":
            points = {band.length: {WHOLE_STEP: band.highest} for band in found}
            fits = (pieces(points, tolerance) for tolerance in _TOLERANCES)
            fitted = next((fit for fit in fits if len(fit) <= _MOST_PIECES), None)
            words = describe_curve(fitted, unit_of(data.mapping.length)) if fitted else "too uneven for straight pieces"
            notes.append(f"highest rank: {words}")
        title = "rate" if figure in RATES else "memory peak" if figure.startswith("allocated") else f"{figure} memory"
        charts.append(Chart(title, x_name, unit, [curve], marks, notes))
    ranks = counted(len({one.rank for one in measured}), "rank")
    spread = " to ".join(f"{length:,}" for length in sorted({min(lengths), max(lengths)}))
    facts = [
        ("measurements", f"{len(measured):,} of {ranks}, {x_name} {spread}"),
        ("columns", ", ".join(f"{name} = {column}" for name, column in data.mapping.figures.items())),
        ("unit", data.mapping.unit),
    ]
    return Section(data.name, facts, charts)


def _others(row: Row, axis: str) -> Settings:
    return {name: value for name, value in row.settings.items() if name != axis}


def _whole(row: Row, axis: str) -> int | None:
    value = row.settings.get(axis)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _x_name(axis: str) -> str:
    name = axis.rpartition(".")[2]
    return "sequence length" if name.lower() in _LENGTHS else name


_HEIGHT = 16
_MARKERS = "*o+x#@%&"


def lines(report: Report, width: int, *, ascii_only: bool = False) -> Iterator[str]:
    """Yield the lines of a report, charts ``width`` columns wide."""
    return chain.from_iterable(_section(section, width, ascii_only) for section in report.sections)


def _section(section: Section, width: int, ascii_only: bool) -> Iterator[str]:
    title = sanitize(section.title, 200)
    yield title
    yield ("-" if ascii_only else "─") * min(width, len(title))
    for name, value in section.facts:
        yield f"{name}: {sanitize(value, 500)}"
    for chart in section.charts:
        yield ""
        yield from chart_lines(chart, width, ascii_only=ascii_only)
    if section.table:
        yield ""
        yield from (sanitize(line, 400) for line in aligned(section.table))
    for note in section.notes:
        yield sanitize(note, 500)
    yield ""


def chart_lines(chart: Chart, width: int, *, ascii_only: bool = False) -> Iterator[str]:
    """Yield a chart: title with its legend, plot, marks and notes. A band's ends are points around its line."""
    figure = new_figure(width, _HEIGHT)
    legend: list[str] = []
    for curve in chart.curves:  # first: what is drawn later hides what is there
        if curve.has_band:
            draw(figure, curve.xs, curve.low, "-", line=False)
            draw(figure, curve.xs, curve.high, "-", line=False)
    for number, curve in enumerate(chart.curves):
        several = len(chart.curves) > 1 or ascii_only
        marked = ascii_only or (several and not curve.predicted)
        style = _MARKERS[number % len(_MARKERS)] if marked else "braille"
        draw(figure, curve.xs, curve.median, style, line=not curve.sparse)
        sign = f"{style if len(style) == 1 else '⠒'} " if several else ""
        legend.append(f"{sign}{curve.name or 'median rank'}")
    bottom, top = chart.limits
    figure.ruler("y").lim(bottom, top + (top - bottom) * 0.05)
    xs = sorted({x for curve in chart.curves for x in curve.xs})
    ticks = _ticks(xs)
    figure.ruler("x").ticks(ticks, [f"{x:,.0f}" for x in ticks])
    yield f"{sanitize(chart.heading, 200)}, by {chart.x_name}"
    if any(curve.has_band for curve in chart.curves):
        legend.append(f"- {chart.band}")
    yield from _packed([sanitize(name, 300) for name in legend], width - 2)
    for row in rows(figure, plain=True):
        text = row.rstrip()
        yield text.translate(_ASCII) if ascii_only else text
    kinds = dict.fromkeys(text for _, text in chart.marks)
    words = [f"{text} at {', '.join(f'{x:,.0f}' for x, one in chart.marks if one == text)}" for text in kinds]
    if words:
        yield f"  {sanitize('; '.join(words), 300)}"
    for note in chart.notes:
        yield f"  {sanitize(note, 500)}"


def _packed(names: list[str], width: int) -> Iterator[str]:
    line = names[0]
    for name in names[1:]:
        if len(line) + 3 + len(name) > width:
            yield f"  {line}"
            line = name
        else:
            line += f"   {name}"
    yield f"  {line}"


_ASCII = str.maketrans("┌┐└┘│─┤├┬┴┼", "++++|-+++++")


def _ticks(xs: list[float]) -> list[float]:
    quarters = [xs[0] + (xs[-1] - xs[0]) * part / 4 for part in range(5)] if xs else []
    return sorted({min(xs, key=lambda x: abs(x - quarter)) for quarter in quarters})


_RANK = (
    "rank", "steps", "step_ms", "step_ms_low", "step_ms_high", "tokens_per_second", "reserved_peak_bytes",
    "nvml_bytes", "device", "loss",
)  # fmt: skip
_PHASE = ("allocated_peak_bytes", "reserved_peak_bytes", "resident_peak_bytes", "host_ms", "device_ms")

Record = dict[str, Any]


def records(found: Sequence[Data]) -> list[Record]:
    """Return one record per rank and phase; of a failed run one with its verdict; of a CSV file its own.

    Raises ``UsageError`` if a run has no measured steps.
    """
    return [record for data in found for record in _of(data)]


def _of(data: Data) -> Iterator[Record]:
    if isinstance(data, SweepData):
        for row in data.results.answered().values():
            yield from _of_row(data.name, row)
    elif isinstance(data, CsvData):
        for one in data.measurements:
            base: Record = {"source": data.name, data.mapping.length: one.length}
            if not one.figures:
                yield {**base, "verdict": "out-of-memory"}
                continue
            sizes = {figure if figure in RATES else f"{figure}_bytes": size for figure, size in one.figures.items()}
            yield {**base, "rank": one.rank, "iteration": one.iteration, **sizes}
    else:
        measured = [rank for rank in data.ranks if rank.phases]
        if not measured:
            text = "no measured steps with phases to write; --warm-up excludes the first ones of a run"
            raise UsageError(f"{data.name}: {text}")
        for rank in measured:
            yield from _of_rank({"source": data.name}, rank)


def _of_row(name: str, row: Row) -> Iterator[Record]:
    base: Record = {"source": name, **row.settings, "repeat": row.repeat, "verdict": row.verdict, "run": row.run}
    base |= {"seconds": row.seconds}
    if row.predicted is not None:
        base |= {"predicted_peak_bytes": row.predicted.peak_bytes, "predicted_phase": row.predicted.phase}
    measured = [rank for rank in row.ranks if rank.steps]
    if not measured:
        failed = {"failed_in": row.phase, "failed_rank": row.rank}
        yield {**base, **failed, "asked_bytes": row.asked_bytes, "text": row.text}
    for rank in measured:
        yield from _of_rank(base, rank)


def _of_rank(base: Record, rank: RankRow) -> Iterator[Record]:
    own = {name if name != "reserved_peak_bytes" else "rank_reserved_peak_bytes": getattr(rank, name) for name in _RANK}
    for phase, figures in rank.phases.items():
        yield {**base, **own, "phase": phase, **{name: getattr(figures, name) for name in _PHASE}}


def to_csv(rows: Sequence[Record]) -> str:
    """Return the records as CSV; missing columns of a record are empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def to_parquet(rows: Sequence[Record]) -> bytes:
    """Return the records as Parquet; raise ``UsageError`` if pyarrow is not installed."""
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError("--parquet needs pyarrow; run: pip install pyarrow, or write --csv") from None
    table = arrow.table({name: _column([row.get(name) for row in rows]) for name in _columns(rows)})
    buffer = arrow.BufferOutputStream()
    parquet.write_table(table, buffer)
    return buffer.getvalue().to_pybytes()


def _columns(rows: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _column(values: list[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) > 1 and not kinds <= {int, float}:
        return [None if value is None else str(value) for value in values]
    return values


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically; raise ``UsageError`` if it cannot be written."""
    try:
        write_private(path, data)
        path.chmod(0o644)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
