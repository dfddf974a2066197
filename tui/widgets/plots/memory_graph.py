"""Draws the memory graph: allocated solid, reserved in a lighter tone behind it, capacity at the top, the peak a line.

A character cell has two colours, and block characters fill it from below in eighths. So the background is the tone of
reserved memory in the cell where allocated memory ends, and the screen's in the cell where reserved memory ends. Both
boundaries are drawn to an eighth of a row unless they fall into the same cell.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rich.style import Style

from ..drawing.line import Line
from ..drawing.theme import Theme


class Column(NamedTuple):
    """One column of the graph: the highest figures, in bytes, of a fixed span of time."""

    allocated: int
    reserved: int
    """The figure behind: reserved memory on a GPU, the resident set on a CPU."""
    mark: str = ""
    """Severity of an alert in the column; a ``spike`` colours it too."""
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


def memory_graph(columns: Sequence[Column | None], width: int, height: int, scale: Scale, theme: Theme) -> list[Line]:
    """Draw the newest ``width`` columns, right-aligned, as ``height`` lines from top to bottom. None: no data."""
    shown = list(columns[-width:])
    shown = [None] * (width - len(shown)) + shown
    tops = [_reach(column, scale.top, height) for column in shown]
    peak_row = (eighths(scale.peak, scale.top, height) - 1) // 8 if 0 < scale.peak <= scale.top else -1
    draw = _plain_cell if theme.plain_graphs else _colour_cell
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


def _reach(column: Column | None, top: int, height: int) -> tuple[int, int, str, bool]:
    if column is None:
        return 0, 0, "", False
    solid, behind = eighths(column.allocated, top, height), eighths(column.reserved, top, height)
    return solid, behind, column.mark, column.spike


def _mark_style(allocated: int, reserved: int, tone: str, theme: Theme) -> Style:
    if allocated >= 4:
        return theme.style("on_color", tone, bold=True)
    return theme.style(tone, "reserved" if reserved >= 4 else "background", bold=True)


def _colour_cell(allocated: int, reserved: int, spike: bool, at_peak: bool, theme: Theme) -> tuple[str, Style]:
    """Draw one cell from both parts' heights above its bottom, in eighths."""
    blocks = theme.glyphs.eighths
    solid, back = ("warning", "spike_behind") if spike else ("allocated", "reserved")
    if allocated >= 8:
        # A blank on a coloured background: a full block leaves seams in some fonts.
        return " ", theme.style("text", solid)
    if allocated > 0:
        behind = reserved >= 8 or (reserved - allocated) * 2 >= 8 - allocated
        return blocks[allocated], theme.style(solid, back if behind else "background")
    if reserved >= 8:
        return (theme.glyphs.peak, theme.style("peak", back)) if at_peak else (" ", theme.style("text", back))
    if reserved > 0:
        return blocks[reserved], theme.style(back)
    return (theme.glyphs.peak, theme.style("peak")) if at_peak else (" ", theme.base)


def _plain_cell(allocated: int, reserved: int, spike: bool, at_peak: bool, theme: Theme) -> tuple[str, Style]:
    """Draw one cell with characters alone, for terminals without colour or block characters."""
    del spike
    glyphs = theme.glyphs
    if allocated > 0:
        return glyphs.eighths[min(8, allocated)], theme.style("allocated")
    if reserved > 0:
        return glyphs.reserved, theme.style("allocated")
    return (glyphs.peak, theme.style("peak")) if at_peak else (" ", theme.base)
