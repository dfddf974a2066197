"""Makes a report of loaded data: charts with bands over ranks, fitted pieces, tables, time and cost."""

import statistics
from collections.abc import Callable, Iterable, Sequence

from ...protocol.analysis.estimates.curve import WHOLE_STEP, pieces
from ...protocol.analysis.estimates.measured import bands
from ...protocol.analysis.sweep.summary import Curve as MeasuredCurve
from ...protocol.analysis.sweep.summary import curve_axis, curves, pool
from ...protocol.analysis.sweep.text import curve_lines, result_lines, settings_text, table, unit_of
from ...protocol.analysis.text.curve import describe_curve
from ...protocol.recording.results import StepPoint
from ...protocol.sweep.rows import RankRow, Row, Settings, key_of
from ...protocol.text import counted, duration, gib
from .load import CsvData, Data, RunData, SweepData
from .model import OUT_OF_MEMORY, Chart, Curve, Report, Section

GIB = 2**30
_LENGTHS = ("sequence_length", "seq", "seq_len", "length", "seq_length", "sequence", "len", "context", "tokens", "x")


def build(found: Sequence[Data], price_per_hour: float | None = None) -> Report:
    """Return the report of one or several sources; those with the same horizontal axis share a first picture."""
    sections = [section(one, price_per_hour) for one in found]
    together = _together(sections) if len(found) > 1 else None
    names = ", ".join(one.name for one in found)
    return Report(names, [together, *sections] if together is not None else sections)


def section(data: Data, price_per_hour: float | None) -> Section:
    """Return the section of one run, sweep or file."""
    if isinstance(data, SweepData):
        return _sweep(data, price_per_hour)
    if isinstance(data, CsvData):
        return _csv(data)
    return _run(data, price_per_hour)


def _together(sections: Sequence[Section]) -> Section | None:
    by_axis: dict[tuple[str, str, str], list[Chart]] = {}
    for one in sections:
        for chart in one.charts:
            by_axis.setdefault((chart.title, chart.x_name, chart.unit), []).append(
                Chart(chart.title, chart.x_name, chart.unit, [_named(curve, one.title) for curve in chart.curves])
            )
    shared = [
        Chart(title, x_name, unit, [curve for chart in charts for curve in chart.curves])
        for (title, x_name, unit), charts in by_axis.items()
        if len(charts) > 1
    ]
    return Section("in one picture", charts=shared) if shared else None


def _named(curve: Curve, name: str) -> Curve:
    words = f"{name} {curve.name}".strip()
    return Curve(words, curve.xs, curve.low, curve.median, curve.high, curve.predicted)


def _run(data: RunData, price: float | None) -> Section:
    facts = [*data.facts, ("time", duration(data.seconds))]
    if price is not None:
        facts.append(("cost", f"{data.seconds / 3600 * price:,.2f} at {price:,.2f} an hour"))
    resident = any(point.resident_peak for series in data.series.values() for point in series)
    memory = [_over_steps("resident", data, lambda point: (point.resident_peak or 0) / GIB)] if resident else []
    memory.append(_over_steps("allocated", data, lambda point: point.allocated_peak / GIB))
    memory.append(_over_steps("reserved", data, lambda point: point.reserved_peak / GIB))
    nvml = [rank.nvml_bytes / GIB for rank in data.ranks if rank.nvml_bytes]
    notes: list[str] = []
    if nvml:
        notes.append(f"NVML: {min(nvml):.2f} to {max(nvml):.2f} GiB a process at the highest")
    charts = [
        Chart("memory peak of a step", "step", "GiB", [curve for curve in memory if curve.xs], notes=notes),
        Chart("time of a step", "step", "ms", [_over_steps("", data, lambda point: point.host_ms)]),
    ]
    shown = [chart for chart in charts if any(curve.xs for curve in chart.curves)]
    return Section(data.name, facts, shown, _phases(data.ranks))


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
    measured = [rank for rank in ranks if rank.steps]
    names = list(dict.fromkeys(name for rank in measured for name in rank.phases))
    if not measured:
        return []
    lines = [["phase", "peak, lowest rank", "median", "highest", "time, lowest", "median", "highest"]]
    for name in names:
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
    rate = price if price is not None else (plan.budget.price_per_hour if plan else None)
    used = results.seconds_used()
    facts = [
        ("sweep file", results.header.source),
        ("host", results.header.host),
        ("steps", f"{results.header.steps} after {results.header.warm_up} of warm-up"),
        ("runs", f"{len(rows)} of {len(pooled)} configurations"),
        ("time", duration(used)),
    ]
    if rate is not None:
        facts.append(("cost", f"{used / 3600 * rate:,.2f} at {rate:,.2f} an hour"))
    charts = _sweep_charts(rows, axis, curves(pooled, axis)) if axis else []
    drawn = {note for chart in charts for note in chart.notes}
    notes = [line for line in result_lines(rows, plan) if line not in drawn]
    return Section(data.name, facts, charts, table(pooled, plan.columns if plan else ()) if pooled else [], notes)


def _sweep_charts(rows: Sequence[Row], axis: str, fitted: Sequence[MeasuredCurve]) -> list[Chart]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if _whole(row, axis) is not None:
            groups.setdefault(key_of(_others(row, axis)), []).append(row)
    peaks: list[Curve] = []
    memory: list[Curve] = []
    times: list[Curve] = []
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
        for title, figure in (("reserved", _reserved), ("NVML", _nvml)):
            curve = _of_ranks(f"{name} {title}".strip(), done, axis, figure)
            memory += [curve] if any(curve.high) else []
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


def _csv(data: CsvData) -> Section:
    charts: list[Chart] = []
    for figure in data.mapping.figures:
        found = bands(data.measurements, figure)
        xs = [float(band.length) for band in found]
        low = [band.lowest / GIB for band in found]
        median = [band.median / GIB for band in found]
        high = [band.highest / GIB for band in found]
        notes: list[str] = []
        if len(found) > 1:
            fitted = pieces({band.length: {WHOLE_STEP: band.highest} for band in found})
            notes.append(f"highest rank: {describe_curve(fitted, unit_of(data.mapping.length))}")
        title = "memory peak" if figure.startswith("allocated") else f"{figure} memory"
        curve = Curve(figure, xs, low, median, high)
        charts.append(Chart(title, _x_name(data.mapping.length), "GiB", [curve], notes=notes))
    ranks = counted(len({one.rank for one in data.measurements}), "rank")
    lengths = [one.length for one in data.measurements]
    facts = [
        ("measurements", f"{len(data.measurements):,} of {ranks}, {min(lengths):,} to {max(lengths):,}"),
        ("columns", ", ".join(f"{name} = {column}" for name, column in data.mapping.figures.items())),
        ("unit", data.mapping.unit),
    ]
    return Section(data.name, facts, charts)


def _reserved(rank: RankRow) -> float:
    return rank.reserved_peak_bytes / GIB


def _nvml(rank: RankRow) -> float:
    return rank.nvml_bytes / GIB


def _others(row: Row, axis: str) -> Settings:
    return {name: value for name, value in row.settings.items() if name != axis}


def _whole(row: Row, axis: str) -> int | None:
    value = row.settings.get(axis)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _x_name(axis: str) -> str:
    """Return the axis's name; sequence lengths have one name, independent of a file's name for them."""
    name = axis.rpartition(".")[2]
    return "sequence length" if name.lower() in _LENGTHS else name
