"""Draws the pictures: step charts, memory graph, phase bar, bands, plots, sparkline, waterfall."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Literal, NamedTuple

from rich.style import Style
from rich.text import Text

from ...protocol.analysis.estimates.time import FLOOR_BYTES
from ...protocol.messages.memory import PredictedPhase
from ..model.snapshot import Band
from ..model.waterfall import Waterfall
from ..plotext_figure import draw, new_figure, rows
from .drawing import Line, Theme, gib_fixed, mib_fixed


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
    if theme.glyphs.is_ascii:
        return ["*", "o", "."], ["*", "o", "."]
    return (["braille"] * 3, ["━", "━", "━"]) if theme.color else (["braille", "+", "x"], ["⠶", "+", "x"])


def _plot(chart: Chart, width: int, height: int, theme: Theme) -> list[Line]:
    figure = new_figure(width - 1, height)
    figure.axes(False)
    markers = _markers(theme)[0]
    tones: dict[str, str] = {}
    for index, series in enumerate(chart.series):
        color = _number_color(index, series.tone, tones) if theme.color else None
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
    cells = (_cells(row, width - 1, tones) for row in rows(figure)[:height])
    return [Line(" ", theme.style("dim")).join(row_line(row, theme)) for row in cells]


def _tick(value: float, high: float) -> str:
    return f"{value:.0f}" if high >= 100 else f"{value:.1f}" if high >= 10 else f"{value:.2f}"


class Column(NamedTuple):
    """One column of the graph: the highest figures, in bytes, of a fixed span of time."""

    allocated: int
    reserved: int  # the figure behind: reserved memory on a GPU, the resident set on a CPU
    mark: str = ""  # severity of an alert in the column; a `spike` colours it too
    spike: bool = False


class Scale(NamedTuple):
    """Scale of a graph: bytes at its top edge, and the run's peak in bytes, drawn as a line (0: none)."""

    top: int
    peak: int = 0


def eighths(count: float, top: float, height: int) -> int:
    """Convert bytes to eighths of a row, at least one unless zero, at most the whole height."""
    if count <= 0 or top <= 0:
        return 0
    return max(1, min(height * 8, round(count / top * height * 8)))


