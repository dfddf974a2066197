"""The card of one rank: its title in the rule above, the memory graph, figures, phase shares, the device's health."""

import textwrap
from collections.abc import Sequence

from ...protocol.text import duration, sanitize
from .figures import gib, step_time
from .line import Line, cut, spread, width_of
from .memory_graph import Column, Scale, memory_graph
from .phase_bar import SHORT, phase_bar
from .rank_view import RankView
from .theme import Theme

FIXED_LINES = 4
"""Lines of a card besides its graph: title, figures, phases, health."""


def card(
    view: RankView, columns: Sequence[Column | None], width: int, height: int, scale: Scale, look: Theme, selected: bool
) -> list[Line]:
    """Draw a card of ``width`` x ``height`` cells (at least 30 x 6)."""
    inner = width - 2
    lines = [title(view, width, look, selected)]
    body = memory_graph(columns, inner, max(1, height - FIXED_LINES), scale, look)
    body += [figures(view, inner, look), *foot(view, inner, look)]
    margin = look.base
    lines.extend(Line(" ", margin).join(line).fit(width, margin) for line in body)
    return lines


def title(view: RankView, width: int, look: Theme, selected: bool) -> Line:
    """Draw the rule above a card, with the rank's name at its left and its state at its right."""
    rule = look.style("accent" if selected else "rule")
    glyph, tone = look.state(view.state)
    dash = look.glyphs.rule
    left = Line(look.glyphs.selected if selected else dash, rule).add(" ", look.base)
    left.add(glyph, look.style(tone)).add(" ", look.base)
    left.add(name(view, look), look.style("accent" if selected else "text", bold=True)).add(" ", look.base)
    right = Line()
    if view.spikes:
        right.add(f" {look.glyphs.spike} {view.spikes}", look.style("warning")).add(" ", look.base)
    if view.state != "training":
        right.add(" " + state_words(view), look.style(tone, bold=view.in_trouble)).add(" ", look.base)
    right.add(dash, rule)
    gap = width - left.width - right.width
    return left.add(dash * max(0, gap), rule).join(right).fit(width, look.base)


def name(view: RankView, look: Theme) -> str:
    """Name a rank: ``GPU 0 · rank 0``, with its host where there are several."""
    parts = [view.device, f"rank {view.rank}", view.host]
    return f" {look.glyphs.dot} ".join(part for part in parts if part)


def state_words(view: RankView) -> str:
    """Say a state and how long it has lasted: ``hung 34 s``."""
    if view.in_trouble and view.state_seconds is not None and view.state_seconds >= 1:
        return f"{view.state} {duration(int(view.state_seconds))}"
    return view.state


def figures(view: RankView, width: int, look: Theme) -> Line:
    """Draw allocated, peak and what is behind, in GiB."""
    solid, behind = view.words
    parts = ((solid, view.allocated, "text"), ("peak", view.peak, "peak"), (behind, view.behind, "dim"))
    line = Line()
    for short, gap in ((False, "  "), (True, "  "), (True, " ")):
        line = Line()
        for word, value, tone in parts:
            line.add(f"{gap if line.width else ''}{word} ", look.style("dim"))
            line.add(gib(value, short) if value else "-", look.style(tone))
        line.add(" GiB", look.style("dim"))
        if line.width <= width:
            break
    share = f"{view.share * 100:.0f} %" if view.capacity else ""
    right = Line(share, look.style("dim"))
    phase = sanitize(view.peak_phase, 12)
    for name in (phase, SHORT.get(phase, phase)) if phase and share else ():
        words = f"in {name} {look.glyphs.dot} {share}"
        if line.width + len(words) < width - 3:
            right = Line(words, look.style("dim"))
            break
    return spread(line, right, width, look.base) if line.width + right.width < width - 1 else line.fit(width, look.base)


def foot(view: RankView, width: int, look: Theme) -> list[Line]:
    """Draw phase shares and health in two lines; trouble that takes more than a line to tell takes both."""
    if view.in_trouble and width_of(view.text) + 2 > width:
        glyph, tone = look.state(view.state)
        style = look.style(tone)
        first, *rest = textwrap.wrap(sanitize(view.text), width - 2)
        second = cut(" ".join(rest), width - 2, look.glyphs.ellipsis)
        return [Line(f"{glyph} {first}", style), Line(f"  {second}", style)]
    return [phase_bar(view.shares, width, look), health(view, width, look)]


def health(view: RankView, width: int, look: Theme) -> Line:
    """Draw utilisation, power and temperature; of a rank in trouble, what it is doing instead."""
    if view.in_trouble or (view.text and view.state in ("starting", "failed")):
        glyph, tone = look.state(view.state)
        return Line(cut(f"{glyph} {view.text or view.state}", width, look.glyphs.ellipsis), look.style(tone)).fit(
            width, look.base
        )
    line = Line(health_words(view, look), look.style("dim"))
    right = Line()
    if view.throttled:
        right.add(f"{look.glyphs.warning} {view.throttled}", look.style("warning"))
    elif view.step_seconds is not None:
        right.add(f"{step_time(view.step_seconds)}/step", look.style("dim"))
    return spread(line, right, width, look.base)


def health_words(view: RankView, look: Theme) -> str:
    """Say utilisation, power and temperature, or the host's of a rank on the CPU."""
    words: list[str] = []
    label = "util" if view.measure == "cuda" else "host CPU"
    if view.utilization is not None:
        words.append(f"{label} {view.utilization:.0f} %")
    if view.power is not None:
        words.append(f"{view.power:.0f} W")
    if view.temperature is not None:
        words.append(f"{view.temperature:.0f} {look.glyphs.degree}")
    if view.host_memory is not None:
        used, total = view.host_memory
        words.append(f"RAM {used / 2**30:.1f}/{total / 2**30:.0f} GiB")
    return "  ".join(words)
