"""Draws the bar of a replay, or of a rewound live run: state, speed, time, a track with alerts, step, keys."""

import time as clock
from dataclasses import dataclass

from ..drawing.line import Line
from ..drawing.theme import Theme


@dataclass(frozen=True, slots=True)
class Playback:
    """Position of a replay; times are seconds since the epoch."""

    first: float
    last: float
    now: float
    playing: bool
    speed: float
    step: int = 0
    live: bool = False
    """Whether the run is live, so that the bar shows the key that returns to it."""
    seeking: bool = False
    marks: tuple[tuple[float, str], ...] = ()
    """(time, severity) of every alert."""


def time_of_day(seconds: float) -> str:
    """Format a moment as ``10:12:03``, local time."""
    try:
        return clock.strftime("%H:%M:%S", clock.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "??:??:??"


def speed_words(speed: float) -> str:
    """Format a speed: ``4x``, ``0.25x``."""
    return f"{speed:g}x"


def scrubber(playback: Playback, width: int, theme: Theme) -> Line:
    """Draw the bar."""
    glyphs, dim, base = theme.glyphs, theme.style("dim"), theme.base
    at_end = playback.now >= playback.last and not playback.live
    word = "end" if at_end else f"{speed_words(playback.speed):<5}"
    left = Line(" ", base).add(
        glyphs.play if playback.playing and not at_end else glyphs.pause, theme.style("accent", bold=True)
    )
    left.add(f" {word} ", theme.style("accent")).add(time_of_day(playback.now) + " ", theme.style(bold=True))
    right = Line(f" {time_of_day(playback.last)}", dim)
    right.add(f"   step {playback.step:,}", base)
    if playback.live:
        right.add(f"   {glyphs.live} live: L", theme.style("good"))
    right.add(" ", base)
    return left.join(track(playback, max(4, width - left.width - right.width), theme)).join(right).fit(width, base)


def track(playback: Playback, width: int, theme: Theme) -> Line:
    """Draw the track with the alerts and the knob."""
    glyphs = theme.glyphs
    length = max(1e-9, playback.last - playback.first)

    def cell(at: float) -> int:
        return max(0, min(width - 1, int((at - playback.first) / length * width)))

    marks: dict[int, str] = {}
    order = {"info": 0, "warning": 1, "error": 2}
    for at, severity in playback.marks:
        if order.get(severity, 0) >= order.get(marks.get(cell(at), "info"), 0):
            marks[cell(at)] = severity
    knob = cell(playback.now)
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
