"""Draws a row of named bands below a timeline: phases in their colours, other spans in two alternating tones."""

from collections.abc import Callable, Sequence

from ...model.snapshot_bands import Band
from ..drawing.line import Line
from ..drawing.theme import Theme
from .phase_bar import FILLS, SHORT


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
    at = 0
    while at < width:
        number = owner[at]
        end = next((column for column in range(at, width) if owner[column] != number), width)
        if number < 0:
            line.add(" " * (end - at), theme.base)
        else:
            _band(line, bands[number], number, end - at, theme)
        at = end
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
