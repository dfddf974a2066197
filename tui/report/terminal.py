"""Renders a report as lines of text, with charts by plotext."""

from collections.abc import Iterator

from ...protocol.analysis.sweep.text import aligned
from ...protocol.text import sanitize
from ..plotext_figure import draw, new_figure, rows
from .model import Chart, Report, Section

_HEIGHT = 16
_MARKERS = "*o+x#@%&"


def lines(report: Report, width: int, *, ascii_only: bool = False) -> Iterator[str]:
    """Yield the lines of a report, charts ``width`` columns wide."""
    for section in report.sections:
        yield from _section(section, width, ascii_only)


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
    highest = 0.0
    for number, curve in enumerate(chart.curves):
        marker = _MARKERS[number % len(_MARKERS)]
        several = len(chart.curves) > 1 or ascii_only
        style = marker if several else "braille"
        if curve.predicted and not ascii_only:
            style = "braille"
        draw(figure, curve.xs, curve.median, style, line=True)
        if curve.has_band:
            draw(figure, curve.xs, curve.low, "-", line=False)
            draw(figure, curve.xs, curve.high, "-", line=False)
        sign = f"{style if len(style) == 1 else '⠒'} " if several else ""
        legend.append(f"{sign}{curve.name or 'median rank'}")
        highest = max(highest, *curve.high, 0.0)
    figure.ruler("y").lim(0, highest * 1.05 or 1.0)
    xs = sorted({x for curve in chart.curves for x in curve.xs})
    ticks = _ticks(xs)
    figure.ruler("x").ticks(ticks, [f"{x:,.0f}" for x in ticks])
    yield f"{chart.title}, {chart.unit}, by {chart.x_name}"
    if any(curve.has_band for curve in chart.curves):
        legend.append("- lowest and highest rank")
    yield from _packed([sanitize(name, 300) for name in legend], width - 2)
    for row in rows(figure, plain=True):
        text = row.rstrip()
        yield text.translate(_ASCII) if ascii_only else text
    words = [f"{text} at {', '.join(f'{x:,.0f}' for x, one in chart.marks if one == text)}" for text in _kinds(chart)]
    if words:
        yield f"  {sanitize('; '.join(words), 300)}"
    for note in chart.notes:
        yield f"  {sanitize(note, 500)}"


def _packed(names: list[str], width: int) -> Iterator[str]:
    """Yield indented lines of as many names as fit in each."""
    line = names[0]
    for name in names[1:]:
        if len(line) + 3 + len(name) > width:
            yield f"  {line}"
            line = name
        else:
            line += f"   {name}"
    yield f"  {line}"


_ASCII = str.maketrans("┌┐└┘│─┤├┬┴┼", "++++|-+++++")


def _kinds(chart: Chart) -> list[str]:
    return list(dict.fromkeys(text for _, text in chart.marks))


def _ticks(xs: list[float]) -> list[float]:
    """Return the values nearest to the quarters of the axis; a tick between values could not be labelled."""
    quarters = [xs[0] + (xs[-1] - xs[0]) * part / 4 for part in range(5)] if xs else []
    return sorted({min(xs, key=lambda x: abs(x - quarter)) for quarter in quarters})
