"""Draws the bar of a replay, or of a rewound live run: state, speed, time, a track with alerts, step, keys."""

import time as clock

from ....protocol.messages.control import Severity
from ...model.alerts import SEVERITIES
from ...source.transport import Transport
from ..drawing.line import Line
from ..drawing.theme import Theme


def time_of_day(seconds: float) -> str:
    """Format a moment as ``10:12:03``, local time."""
    try:
        return clock.strftime("%H:%M:%S", clock.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "??:??:??"


def speed_words(speed: float) -> str:
    """Format a speed: ``4x``, ``0.25x``."""
    return f"{speed:g}x"


def scrubber(transport: Transport, step: int, width: int, theme: Theme) -> Line:
    """Draw the bar; of a live run with the key that returns to it."""
    glyphs, dim, base = theme.glyphs, theme.style("dim"), theme.base
    live = transport.mode != "replay"
    at_end = transport.at_end and not live
    word = "end" if at_end else f"{speed_words(transport.speed):<5}"
    left = Line(" ", base).add(
        glyphs.play if transport.playing and not at_end else glyphs.pause, theme.style("accent", bold=True)
    )
    left.add(f" {word} ", theme.style("accent")).add(time_of_day(transport.position) + " ", theme.style(bold=True))
    right = Line(f" {time_of_day(transport.last)}", dim)
    right.add(f"   step {step:,}", base)
    if live:
        right.add(f"   {glyphs.live} live: L", theme.style("good"))
    right.add(" ", base)
    return left.join(track(transport, max(4, width - left.width - right.width), theme)).join(right).fit(width, base)


def track(transport: Transport, width: int, theme: Theme) -> Line:
    """Draw the track with the alerts and the knob."""
    glyphs = theme.glyphs
    length = max(1e-9, transport.last - transport.first)

    def cell(at: float) -> int:
        return max(0, min(width - 1, int((at - transport.first) / length * width)))

    marks: dict[int, Severity] = {}
    for mark in transport.marks:
        if SEVERITIES[mark.severity] >= SEVERITIES[marks.get(cell(mark.time), "info")]:
            marks[cell(mark.time)] = mark.severity
    knob = cell(transport.position)
    line = Line()
    for index in range(width):
        if index == knob:
            line.add(glyphs.knob, theme.style("accent", bold=True))
        elif index in marks:
            glyph, tone = theme.severity(marks[index])
            line.add(glyph, theme.style(tone))
        elif index < knob:
            line.add(glyphs.track_past, theme.style("accent"))
        else:
            line.add(glyphs.track, theme.style("faint"))
    return line
