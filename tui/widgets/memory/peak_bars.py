"""Draws the composition of each rank's peak as stacked bars: wide for a few ranks, a column each for hundreds."""

from collections.abc import Sequence

from ....protocol.text import sanitize
from ...model.waterfall import LABELS, RankBar
from ..drawing.figures import gib
from ..drawing.line import Line
from ..drawing.theme import Theme
from ..state.view_models import nice_top

PART_FILLS = {
    "parameters": "P",
    "gradients": "G",
    "optimizer_states": "O",
    "master_copies": "M",
    "partitions": "Z",
    "buckets": "B",
    "activations": "A",
    "temporaries": "T",
    "other": "o",
    "unattributed": "?",
    "untraced": "?",
    "unused": "-",
}
"""Characters of the parts without colour."""

_AXIS = 8
_WIDEST = 20


def peak_bars(
    bars: Sequence[RankBar], phase: str, selected: int, capacity: int, width: int, height: int, theme: Theme
) -> list[Line]:
    """Draw the bars with an axis at the left, the ranks below, and the parts' colours at the bottom.

    An empty ``phase`` is each rank's highest. ``capacity``: of the smallest device, bytes, for the text; 0: not known.
    """
    groups = grouped(bars, max(1, width - _AXIS - 1))
    legend = _legend(bars, width, theme)
    rows = max(1, height - len(legend) - 3)
    extent = max((sum(size for _, size in bar.parts) for bar in bars), default=0)
    top = nice_top(extent)
    cell = max(1, min(_WIDEST, (width - _AXIS) // len(groups)))
    gap = 1 if cell >= 3 else 0
    fills = [_fill(_shown(group), top, rows, theme.plain_graphs) for group in groups]
    lines: list[Line] = [_scale_line(phase, top, capacity, bars, groups, theme)]
    for row in range(rows - 1, -1, -1):
        lines.append(_row(fills, row, rows, cell - gap, gap, top, theme))
    lines.append(_ranks_line(groups, selected, cell, theme))
    lines.append(_figures_line(groups, selected, cell, theme))
    return [*lines, *legend][:height]


def grouped(bars: Sequence[RankBar], columns: int) -> list[Sequence[RankBar]]:
    """Return ranks in at most ``columns`` groups of neighbours, all but the last of equal size."""
    size = max(1, -(-len(bars) // max(1, columns)))
    return [bars[at : at + size] for at in range(0, len(bars), size)]


def _shown(group: Sequence[RankBar]) -> RankBar:
    """Return the representative of a group: the rank with the highest peak."""
    return max(group, key=lambda bar: bar.peak)


def _fill(bar: RankBar, top: int, rows: int, plain: bool) -> list[tuple[str, int, int]]:
    """Return part, first and last eighth of a row, from the bottom up."""
    found: list[tuple[str, int, int]] = []
    at = total = 0
    for name, size in bar.parts:
        total += size
        end = round(total / top * rows * 8) if top else 0
        end = round(end / 8) * 8 if plain else end
        if end > at:
            found.append((name, at, end))
            at = end
    return found


def _row(
    fills: Sequence[list[tuple[str, int, int]]], row: int, rows: int, cell: int, gap: int, top: int, theme: Theme
) -> Line:
    marked = row in (rows - 1, rows // 2, 0)
    value = top * (row + 1) / rows if row else 0
    line = Line(f"{gib(value, True) if marked and value else '0' if marked else '':>{_AXIS - 2}} ", theme.style("dim"))
    line.add(theme.glyphs.bar, theme.style("rule"))
    for parts in fills:
        inside = [part for part in parts if part[1] < row * 8 + 8 and part[2] > row * 8]
        _cells(line, inside, row, cell, theme)
        line.add(" " * gap, theme.base)
    return line


def _cells(line: Line, inside: list[tuple[str, int, int]], row: int, cell: int, theme: Theme) -> None:
    if not inside:
        line.add(" " * cell, theme.base)
        return
    if theme.plain_graphs:
        line.add(PART_FILLS.get(inside[0][0], "?") * cell, theme.base)
        return
    largest = sorted(inside, key=lambda part: -(min(part[2], row * 8 + 8) - max(part[1], row * 8)))[:2]
    lower = min(largest, key=lambda part: part[1])
    upper = next((part for part in largest if part is not lower), None)
    end = min(8, lower[2] - row * 8)
    if end >= 8:
        line.add(" " * cell, theme.style("text", theme.part(lower[0])))
        return
    behind = theme.part(upper[0]) if upper is not None else "background"
    line.add(theme.glyphs.eighths[max(1, end)] * cell, theme.style(theme.part(lower[0]), behind))


def _scale_line(
    phase: str,
    top: int,
    capacity: int,
    bars: Sequence[RankBar],
    groups: Sequence[Sequence[RankBar]],
    theme: Theme,
) -> Line:
    line = Line(f" {sanitize(phase, 16) or 'highest phase'}", theme.style(bold=True))
    steps = {bar.step for bar in bars}
    line.add(f" of step {min(steps):,}", theme.style("dim"))
    line.add(f" to {max(steps):,}" if len(steps) > 1 else "", theme.style("dim"))
    line.add(f", 0 to {gib(top, True)} GiB", theme.style("dim"))
    line.add(f" (the device has {gib(capacity)})" if capacity else "", theme.style("dim"))
    if len(groups) < len(bars):
        line.add(f"; a column: the highest of {len(groups[0])} ranks", theme.style("warning"))
    return line


def _ranks_line(groups: Sequence[Sequence[RankBar]], selected: int, cell: int, theme: Theme) -> Line:
    line = Line(" " * (_AXIS - 1) + theme.glyphs.cross, theme.style("rule"))
    every = max(1, -(-5 // cell)) if cell < 4 else 1
    written = 0
    for index, group in enumerate(groups):
        chosen = any(bar.rank == selected for bar in group)
        at = _AXIS + index * cell
        if line.width > at:
            continue
        line.pad(at, theme.base)
        text = f"{theme.glyphs.selected if chosen else ''}{group[0].rank}"
        if chosen or index - written >= every or index == 0:
            fitted = text if len(text) < cell or cell < 4 else text[:cell]
            line.add(fitted, theme.style("accent" if chosen else "dim", bold=chosen))
            written = index
    return line


def _figures_line(groups: Sequence[Sequence[RankBar]], selected: int, cell: int, theme: Theme) -> Line:
    """Draw each peak below its bar if that fits, else the selected rank's and the extremes as text."""
    bars = [bar for group in groups for bar in group]
    if cell >= 6 and len(groups) == len(bars):
        line = Line(f"{'GiB':>{_AXIS - 2}}  ", theme.style("dim"))
        for bar in bars:
            chosen = bar.rank == selected
            line.add(gib(bar.peak, True)[: cell - 1].ljust(cell), theme.style("peak" if chosen else "dim", bold=chosen))
        return line
    line = Line(" ", theme.base)
    mine = next((bar for bar in bars if bar.rank == selected), None)
    if mine is not None:
        line.add(f"rank {mine.rank} ", theme.style("accent", bold=True))
        line.add(f"{gib(mine.peak)} in {mine.phase}", theme.style("peak"))
    low, high = min(bars, key=lambda bar: bar.peak), max(bars, key=lambda bar: bar.peak)
    line.add(
        f"   highest rank {high.rank} {gib(high.peak)}   lowest rank {low.rank} {gib(low.peak)} GiB", theme.style("dim")
    )
    return line


def _legend(bars: Sequence[RankBar], width: int, theme: Theme) -> list[Line]:
    """Draw the names of the existing parts with their colours, in as many lines as they need."""
    names = dict.fromkeys(name for bar in bars for name, _ in bar.parts)
    order = [name for name in PART_FILLS if name in names] + [name for name in names if name not in PART_FILLS]
    lines = [Line(" ", theme.base)]
    for name in order:
        label = "unused but reserved" if name == "unused" else LABELS.get(name, name)
        if lines[-1].width + len(label) + 5 > width:
            lines.append(Line(" ", theme.base))
        if theme.plain_graphs:
            lines[-1].add(PART_FILLS.get(name, "?") * 2, theme.style(bold=True))
        else:
            lines[-1].add("  ", theme.style("text", theme.part(name)))
        lines[-1].add(f" {label}  ", theme.style("dim"))
    return lines
