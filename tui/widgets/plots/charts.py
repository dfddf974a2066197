"""Charts of a rank's steps, drawn by plotext (imported at the first chart) and coloured by the palette."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from ...plotext_figure import draw, new_figure, rows
from ..drawing.line import Line
from ..drawing.theme import Theme


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: its name, its tone, and its values over ``Chart.steps``."""

    name: str
    tone: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart over steps. ``unit``: of the y axis; ``floor``: whether the axis includes zero."""

    title: str
    unit: str
    steps: Sequence[int]
    series: Sequence[Series]
    floor: bool = False


def chart_lines(chart: Chart, width: int, height: int, theme: Theme) -> list[Line]:
    """Draw a chart of ``width`` x ``height`` cells: a title with the legend, then the plot."""
    head = Line(f" {chart.title}", theme.style("text", bold=True)).add(f", {chart.unit} ", theme.style("dim"))
    for index, series in enumerate(chart.series if len(chart.series) > 1 else ()):
        head.add(f"  {_markers(theme)[1][index]} ", theme.style(series.tone)).add(series.name, theme.style("dim"))
    if height < 4 or len(chart.steps) < 2:
        return [head, Line("   after two steps" if len(chart.steps) < 2 else "", theme.style("dim"))]
    return [head.fit(width, theme.base), *_plot(chart, width, height - 1, theme)]


def _markers(theme: Theme) -> tuple[list[str], list[str]]:
    """Return plotext's marker of each series, and its sign in the legend."""
    if theme.glyphs.is_ascii:
        return ["*", "o", "."], ["*", "o", "."]
    return (["braille"] * 3, ["━", "━", "━"]) if theme.color else (["braille", "+", "x"], ["⠶", "+", "x"])


def _plot(chart: Chart, width: int, height: int, theme: Theme) -> list[Line]:
    figure = new_figure(width - 1, height)
    figure.axes(False)
    markers = _markers(theme)[0]
    for index, series in enumerate(chart.series):
        color = _rgb(theme.tone(series.tone)) if theme.color else None
        draw(figure, chart.steps, series.values, markers[index], line=True, color=color)
    low = min(min(series.values) for series in chart.series)
    high = max(max(series.values) for series in chart.series)
    low = 0.0 if chart.floor else low
    margin = (high - low) * 0.05 or max(abs(high) * 0.05, 1e-3)
    y = figure.ruler("y")
    y.lim(low if chart.floor else low - margin, high + margin)
    ticks = [low + (high - low) * part / 3 for part in range(4)] if high > low else [high]
    y.ticks(ticks, [_tick(value, high) for value in ticks])
    first, last = chart.steps[0], chart.steps[-1]
    shown = sorted({first, *(round(first + (last - first) * part / 4) for part in range(1, 4)), last})
    figure.ruler("x").ticks(shown, [f"{step:,}" for step in shown])
    return [_line(row, width, theme) for row in rows(figure)[:height]]


def _tick(value: float, high: float) -> str:
    return f"{value:.0f}" if high >= 100 else f"{value:.1f}" if high >= 10 else f"{value:.2f}"


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def _line(ansi: str, width: int, theme: Theme) -> Line:
    """Return a row of plotext's output as a line: its colours on the theme's background, the rest dim."""
    text = Text.from_ansi(ansi)
    dim = theme.style("dim")
    line = Line()
    position = 0
    for span in sorted(text.spans, key=lambda each: each.start):
        line.add(text.plain[position : span.start], dim)
        color = getattr(span.style, "color", None)
        style = theme.style(color.triplet.hex) if color is not None and color.triplet and theme.color else theme.base
        line.add(text.plain[span.start : span.end], style if color is not None else dim)
        position = span.end
    line.add(text.plain[position:], dim)
    return Line(" ", dim).join(line).fit(width, theme.base)
