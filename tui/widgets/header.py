"""Draws the two lines at the top of every screen, and the bar of a replay or of a rewound live run."""

import time as clock
from dataclasses import dataclass

from ...protocol.analysis.words import percent
from ...protocol.messages.control import Severity
from ...protocol.text import duration
from ..model.alerts import SEVERITIES
from ..source.base import Transport
from .drawing import Line, Theme, beside, count, gib, loss, spread, step_time
from .plots import spark

WITH_EVALUATION = 92


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a run at one moment; seconds, bytes; None: not known."""

    name: str
    state: str = "starting"
    trouble: str = ""  # trouble of ranks in a few words, such as `1 hung, 3 waiting`
    job: int = 0  # number of the job if the run has several, else 0
    activity: str = ""  # current activity other than steps, shown instead of the run's state: `evaluation 12/40`
    step: int = 0
    total_steps: int | None = None
    epochs: str = ""  # finished and planned epochs, shown if there is room: `1.25 / 3`
    seconds_left: float | None = None
    stalled_seconds: int | None = None  # seconds for which ranks have blocked the run; None while it makes progress
    ended: str = ""
    loss: float | None = None
    losses_by_name: tuple[tuple[str, float], ...] = ()
    losses: tuple[float, ...] = ()
    evaluation_loss: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    step_seconds: float | None = None
    peak: int = 0
    capacity: int = 0
    predicted: int = 0  # predicted peak, with that batch, of the phase with the highest peak; 0: not known
    parted: bool = False  # whether peak and prediction differ by more than the prediction's expected error
    setup: str = ""  # Parameters, ZeRO stage, ranks; shown if there is room
    connection: str = ""


def summary_lines(summary: Summary, width: int, theme: Theme) -> list[Line]:
    """Draw both lines."""
    return [first_line(summary, width, theme), second_line(summary, width, theme)]


def first_line(summary: Summary, width: int, theme: Theme) -> Line:
    """Draw name, state, step and time left; a wide line also shows the setup.

    In a narrow line trouble is kept: the name is cut, then the time left is omitted, then the word of the state. If the
    run makes no progress, that word is omitted before the time.
    """
    base = theme.base
    progress = _progress(summary, theme)
    both = beside([progress, _time(summary, theme)], "    ", base).add(" ", base)
    epochs = Line("epoch ", theme.style("dim")).add(summary.epochs, base) if summary.epochs else Line()
    whole = beside([progress, epochs, _time(summary, theme)], "    ", base).add(" ", base)
    left, right = Line(), both
    for name_width, brief, right in (
        (max(12, width // 4), False, whole),
        (max(12, width // 4), False, both),
        (12, False, both),
        *(((12, True, both), (8, True, both)) if summary.stalled_seconds is not None else ()),
        (12, False, progress),
        (8, True, progress),
    ):
        left = _name_and_state(summary, name_width, width - right.width - 1 if brief else 0, theme)
        if left.width + right.width < width:
            break
    if summary.setup and left.width + right.width + len(summary.setup) + 8 < width:
        left.add("   ", base).add(summary.setup, theme.style("dim"))
    return spread(left, right, width, base)


def _name_and_state(summary: Summary, name_width: int, room: int, theme: Theme) -> Line:
    base = theme.base
    left = Line(" ", base).add("ftmon", theme.style("accent", bold=True)).add("  ", base)
    left.add(theme.cut(summary.name, name_width), theme.style(bold=True)).add("   ", base)
    glyph, tone = theme.state(summary.state)
    trouble = Line()
    if summary.connection:
        words = f"{theme.glyphs.warning} {summary.connection}"
        trouble.add(theme.cut(words, room - left.width) if room else words, theme.style("warning"))
    elif summary.trouble:
        trouble.add(f"{theme.glyphs.error} {summary.trouble}", theme.style("error", bold=True))
    if not room or not trouble.width:
        left.add(f"{glyph} {summary.activity or summary.state}", theme.style(tone, bold=summary.state == "failed"))
        left.add("  " if trouble.width else "", base)
    return left.join(trouble)


def _progress(summary: Summary, theme: Theme) -> Line:
    dim = theme.style("dim")
    progress = Line(f"job {summary.job}  step " if summary.job else "step ", dim)
    progress.add(f"{summary.step:,}", theme.style(bold=True))
    return progress.add(f" / {summary.total_steps:,}" if summary.total_steps else "", dim)


def _time(summary: Summary, theme: Theme) -> Line:
    if summary.ended:
        return Line(summary.ended, theme.style("dim"))
    if summary.stalled_seconds is not None:
        return Line(f"stalled {duration(summary.stalled_seconds)}", theme.style("error"))
    if summary.seconds_left is None:
        return Line()
    words = f"{duration(summary.seconds_left)} left" if summary.seconds_left >= 1 else "ending"
    return Line(words, theme.base)


def _peak(summary: Summary, words: str, theme: Theme, predicted: bool = False) -> Line:
    dim = theme.style("dim")
    if not summary.peak:
        return Line()
    line = Line(words, dim).add(gib(summary.peak), theme.style("peak", bold=True))
    if predicted and summary.predicted:
        share = (summary.peak - summary.predicted) / summary.predicted
        line.add(f" (predicted {gib(summary.predicted)}, ", dim)
        line.add(percent(share), theme.style("warning" if summary.parted else "dim")).add(")", dim)
    return line.add(f" / {gib(summary.capacity)} GiB ", dim)


def second_line(summary: Summary, width: int, theme: Theme) -> Line:
    """Draw the loss with its sparkline, throughput, step time and the highest peak relative to capacity."""
    dim, base = theme.style("dim"), theme.base
    peak = _peak(summary, "highest peak " if width >= 76 else "peak ", theme)
    rates = (
        (summary.tokens_per_second, lambda speed: f"{count(speed)} ", "tok/s"),
        (summary.mfu, lambda share: f"{share * 100:.0f} % ", "MFU"),
        (summary.step_seconds, step_time, "/step"),
    )
    known = [Line(form(value), base).add(unit, dim) for value, form, unit in rates if value is not None]
    left = Line(" loss ", dim)
    if len(summary.losses_by_name) > 1:
        for name, value in summary.losses_by_name[: 2 if width < 120 else 4]:
            left.add(f"{theme.cut(name, 12)} ", dim).add(loss(value), theme.style(bold=True)).add(" ", base)
    else:
        left.add(loss(summary.loss) if summary.loss is not None else "not yet", theme.style(bold=True)).add(" ", base)
        if summary.evaluation_loss is not None and width >= WITH_EVALUATION:
            left.add("eval ", dim).add(loss(summary.evaluation_loss), theme.style(bold=True)).add(" ", base)
    shortest = _peak(summary, "peak ", theme)
    while len(known) > 1 and left.width + 3 + beside(known, "  ", base).width + shortest.width > width:
        known.pop()
    middle = beside(known, "  ", base)
    around = left.width + 3 + middle.width + 2
    whole = _peak(summary, "highest peak ", theme, predicted=True)
    if summary.predicted and around + whole.width + 8 <= width:
        peak = whole
    elif around + peak.width > width:
        peak = shortest
    room = width - left.width - middle.width - peak.width - 6
    if summary.losses and room >= 4:
        left.join(spark(summary.losses, min(room, max(12, width // 4)), theme))
    left.add("   ", base).join(middle)
    return spread(left, peak, width, base)


def time_of_day(seconds: float) -> str:
    """Format a moment as ``10:12:03``, local time."""
    try:
        return clock.strftime("%H:%M:%S", clock.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "??:??:??"


def scrubber(transport: Transport, step: int, width: int, theme: Theme) -> Line:
    """Draw the bar; of a live run with the key that returns to it."""
    glyphs, dim, base = theme.glyphs, theme.style("dim"), theme.base
    live = transport.mode != "replay"
    at_end = transport.at_end and not live
    word = "end" if at_end else f"{f'{transport.speed:g}x':<5}"
    sign = glyphs.play if transport.playing and not at_end else glyphs.pause
    left = Line(" ", base).add(sign, theme.style("accent", bold=True))
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
        past = (glyphs.track_past, "accent") if index < knob else (glyphs.track, "faint")
        glyph, tone = theme.severity(marks[index]) if index in marks else past
        glyph, tone = (glyphs.knob, "accent") if index == knob else (glyph, tone)
        line.add(glyph, theme.style(tone, bold=index == knob))
    return line
