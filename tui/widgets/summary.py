"""The two lines at the top of every screen: is it training, how far, how fast, and will it fit."""

from dataclasses import dataclass

from ...protocol.text import duration
from .figures import count, gib, loss, step_time
from .line import Line, beside, cut, spread
from .look import Look
from .spark import spark


@dataclass(frozen=True, slots=True)
class Summary:
    """The run at one moment; seconds, bytes; None: not known."""

    name: str
    state: str = "starting"
    text: str = ""
    trouble: str = ""
    """Trouble of ranks in a few words, such as ``1 hung, 3 waiting``."""
    step: int = 0
    total_steps: int | None = None
    seconds_left: float | None = None
    stalled_seconds: int | None = None
    """How long ranks have kept the run from going on; None while it goes on."""
    ended: str = ""
    """How the run ended, once it has."""
    loss: float | None = None
    losses: tuple[float, ...] = ()
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    peak: int = 0
    peak_rank: int | None = None
    capacity: int = 0
    model: str = ""
    setup: str = ""
    """Parameters, ZeRO stage, ranks: shown where there is room."""
    connection: str = ""
    """What is wrong with the source, such as ``the hub is gone: reconnecting``."""


def summary_lines(summary: Summary, width: int, look: Look) -> list[Line]:
    """Draw both lines."""
    return [first_line(summary, width, look), second_line(summary, width, look)]


def first_line(summary: Summary, width: int, look: Look) -> Line:
    """Draw name, state, step and time left; a wide line also says what is being trained.

    Where it is tight, trouble stays: the name is cut, then the time left goes, then the word of the state.
    """
    base = look.base
    progress = _progress(summary, look)
    both = beside([progress, _time(summary, look)], "    ", base).add(" ", base)
    left, right = Line(), both
    for name_width, brief, right in (
        (max(12, width // 4), False, both),
        (12, False, both),
        (12, False, progress),
        (8, True, progress),
    ):
        left = _name_and_state(summary, name_width, brief, look)
        if left.width + right.width < width:
            break
    if summary.setup and left.width + right.width + len(summary.setup) + 8 < width:
        left.add("   ", base).add(summary.setup, look.style("dim"))
    return spread(left, right, width, base)


def _name_and_state(summary: Summary, name_width: int, brief: bool, look: Look) -> Line:
    base = look.base
    left = Line(" ", base).add("ftmon", look.style("accent", bold=True)).add("  ", base)
    left.add(cut(summary.name, name_width, look.glyphs.ellipsis), look.style(bold=True)).add("   ", base)
    glyph, tone = look.state(summary.state)
    trouble = Line()
    if summary.connection:
        trouble.add(f"{look.glyphs.warning} {summary.connection}", look.style("warning"))
    elif summary.trouble:
        trouble.add(f"{look.glyphs.error} {summary.trouble}", look.style("error", bold=True))
    if not brief or not trouble.width:
        left.add(f"{glyph} {summary.state}", look.style(tone, bold=summary.state == "failed"))
        left.add("  " if trouble.width else "", base)
    return left.join(trouble)


def _progress(summary: Summary, look: Look) -> Line:
    dim = look.style("dim")
    progress = Line("step ", dim).add(f"{summary.step:,}", look.style(bold=True))
    return progress.add(f" / {summary.total_steps:,}" if summary.total_steps else "", dim)


def _time(summary: Summary, look: Look) -> Line:
    if summary.ended:
        return Line(summary.ended, look.style("dim"))
    if summary.stalled_seconds is not None:
        return Line(f"stalled {duration(summary.stalled_seconds)}", look.style("error"))
    if summary.seconds_left is None:
        return Line()
    words = f"{duration(summary.seconds_left)} left" if summary.seconds_left >= 1 else "ending"
    return Line(words, look.base)


def second_line(summary: Summary, width: int, look: Look) -> Line:
    """Draw the loss with its sparkline, throughput, step time and the highest peak against capacity."""
    dim, base = look.style("dim"), look.base
    peak = Line()
    if summary.peak:
        peak.add("highest peak " if width >= 76 else "peak ", dim).add(gib(summary.peak), look.style("peak", bold=True))
        peak.add(f" / {gib(summary.capacity)} GiB ", dim)
    rates: list[Line] = []
    if summary.tokens_per_second is not None:
        rates.append(Line(f"{count(summary.tokens_per_second)} ", base).add("tok/s", dim))
    if summary.step_seconds is not None:
        rates.append(Line(f"{step_time(summary.step_seconds)}", base).add("/step", dim))
    middle = beside(rates, "  ", base)
    left = Line(" loss ", dim)
    left.add(loss(summary.loss) if summary.loss is not None else "not yet", look.style(bold=True)).add(" ", base)
    room = width - left.width - middle.width - peak.width - 6
    if summary.losses and room >= 4:
        left.join(spark(summary.losses, min(room, max(12, width // 4)), look))
    left.add("   ", base).join(middle)
    return spread(left, peak, width, base)
