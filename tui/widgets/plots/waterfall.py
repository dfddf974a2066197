"""Draws the waterfall: composition of a peak, one row per part, each bar starting at the end of the one above."""

from ....protocol.analysis.estimates.live import FLOOR_BYTES
from ....protocol.messages.prediction import PredictedPhase
from ...model.waterfall import Waterfall
from ..drawing.figures import gib_fixed, mib_fixed
from ..drawing.line import Line
from ..drawing.theme import Theme

_LABEL = 23
_FIGURE = 8
_PREDICTED = 11
_DIFFERENCE = 10
_SMALL = 2**30
"""A waterfall of a smaller extent is in MiB."""


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

    def beside(size: int, predicted: int | None) -> Line:
        """Draw the prediction of a row and the difference to it; blanks without a prediction."""
        if expected is None:
            return Line()
        if predicted is None:
            return Line(" " * (_PREDICTED + _DIFFERENCE), theme.base)
        by = size - predicted
        line = Line(f"{size_words(fall, predicted):>{_PREDICTED}}", theme.style("dim"))
        tone = "warning" if abs(by) > allowed else "dim"
        size_text = size_words(fall, abs(by))
        sign = "" if not size_text.strip("0.") else "+" if by > 0 else theme.glyphs.minus
        return line.add(f"{sign + size_text:>{_DIFFERENCE}}", theme.style(tone))

    def row(
        label: str, size: int | None, begin: int, tone: str, bold: bool = False, predicted: int | None = None
    ) -> Line:
        figure = "-" if size is None else size_words(fall, size)
        more = beside(size or 0, predicted)
        return _row(label, figure, begin, size or 0, fall.extent, width, theme, tone, bold, more)

    lines: list[Line] = []
    if expected is not None:
        head = f"{unit_of(fall):>{_LABEL + _FIGURE}}{'predicted':>{_PREDICTED}}{'difference':>{_DIFFERENCE + 1}}"
        lines.append(Line(head, theme.style("dim")).add(f"   {warning}" if warning else "", theme.style("warning")))
    by_part = expected.parts if expected is not None and fall.taken_apart else {}
    for part in fall.parts:
        known = by_part.get(part.name, 0) if by_part else None
        line = row(part.label, part.bytes, part.begin, theme.part(part.name), predicted=known)
        if part.name == "temporaries" and part.bytes and note:
            line = _beside(line, note, part.begin + part.bytes, fall.extent, width, theme, figures)
        lines.append(line)
    on_cpu = fall.measure == "glibc"
    total = expected.allocated_peak_bytes if expected is not None else None
    lines.append(row("resident" if on_cpu else "allocated", fall.peak, 0, "allocated", bold=True, predicted=total))
    if on_cpu:
        return lines
    at = fall.peak
    outside = (
        ("unused but reserved", fall.unused, "unused"),
        ("CUDA context, NCCL", fall.context, "context"),
        ("other processes", fall.others, "others"),
    )
    for label, size, name in outside:
        lines.append(row(label, size, at, theme.part(name)))
        at += size or 0
    lines.append(used_line(fall, width, theme))
    return lines


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
    line.add(f" of {size_words(fall, fall.total)} {unit_of(fall)}", theme.style("dim"))
    if fall.total:
        line.add(f"   {fall.used / fall.total * 100:.0f} %", theme.style("dim"))
    if abs(fall.since) > 0.01 * fall.used:
        words = "grew" if fall.since > 0 else "shrank"
        line.add(f"   reserved {words} {size_words(fall, abs(fall.since))} since", theme.style("dim"))
    if fall.unexplained is not None:
        much = abs(fall.unexplained) > 0.01 * fall.used
        line.add("   unexplained ", theme.style("dim"))
        line.add(size_words(fall, fall.unexplained), theme.style("warning" if much else "dim"))
    return line.fit(width, theme.base) if line.width > width else line


def _row(
    label: str,
    figure: str,
    begin: int,
    length: int,
    extent: int,
    width: int,
    theme: Theme,
    tone: str,
    bold: bool,
    more: Line,
) -> Line:
    style = theme.style("text" if length else "dim", bold=bold)
    line = Line(f" {theme.cut(label, _LABEL - 2):<{_LABEL - 1}}", style)
    line.add(f"{figure:>{_FIGURE}}" + ("" if more.width else "  "), style)
    if more.width:
        line.join(more).add("  ", theme.base)
    return line.join(bar(begin, length, max(1, extent), width - line.width - 1, theme, tone))


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
    """Add words after a bar, or before it, if they fit."""
    text = f"{theme.glyphs.spike} {note}"
    after = figures + 4 + int(end / extent * (width - figures - 2))
    if after + len(text) < width:
        return line.fit(after, theme.base).add(text, theme.style("warning"))
    made = Line()
    for index, (piece, style) in enumerate(line.parts):
        # The gap between the figure and the bar is one piece of blanks.
        if (
            index
            and not made.plain.endswith(text)
            and piece.isspace()
            and style == theme.base
            and len(piece) > len(text) + 2
        ):
            made.add(" " * (len(piece) - len(text) - 1), style).add(text, theme.style("warning")).add(" ", style)
        else:
            made.add(piece, style)
    return made
