"""Draws the card of one rank: title in the rule, memory graph, figures, phase shares, the device's health."""

from collections.abc import Sequence

from ....protocol.text import duration, sanitize
from ..drawing.figures import gib, step_time
from ..drawing.line import Line, fitting, spread, width_of
from ..drawing.theme import Theme
from ..drawing.wrapping import wrap
from ..plots.memory_graph import Column, Scale, memory_graph
from ..plots.phase_bar import SHORT, phase_bar
from ..state.rank_view import RankView

FIXED_LINES = 4
"""Lines of a card besides its graph: title, figures, phases, health."""


def card(
    view: RankView,
    columns: Sequence[Column | None],
    width: int,
    height: int,
    scale: Scale,
    theme: Theme,
    selected: bool,
) -> list[Line]:
    """Draw a card of ``width`` x ``height`` cells (at least 30 x 6)."""
    inner = width - 2
    lines = [title(view, width, theme, selected)]
    body = memory_graph(columns, inner, max(1, height - FIXED_LINES), scale, theme)
    body += [figures(view, inner, theme), *foot(view, inner, theme)]
    margin = theme.base
    lines.extend(Line(" ", margin).join(line).fit(width, margin) for line in body)
    return lines


def title(view: RankView, width: int, theme: Theme, selected: bool) -> Line:
    """Draw the rule above a card, with the rank's name at its left and its state at its right."""
    rule = theme.style("accent" if selected else "rule")
    glyph, tone = theme.state(view.state)
    dash = theme.glyphs.rule
    left = Line(theme.glyphs.selected if selected else dash, rule).add(" ", theme.base)
    left.add(glyph, theme.style(tone)).add(" ", theme.base)
    left.add(name(view, theme), theme.style("accent" if selected else "text", bold=True)).add(" ", theme.base)
    right = Line()
    if view.spikes:
        right.add(f" {theme.glyphs.spike} {view.spikes}", theme.style("warning")).add(" ", theme.base)
    if view.state != "training":
        right.add(" " + state_words(view), theme.style(tone, bold=view.in_trouble)).add(" ", theme.base)
    right.add(dash, rule)
    gap = max(0, width - left.width - right.width)
    return spread(left.add(dash * gap, rule), right, width, theme.base)


def name(view: RankView, theme: Theme) -> str:
    """Return a rank's name: ``GPU 0 · rank 0``, with its host if there are several."""
    parts = [view.device, f"rank {view.rank}", view.host]
    return f" {theme.glyphs.dot} ".join(part for part in parts if part)


def state_words(view: RankView) -> str:
    """Return a state and how long it has lasted: ``hung 34 s``."""
    if view.in_trouble and view.state_seconds is not None and view.state_seconds >= 1:
        return f"{view.state} {duration(int(view.state_seconds))}"
    return view.state


def figures(view: RankView, width: int, theme: Theme) -> Line:
    """Draw allocated, peak, and reserved (on the CPU resident) memory, in GiB."""
    solid, behind = view.words
    parts = ((solid, view.allocated, "text"), ("peak", view.peak, "peak"), (behind, view.behind, "dim"))
    line = Line()
    for short, gap in ((False, "  "), (True, "  "), (True, " ")):
        line = Line()
        for word, value, tone in parts:
            line.add(f"{gap if line.width else ''}{word} ", theme.style("dim"))
            line.add(gib(value, short) if value else "-", theme.style(tone))
        line.add(" GiB", theme.style("dim"))
        if line.width <= width:
            break
    share = f"{view.share * 100:.0f} %" if view.capacity else ""
    right = Line(share, theme.style("dim"))
    phase = sanitize(view.peak_phase, 12)
    for name in (phase, SHORT.get(phase, phase)) if phase and share else ():
        words = f"peak in {name} {theme.glyphs.dot} {share}"
        if line.width + len(words) < width - 3:
            right = Line(words, theme.style("dim"))
            break
    return (
        spread(line, right, width, theme.base) if line.width + right.width < width - 1 else line.fit(width, theme.base)
    )


def foot(view: RankView, width: int, theme: Theme) -> list[Line]:
    """Draw phase shares and health in two lines; a problem with a longer text uses both."""
    if view.in_trouble and width_of(view.text) + 2 > width:
        glyph, tone = theme.state(view.state)
        style = theme.style(tone)
        first, *rest = wrap(view.text, width - 2)
        second = theme.cut(" ".join(rest), width - 2)
        return [Line(f"{glyph} {first}", style), Line(f"  {second}", style)]
    return [phase_bar(view.shares, width, theme), health(view, width, theme)]


def health(view: RankView, width: int, theme: Theme) -> Line:
    """Draw utilisation, power and temperature; for a rank with a problem its text instead."""
    if view.in_trouble or (view.text and view.state in ("starting", "failed")):
        glyph, tone = theme.state(view.state)
        return Line(theme.cut(f"{glyph} {view.text or view.state}", width), theme.style(tone)).fit(width, theme.base)
    right = Line()
    if view.throttled:
        right.add(f"{theme.glyphs.warning} {view.throttled}", theme.style("warning"))
    elif view.step_seconds is not None:
        right.add(f"{step_time(view.step_seconds)}/step", theme.style("dim"))
    line = Line(health_words(view, width - right.width, theme), theme.style("dim"))
    return spread(line, right, width, theme.base)


def health_words(view: RankView, width: int, theme: Theme) -> str:
    """Return utilisation, power and temperature, or the host's of a rank on the CPU, as far as they fit."""
    words: list[str] = []
    label = "util" if view.measure == "cuda" else "host CPU"
    if view.utilization is not None:
        words.append(f"{label} {view.utilization:.0f} %")
    if view.power is not None:
        words.append(f"{view.power:.0f} W")
    if view.temperature is not None:
        words.append(f"{view.temperature:.0f} {theme.glyphs.degree}")
    if view.host_memory is not None:
        used, total = view.host_memory
        words.append(f"RAM {used / 2**30:.1f}/{total / 2**30:.0f} GiB")
    return fitting(words, "  ", width)
