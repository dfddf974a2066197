"""Draws one line per rank if cards do not fit: state, a small graph, figures, phase shares, health."""

from collections.abc import Sequence
from typing import NamedTuple

from ..drawing.figures import gib
from ..drawing.line import Line, spread
from ..drawing.theme import Theme
from ..plots.memory_graph import Column, Scale, memory_graph
from ..plots.phase_bar import phase_bar
from ..state.rank_view import RankView
from .card import health_words, state_words

NARROWEST = 76
"""Minimum width of a row in cells; from twice that on there are two rows side by side."""


class Parts(NamedTuple):
    """Widths of a row's parts, in cells."""

    label: int
    graph: int
    figures: int
    phases: int


def parts(width: int) -> Parts:
    """Return the parts of a row of this width."""
    label, figures = 16, 21
    rest = max(20, width - label - figures)
    phases = min(44, max(20, rest * 2 // 5))
    return Parts(label, rest - phases, figures, phases)


def label(view: RankView, width: int, height: int, theme: Theme, selected: bool) -> list[Line]:
    """Draw rank number and state, and below them the device and the number of spikes."""
    glyph, tone = theme.state(view.state)
    line = Line(theme.glyphs.selected if selected else " ", theme.style("accent"))
    line.add(f"{view.rank:>3} ", theme.style("accent" if selected else "text", bold=True))
    line.add(glyph + " ", theme.style(tone))
    spikes = Line(f"{theme.glyphs.spike} {view.spikes} " if view.spikes else "", theme.style("warning"))
    if view.in_trouble or view.state != "training":
        line.add(
            theme.cut(state_words(view), width - line.width - 1),
            theme.style(tone, bold=view.in_trouble),
        )
    elif height == 1:
        line.join(spikes)
        if view.host:
            line.add(theme.cut(view.host, max(0, width - line.width - 1)), theme.style("dim"))
    below = Line(f"    {view.device} ", theme.style("dim")).join(spikes)
    if view.host and height > 1:
        below.add(theme.cut(view.host, max(0, width - below.width - 1)), theme.style("dim"))
    return fill([line, below], width, height, theme)


def graph(columns: Sequence[Column | None], width: int, height: int, scale: Scale, theme: Theme) -> list[Line]:
    """Draw a memory graph; in a single row without the peak's line, which would hide it. Tall rows have a gap above."""
    peak = scale.peak if height > 2 else 0
    gap = [Line(" " * width, theme.base)] if height > 2 else []
    lines = memory_graph(columns, width - 2, height - len(gap), Scale(scale.top, peak), theme)
    return [*gap, *(line.pad(width, theme.base) for line in lines)]


def figures(view: RankView, width: int, height: int, theme: Theme) -> list[Line]:
    """Draw allocated, peak, and reserved (resident) memory in GiB; below them the peak's share of the device."""
    line = Line(f"{_size(view.allocated):>6}", theme.base)
    line.add(f"{_size(view.peak):>7}", theme.style("peak")).add(f"{_size(view.behind):>7}", theme.style("dim"))
    share = f"{view.share * 100:>11.0f} %" if view.capacity else ""
    return fill([line, Line(share, theme.style("dim"))], width, height, theme)


def _size(count: int) -> str:
    return gib(count) if count else "-"


def last(view: RankView, width: int, height: int, theme: Theme) -> list[Line]:
    """Draw the phase shares, and the device's health below or beside them; for a rank in trouble its text."""
    trouble = Line(theme.cut(view.text, width - 1), theme.style(theme.state(view.state)[1]))
    in_trouble = view.in_trouble and bool(view.text)
    if height > 1:
        bar = phase_bar(view.shares, width - 1, theme)
        health = trouble if in_trouble else Line(health_words(view, width - 1, theme), theme.style("dim"))
        return fill([bar, health], width, height, theme)
    if in_trouble:
        return fill([trouble], width, height, theme)
    tail = Line()
    if width >= 30 and view.utilization is not None and view.temperature is not None:
        tail.add(f" {view.utilization:>3.0f} % {view.temperature:>3.0f} {theme.glyphs.degree} ", theme.style("dim"))
    return fill(
        [phase_bar(view.shares, width - tail.width - 1, theme).add(" ", theme.base).join(tail)], width, 1, theme
    )


def fill(lines: list[Line], width: int, height: int, theme: Theme) -> list[Line]:
    """Extend a row's part to ``height`` lines, with the text at the bottom, beside the graph's bottom."""
    shown = lines[:height]
    blank = [Line() for _ in range(height - len(shown))]
    return [line.fit(width, theme.base) for line in [*blank, *shown]]


def heading(widths: Parts, view: RankView | None, theme: Theme) -> list[Line]:
    """Draw the column heads of each part."""
    solid, behind = view.words if view else ("alloc", "rsvd")
    behind = {"resident": "rss"}.get(behind, behind)
    style = theme.style("dim")
    title = Line("memory" if widths.graph >= len("memory  GiB: ") else "", style)
    return [
        Line("rank state", style).fit(widths.label, theme.base),
        spread(title, Line("GiB: ", style) if title.width else Line(), widths.graph, theme.base),
        Line(f"{solid:>6}{'peak':>7}{behind:>7}", style).fit(widths.figures, theme.base),
        Line("shares of a step", style).fit(widths.phases, theme.base),
    ]
