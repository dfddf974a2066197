"""Draws a sparkline of one row, for figures without a natural maximum (the loss, a step's time)."""

from collections.abc import Sequence

from ..drawing.line import Line
from ..drawing.theme import Theme


def spark(values: Sequence[float | None], width: int, theme: Theme, tone: str = "accent") -> Line:
    """Draw the newest values, oldest left, scaled to their own range; None and NaN leave a gap."""
    shown = pool_mean(values, width)
    known = [value for value in shown if value is not None]
    line = Line()
    style = theme.style(tone)
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
    pooled: list[float | None] = []
    for index in range(width):
        part = [v for v in known[index * len(known) // width : (index + 1) * len(known) // width] if v is not None]
        pooled.append(sum(part) / len(part) if part else None)
    return pooled
