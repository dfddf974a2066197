"""One line a rank, for more ranks than cards fit: state, a small graph, figures, phase shares, health."""

from collections.abc import Sequence
from typing import NamedTuple

from .card import state_words
from .figures import gib
from .line import Line, cut
from .look import Look
from .memory_graph import Column, Scale, memory_graph
from .phase_bar import phase_bar
from .rank_view import RankView

NARROWEST = 76
"""Cells a row takes at the least; two rows stand side by side from twice that on."""


class Parts(NamedTuple):
    """Widths of a row's parts, in cells."""

    label: int
    graph: int
    figures: int
    phases: int


def parts(width: int) -> Parts:
    """Divide a row's width."""
    label, figures = 14, 21
    rest = max(20, width - label - figures)
    phases = min(44, max(18, rest * 2 // 5))
    return Parts(label, rest - phases, figures, phases)


def label(view: RankView, width: int, look: Look, selected: bool) -> Line:
    """Draw rank number and state."""
    glyph, tone = look.state(view.state)
    mark = look.glyphs.selected if selected else " "
    line = Line(mark, look.style("accent")).add(
        f"{view.rank:>4} ", look.style("accent" if selected else "text", bold=selected)
    )
    line.add(glyph + " ", look.style(tone))
    if view.in_trouble:
        line.add(cut(state_words(view), width - line.width - 1), look.style(tone, bold=True))
    elif view.spikes:
        line.add(f"{look.glyphs.spike} {view.spikes}", look.style("warning"))
    elif view.state != "training":
        line.add(cut(view.state, width - line.width - 1), look.style("dim"))
    return line.fit(width, look.base)


def graph(columns: Sequence[Column | None], width: int, scale: Scale, look: Look) -> Line:
    """Draw a memory graph one row high, without the peak's line, which would hide it."""
    return memory_graph(columns, width - 1, 1, Scale(scale.top), look)[0].pad(width, look.base)


def figures(view: RankView, width: int, look: Look) -> Line:
    """Draw allocated, peak and what is behind, in GiB, in fixed places."""
    line = Line(f"{gib(view.allocated):>6}", look.base)
    line.add(f"{gib(view.peak):>7}", look.style("peak")).add(f"{gib(view.behind):>7}", look.style("dim"))
    return line.fit(width, look.base)


def last(view: RankView, width: int, look: Look) -> Line:
    """Draw the phase shares, and util and temperature where there is room; for a rank in trouble, what it does."""
    if view.in_trouble and view.text:
        return Line(cut(view.text, width - 1, look.glyphs.ellipsis), look.style(look.state(view.state)[1])).fit(
            width, look.base
        )
    tail = Line()
    if width >= 30 and view.utilization is not None and view.temperature is not None:
        tail.add(f" {view.utilization:>3.0f} % {view.temperature:>3.0f} {look.glyphs.degree} ", look.style("dim"))
    return phase_bar(view.shares, width - tail.width - 1, look).add(" ", look.base).join(tail)


def heading(widths: Parts, view: RankView | None, look: Look) -> list[Line]:
    """Draw the column heads of each part."""
    solid, behind = view.words if view else ("alloc", "rsvd")
    style = look.style("dim")
    return [
        Line("  rank state", style).fit(widths.label, look.base),
        Line("memory", style).fit(widths.graph, look.base),
        Line(f"{solid:>6}{'peak':>7}{behind[:6]:>7}", style).fit(widths.figures, look.base),
        Line("phases of the last step", style).fit(widths.phases, look.base),
    ]
