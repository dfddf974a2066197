"""Draws a plot without axes as cells of a known size, by plotext (imported at the first plot).

Columns span the window's coordinates, so a cursor and marks can be drawn over the cells.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.text import Text

from ...plotext_figure import draw, new_figure, rows
from ..drawing.line import Line
from ..drawing.theme import Theme

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
"""A character and its tone."""


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
        # One colour per curve identifies it in plotext's output, also without colour or with equal tones on screen.
        color = (number + 1, 0, 0)
        tones[f"#{number + 1:02x}0000"] = curve.tone
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
