"""Draws the heat map: a cell per rank, with colour and figure for peak memory, and a glyph for its state."""

from collections.abc import Sequence
from typing import NamedTuple

from ..drawing.figures import gib
from ..drawing.line import Line, spread
from ..drawing.theme import Theme
from ..state.rank_view import RankView
from .card import name, state_words

GROUP = 8
"""Ranks between gaps: the devices of a usual node."""

LABEL = 5
"""Cells of the rank number at the left of a row."""

_SIZES = sorted(
    ((width, height) for width in range(2, 10) for height in range(1, 5) if height * 1.5 < width or height == 1),
    key=lambda size: (size[0] * size[1], size[0]),
    reverse=True,
)
"""Cell sizes, the largest first."""


class Grid(NamedTuple):
    """Layout of the cells: ``width`` x ``height`` characters each, ``columns`` per row."""

    width: int
    height: int
    columns: int

    def rows(self, ranks: int) -> int:
        return -(-ranks // self.columns)


def plan(ranks: int, width: int, height: int) -> Grid:
    """Return the layout with the largest cells with which all ranks fit, else the smallest (the map then scrolls)."""
    grid = Grid(2, 1, GROUP)
    for cell_width, cell_height in _SIZES:
        groups = max(1, (width - LABEL + 1) // (GROUP * cell_width + 1))
        columns = min(groups * GROUP, -(-ranks // GROUP) * GROUP)
        if GROUP * cell_width + LABEL > width:
            continue
        grid = Grid(cell_width, cell_height, columns)
        if grid.rows(ranks) * cell_height <= height:
            break
    return grid


def heat_map(
    views: Sequence[RankView], grid: Grid, first_row: int, height: int, selected: int, theme: Theme
) -> list[Line]:
    """Draw rows of cells from ``first_row`` on, at most ``height`` lines. ``selected`` is an index into ``views``."""
    lines: list[Line] = []
    for row in range(first_row, grid.rows(len(views))):
        begin = row * grid.columns
        for part in range(grid.height):
            label = f"{views[begin].rank:>{LABEL - 1}} " if part == (grid.height - 1) // 2 else " " * LABEL
            line = Line(label, theme.style("dim"))
            for index in range(begin, min(begin + grid.columns, len(views))):
                if index > begin and (index - begin) % GROUP == 0:
                    line.add(" ", theme.base)
                _cell(line, views[index], grid, part, index == selected, theme)
            lines.append(line)
            if len(lines) == height:
                return lines
    return lines


def _cell(line: Line, view: RankView, grid: Grid, part: int, selected: bool, theme: Theme) -> None:
    inner = grid.width - 1
    middle = part == (grid.height - 1) // 2
    text = (_text(view, inner, theme) if middle else "").center(inner)
    sound = view.state == "training"
    if not theme.color:
        line.add(f"{text}<" if selected and middle else text + " ", theme.style(bold=not sound, reverse=selected))
        return
    ink, ground = _colors(view, theme)
    if selected:
        ink, ground = theme.palette.on_color, theme.palette.accent
    line.add(text, theme.style(ink, ground, bold=selected or not sound)).add(" ", theme.base)


def _text(view: RankView, width: int, theme: Theme) -> str:
    """Return the text that fits: a state's glyph, else percent of memory, in a narrow cell only its tens."""
    share = min(1.0, view.share)
    percent = f"{share * 100:.0f}" if view.peak else ""
    if view.state != "training":
        glyph = theme.state(view.state)[0]
        return f"{glyph} {percent}" if percent and width >= len(percent) + 2 else glyph
    if 1 < width >= len(percent):
        return percent
    return str(min(9, int(share * 10))) if view.peak else " "


def _colors(view: RankView, theme: Theme) -> tuple[str, str]:
    """Return foreground and background of a cell."""
    palette = theme.palette
    if view.state in ("finished", "starting"):
        return palette.dim, palette.raised
    if view.state != "training":
        return palette.on_color, theme.tone(theme.state(view.state)[1])
    if not view.peak:
        return palette.dim, palette.raised
    # The ramp departs from the background: the foreground changes where its contrast would end.
    deep = min(1.0, view.share) >= 0.45
    return (palette.on_color if deep else palette.text), theme.heat(view.share)


def chosen_line(view: RankView, width: int, theme: Theme) -> Line:
    """Draw the figures of the selected rank, and at the right the legend of colours."""
    glyph, tone = theme.state(view.state)
    line = Line(f" {theme.glyphs.selected} ", theme.style("accent")).add(f"{glyph} ", theme.style(tone))
    line.add(name(view, theme), theme.style("accent", bold=True))
    solid, behind = view.words
    words = f"  {solid} {gib(view.allocated)}  peak {gib(view.peak)}  {behind} {gib(view.behind)} GiB"
    line.add(words, theme.style("dim"))
    if view.state != "training":
        line.add(f"  {state_words(view)}", theme.style(tone, bold=True))
        line.add(f": {view.text}" if view.text else "", theme.style(tone))
    ramp = Line("peak 0 ", theme.style("dim"))
    if theme.color:
        for color in theme.palette.heat:
            ramp.add(" ", theme.style("text", color))
    else:
        ramp.add("0..9", theme.base)
    ramp.add(" 100 % ", theme.style("dim"))
    return spread(line, ramp, width, theme.base) if line.width + ramp.width < width else line