def memory_graph(
    columns: Sequence[Column | None], width: int, height: int, scale: Scale, theme: Theme, tone: str = "allocated"
) -> list[Line]:
    """Draw the newest ``width`` columns, right-aligned, as ``height`` lines from top to bottom. None: no data.

    ``tone``: of allocated memory, where there are colours.
    """
    shown = [column or Column(0, 0) for column in columns[-width:]]
    shown = [Column(0, 0)] * (width - len(shown)) + shown
    reach = partial(eighths, top=scale.top, height=height)
    tops = [(reach(each.allocated), reach(each.reserved), each.mark, each.spike) for each in shown]
    peak_row = (eighths(scale.peak, scale.top, height) - 1) // 8 if 0 < scale.peak <= scale.top else -1
    draw = _plain_cell if theme.plain_graphs else partial(_colour_cell, tone)
    lines: list[Line] = []
    for row in range(height - 1, -1, -1):
        line = Line()
        for allocated, reserved, mark, spike in tops:
            if mark and row == min(height - 1, (max(allocated, reserved) + 7) // 8):
                glyph, tone = theme.severity(mark)
                line.add(glyph, _mark_style(allocated - row * 8, reserved - row * 8, tone, theme))
            else:
                char, style = draw(allocated - row * 8, reserved - row * 8, spike, row == peak_row, theme)
                line.add(char, style)
        lines.append(line)
    return lines


def _mark_style(allocated: int, reserved: int, tone: str, theme: Theme) -> Style:
    if allocated >= 4:
        return theme.style("on_color", tone, bold=True)
    return theme.style(tone, "reserved" if reserved >= 4 else "background", bold=True)


def _colour_cell(
    tone: str, allocated: int, reserved: int, spike: bool, at_peak: bool, theme: Theme
) -> tuple[str, Style]:
    # A character cell has two colours, and block characters fill it from below in eighths. So the background is the
    # tone of reserved memory in the cell where allocated memory ends, and the screen's in the cell where reserved
    # memory ends. Both boundaries are drawn to an eighth of a row unless they fall into the same cell.
    blocks = theme.glyphs.eighths
    solid, back = ("warning", "spike_behind") if spike else (tone, "reserved")
    if allocated >= 8:
        # A blank on a coloured background: a full block leaves seams in some fonts.
        return " ", theme.style("text", solid)
    if allocated > 0:
        behind = reserved >= 8 or (reserved - allocated) * 2 >= 8 - allocated
        return blocks[allocated], theme.style(solid, back if behind else "background")
    if 0 < reserved < 8:
        return blocks[reserved], theme.style(back)
    ground = back if reserved > 0 else "background"
    return (theme.glyphs.peak, theme.style("peak", ground)) if at_peak else (" ", theme.style("text", ground))


def _plain_cell(allocated: int, reserved: int, spike: bool, at_peak: bool, theme: Theme) -> tuple[str, Style]:
    del spike
    glyphs = theme.glyphs
    if allocated > 0:
        return glyphs.eighths[min(8, allocated)], theme.style("allocated")
    if reserved > 0:
        return glyphs.reserved, theme.style("allocated")
    return (glyphs.peak, theme.style("peak")) if at_peak else (" ", theme.base)


SHORT = {name: name for name in ("init", "data", "eval", "idle", "wait", "other")} | {
    "generate": "gen", "forward": "fwd", "backward": "bwd", "optimizer": "opt", "checkpoint": "ckpt",
}  # fmt: skip
"""Short names of phases; ``wait`` is time inside collective calls, subtracted from the phases it fell in."""

FILLS = {"data": ".", "generate": "+", "forward": "-", "backward": "=", "optimizer": "#", "wait": "~"}


def phase_bar(shares: Sequence[tuple[str, float]], width: int, theme: Theme) -> Line:
    """Draw the bar ``width`` cells wide. ``shares`` are (phase, share 0..1) in drawing order, their sum at most 1."""
    line = Line()
    for (name, share), cells in zip(shares, cells_of([share for _, share in shares], width), strict=True):
        if not cells:
            continue
        # Without colour the last cell of a part is its edge.
        label = _label(name, share, cells - 1 if theme.plain_graphs and cells > 1 else cells)
        if theme.plain_graphs:
            filled = (label.strip() if cells > 1 else "") + FILLS.get(name, "_") * cells
            edge = cells > 1 and line.width + cells < width
            line.add(filled[: cells - 1] + "|" if edge else filled[:cells], theme.base)
        else:
            line.add(label.ljust(cells), theme.style("on_color", theme.phase(name)))
    return line.fit(width, theme.base)


def cells_of(shares: Sequence[float], width: int) -> list[int]:
    """Divide ``width`` cells by shares: at least one cell for half a percent or more, with the same sum."""
    exact = [share * width for share in shares]
    cells = [max(1 if share >= 0.005 else 0, int(value)) for share, value in zip(shares, exact, strict=True)]
    target = min(width, round(sum(exact)))
    while sum(cells) < target:
        index = max(range(len(cells)), key=lambda i: exact[i] - cells[i])
        cells[index] += 1
    while sum(cells) > target and any(count > 1 for count in cells):
        index = min((i for i, count in enumerate(cells) if count > 1), key=lambda i: exact[i] - cells[i])
        cells[index] -= 1
    return cells


def _label(name: str, share: float, cells: int) -> str:
    short = SHORT.get(name, name)
    percent = f"{share * 100:.0f}"
    initial = short[:1] if name in FILLS else ""
    candidates = (f" {short} {percent} % ", f"{short} {percent}", short, initial)
    return next((text for text in candidates if len(text) <= cells), "")


def band_row(bands: Sequence[Band], column_of: Callable[[int], int], width: int, theme: Theme) -> Line:
    """Draw the bands over ``width`` columns.

    The bands are in order, without overlap. ``column_of`` returns an entry's column, also beyond the edges.
    """
    owner = [-1] * width
    for number, band in enumerate(bands):
        begin, end = max(0, column_of(band.first)), min(width - 1, column_of(band.last))
        for column in range(begin, end + 1):
            owner[column] = number
    line = Line()
    for number, columns in groupby(owner):
        cells = sum(1 for _ in columns)
        if number < 0:
            line.add(" " * cells, theme.base)
        else:
            _band(line, bands[number], number, cells, theme)
    return line


def _band(line: Line, band: Band, number: int, cells: int, theme: Theme) -> None:
    short = SHORT.get(band.phase, "") if band.phase else ""
    label = next((text for text in (f" {band.name} ", band.name, short) if text and len(text) <= cells), "")
    if not label and not band.phase and cells > 3:
        label = theme.cut(band.name, cells)
    if theme.plain_graphs:
        fill = FILLS.get(band.phase, "_" if number % 2 else "~")
        line.add((label.strip() + fill * cells)[: cells - 1] + "|" if cells > 1 else fill, theme.base)
    elif band.phase:
        line.add(label.ljust(cells), theme.style("on_color", theme.phase(band.phase)))
    else:
        line.add(label.ljust(cells), theme.style("text", "raised" if number % 2 else "rule"))


Kind = Literal["points", "line", "marks"]
"""``points``: single dots; ``line``: a line, thick without colour; ``marks``: a sign for each value."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over coordinates."""

    kind: Kind
    tone: str
    xs: Sequence[float]
    ys: Sequence[float]


Cell = tuple[str, str]


def sign_of(kind: Kind, theme: Theme) -> str:
    """Return the sign of a kind of curve, for legends."""
    if theme.glyphs.is_ascii:
        return {"points": ".", "line": "*", "marks": "o"}[kind]
    return {"points": "⠢", "line": "━" if theme.color else "▀", "marks": "◆"}[kind]


def plot_cells(
    curves: Sequence[Curve], width: int, height: int, xs: tuple[float, float], ys: tuple[float, float], theme: Theme
) -> list[list[Cell]]:
    """Return curves as ``height`` rows of ``width`` cells; values beyond the range of ``ys`` are at its edge."""
    figure = new_figure(width, height)
    figure.axes(False)
    low, high = xs if xs[1] > xs[0] else (xs[0] - 0.5, xs[0] + 0.5)
    tones: dict[str, str] = {}
    for number, curve in enumerate(curves):
        if not curve.xs:
            continue
        color = _number_color(number, curve.tone, tones)
        values = [min(max(value, ys[0]), ys[1]) for value in curve.ys]
        marker = sign_of(curve.kind, theme) if theme.glyphs.is_ascii or curve.kind == "marks" else None
        is_line = curve.kind == "line"
        marker = marker or ("hd" if is_line and not theme.color else "braille")
        draw(figure, curve.xs, values, marker, line=is_line, color=color)
    for axis, limits in (("x", (low, high)), ("y", ys)):
        figure.ruler(axis).lim(*limits)
        figure.ruler(axis).ticks([], [])
    cells = [_cells(row, width, tones) for row in rows(figure)[:height]]
    return cells + [[(" ", "dim")] * width for _ in range(height - len(cells))]


def _number_color(number: int, tone: str, tones: dict[str, str]) -> tuple[int, int, int]:
    """Return a colour that identifies a curve in plotext's output, and add its tone to ``tones``.

    Colours on screen may be equal, or there are none.
    """
    tones[f"#{number + 1:02x}0000"] = tone
    return number + 1, 0, 0


def _cells(ansi: str, width: int, tones: dict[str, str]) -> list[Cell]:
    text = Text.from_ansi(ansi)
    cells: list[Cell] = [(character, "dim") for character in text.plain[:width]]
    cells += [(" ", "dim")] * (width - len(cells))
    for span in text.spans:
        color = getattr(span.style, "color", None)
        tone = tones.get(color.triplet.hex) if color is not None and color.triplet else None
        if tone is not None:
            for place in range(span.start, min(span.end, width)):
                cells[place] = (cells[place][0], tone)
    return cells


def put_cursor(rows: list[list[Cell]], column: int, theme: Theme) -> None:
    """Draw a vertical line through the empty cells of a column."""
    for row in rows:
        if 0 <= column < len(row) and row[column][0] in (" ", "⠀"):
            row[column] = (theme.glyphs.bar, "faint")


def row_line(cells: Sequence[Cell], theme: Theme) -> Line:
    """Return cells as a line."""
    line = Line()
    for character, tone in cells:
        line.add(character, theme.style(tone))
    return line


def spark(values: Sequence[float | None], width: int, theme: Theme) -> Line:
    """Draw the newest values, oldest left, scaled to their own range; None and NaN leave a gap."""
    shown = pool_mean(values, width)
    known = [value for value in shown if value is not None]
    line = Line()
    style = theme.style("accent")
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    for value in shown:
        level = 0 if value is None else 1 + round((value - low) / (high - low) * 7) if high > low else 4
        line.add(theme.glyphs.eighths[level], style)
    return line.pad(width, style) if not known else line


def pool_mean(values: Sequence[float | None], width: int) -> list[float | None]:
    """Return at most ``width`` means of neighbours; a group without a known value is None."""
    known = [value if value is not None and value == value else None for value in values]
    if len(known) <= width or width <= 0:
        return known
    groups = (known[index * len(known) // width : (index + 1) * len(known) // width] for index in range(width))
    parts = ([value for value in group if value is not None] for group in groups)
    return [sum(part) / len(part) if part else None for part in parts]


_LABEL = 23
_FIGURE = 8
_PREDICTED = 11
_DIFFERENCE = 10
_OUTSIDE = (("unused but reserved", "unused"), ("CUDA context, NCCL", "context"), ("other processes", "others"))
_SMALL = 2**30


def unit_of(fall: Waterfall) -> str:
    """Return the unit of a waterfall's figures."""
    return "GiB" if fall.extent >= _SMALL else "MiB"


def size_words(fall: Waterfall, size: float) -> str:
    """Format a size in the waterfall's unit."""
    return gib_fixed(size) if unit_of(fall) == "GiB" else mib_fixed(size)


def waterfall_lines(
    fall: Waterfall,
    width: int,
    theme: Theme,
    note: str = "",
    expected: PredictedPhase | None = None,
    error: float = 0.0,
    warning: str = "",
) -> list[Line]:
    """Draw the rows.

    ``note`` describes the temporaries, beside their bar if there is room. ``expected`` is drawn in extra columns;
    ``error`` is its expected error, a share, and ``warning`` a text in their head.
    """
    allowed = max(FLOOR_BYTES, error * expected.allocated_peak_bytes) if expected is not None else 0.0
    figures = _LABEL + _FIGURE + (0 if expected is None else _PREDICTED + _DIFFERENCE)

    def row(label: str, size: int | None, begin: int, tone: str, bold: bool = False, known: int | None = None) -> Line:
        style = theme.style("text" if size else "dim", bold=bold)
        line = Line(f" {theme.cut(label, _LABEL - 2):<{_LABEL - 1}}", style)
        figure = "-" if size is None else size_words(fall, size)
        more = _compared(fall, size or 0, known, allowed, theme) if expected is not None else Line()
        line.add(f"{figure:>{_FIGURE}}" + ("" if more.width else "  "), style)
        if more.width:
            line.join(more).add("  ", theme.base)
        return line.join(bar(begin, size or 0, max(1, fall.extent), width - line.width - 1, theme, tone))

    lines: list[Line] = []
    if expected is not None:
        head = f"{unit_of(fall):>{_LABEL + _FIGURE}}{'predicted':>{_PREDICTED}}{'difference':>{_DIFFERENCE + 1}}"
        lines.append(Line(head, theme.style("dim")).add(f"   {warning}" if warning else "", theme.style("warning")))
    by_part = expected.parts if expected is not None and fall.taken_apart else {}
    for part in fall.parts:
        known = by_part.get(part.name, 0) if by_part else None
        line = row(part.label, part.bytes, part.begin, theme.part(part.name), known=known)
        if part.name == "temporaries" and part.bytes and note:
            line = _beside(line, note, part.begin + part.bytes, fall.extent, width, theme, figures)
        lines.append(line)
    on_cpu = fall.measure == "glibc"
    total = expected.allocated_peak_bytes if expected is not None else None
    lines.append(row("resident" if on_cpu else "allocated", fall.peak, 0, "allocated", bold=True, known=total))
    at = fall.peak
    for label, name in () if on_cpu else _OUTSIDE:
        size = getattr(fall, name)
        lines.append(row(label, size, at, theme.part(name)))
        at += size or 0
    return lines if on_cpu else [*lines, used_line(fall, width, theme)]


def _compared(fall: Waterfall, size: int, predicted: int | None, allowed: float, theme: Theme) -> Line:
    if predicted is None:
        return Line(" " * (_PREDICTED + _DIFFERENCE), theme.base)
    by = size - predicted
    line = Line(f"{size_words(fall, predicted):>{_PREDICTED}}", theme.style("dim"))
    size_text = size_words(fall, abs(by))
    sign = "" if not size_text.strip("0.") else "+" if by > 0 else theme.glyphs.minus
    return line.add(f"{sign + size_text:>{_DIFFERENCE}}", theme.style("warning" if abs(by) > allowed else "dim"))


def used_line(fall: Waterfall, width: int, theme: Theme) -> Line:
    """Draw NVML's used and total memory, and the part that no row explains."""
    line = Line(f" {'used (NVML)':<{_LABEL - 1}}", theme.style(bold=True))
    if fall.used is None:
        line.add(f"{'-':>{_FIGURE}}", theme.style("dim"))
        words = "  NVML has not been asked yet, or does not answer"
        if fall.ended:
            words = "  the rank has ended: go back in time to see it"
        return line.add(theme.cut(words, width - line.width), theme.style("dim"))
    line.add(f"{size_words(fall, fall.used):>{_FIGURE}}", theme.style(bold=True))
    words = f" of {size_words(fall, fall.total)} {unit_of(fall)}"
    words += f"   {fall.used / fall.total * 100:.0f} %" if fall.total else ""
    if abs(fall.since) > 0.01 * fall.used:
        words += f"   reserved {'grew' if fall.since > 0 else 'shrank'} {size_words(fall, abs(fall.since))} since"
    line.add(words, theme.style("dim"))
    if fall.unexplained is not None:
        much = abs(fall.unexplained) > 0.01 * fall.used
        line.add("   unexplained ", theme.style("dim"))
        line.add(size_words(fall, fall.unexplained), theme.style("warning" if much else "dim"))
    return line.fit(width, theme.base) if line.width > width else line


def bar(begin: int, length: int, extent: int, width: int, theme: Theme, tone: str) -> Line:
    """Draw a bar from ``begin`` over ``length`` on a scale of ``extent``, as ``width`` cells; both ends to an eighth.

    The smallest length is drawn as an eighth of a cell.
    """
    if length <= 0 or width <= 0:
        return Line(" " * max(0, width), theme.base)
    first = round(begin / extent * width * 8)
    last = max(first + 1, round((begin + length) / extent * width * 8))
    first, last = min(first, width * 8 - 1), min(last, width * 8)
    if theme.plain_graphs:
        return _plain_bar(first, last, width, theme)
    across = theme.glyphs.across
    line = Line(" " * (first // 8), theme.base)
    cell = first // 8
    if first % 8:
        end = min(8, last - cell * 8)
        if end == 8:
            # The left part of this cell is background, the rest the bar: a left block in the background's colour.
            line.add(across[first % 8], theme.style("background", tone))
        else:
            line.add(across[max(1, end - first % 8)], theme.style(tone))
        cell += 1
    full = max(0, last // 8 - cell)
    line.add(" " * full, theme.style("text", tone))
    cell += full
    if last % 8 and cell * 8 < last:
        line.add(across[last % 8], theme.style(tone))
        cell += 1
    return line.pad(width, theme.base)


def _plain_bar(first: int, last: int, width: int, theme: Theme) -> Line:
    begin, end = first // 8, max(first // 8 + 1, round(last / 8))
    full = theme.glyphs.across[-1]
    return Line(" " * begin, theme.base).add(full * (end - begin), theme.base).pad(width, theme.base)


def _beside(line: Line, note: str, end: int, extent: int, width: int, theme: Theme, figures: int) -> Line:
    text = f"{theme.glyphs.spike} {note}"
    after = figures + 4 + int(end / extent * (width - figures - 2))
    if after + len(text) < width:
        return line.fit(after, theme.base).add(text, theme.style("warning"))
    made = Line()
    for index, (piece, style) in enumerate(line.parts):
        # The gap between the figure and the bar is one piece of blanks.
        gap = piece.isspace() and style == theme.base and len(piece) > len(text) + 2
        if index and gap and not made.plain.endswith(text):
            made.add(" " * (len(piece) - len(text) - 1), style).add(text, theme.style("warning")).add(" ", style)
        else:
            made.add(piece, style)
    return made
