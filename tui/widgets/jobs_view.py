"""Draws the jobs of a run: a line each, and the selected one's peaks by rank and phase."""

from collections.abc import Callable

from rich.style import Style

from ...protocol.messages.jobs import Job, JobRank
from ...protocol.run.endings import ending_in_words, signal_name
from ...protocol.text import duration
from ..model.jobs import JobRow, phases_of
from .drawing.figures import gib_fixed, step_time
from .drawing.line import Line
from .drawing.theme import Theme
from .drawing.wrapping import wrap
from .plots.spark import spark

_STATES = {"finished": "finished", "failed": "failed", "stopped": "stopped", "ended": "gone"}
"""State of a run or rank whose sign is used for a job's state."""
_WIDE = 110
"""Minimum cells of a line with the number of ranks and the duration; narrower ones use them for the command."""
_ENDINGS_SHOWN = 8


def head_line(width: int, theme: Theme) -> Line:
    """Draw the column heads."""
    ranks, time = (f"{'ranks':>6}", f"{'time':>10}") if width >= _WIDE else ("", "")
    text = f"  {'job':>3}  {'outcome':<11}{ranks}{'steps':>8}{'step time':>10}{'loss':>9}{'peak GiB':>9}{time}  command"
    return Line(theme.cut(text, width), theme.style("dim"))


def job_line(row: JobRow, width: int, theme: Theme, selected: bool, current: bool) -> Line:
    """Draw one job; ``width`` is one cell less than the head's, for the scroll mark."""
    glyph, tone = theme.state(_STATES.get(row.state, "training" if row.state == "training" else "starting"))
    wide = width + 1 >= _WIDE
    bold = selected or current
    line = Line(theme.glyphs.selected + " " if selected else "  ", theme.style("accent"))
    line.add(f"{row.number:>3}  ", theme.style(bold=bold)).add(
        f"{glyph} {row.outcome:<9}", theme.style(tone, bold=bold)
    )
    loss = f"{row.loss:.4f}" if row.loss is not None else "-"
    ranks = f"{row.ranks:>6}" if wide else ""
    figures = f"{ranks}{row.steps:>8,}{step_time(row.step_seconds) if row.step_seconds else '-':>10}{loss:>9}"
    line.add(figures, theme.style(bold=bold)).add(
        f"{gib_fixed(row.peak) if row.peak else '-':>9}", theme.style("peak", bold=bold)
    )
    line.add(f"{duration(row.seconds):>10}  " if wide else "  ", theme.style("dim"))
    note = "" if row.shown else " (beside another job: only counted)"
    return line.add(theme.cut(row.words + note, max(0, width - line.width)), theme.style(bold=bold))


def detail_lines(job: Job, row: JobRow, losses: list[float], width: int, theme: Theme) -> list[Line]:
    """Draw the details of a job: its command, failure and loss, and each rank's peaks by phase."""
    dim = theme.style("dim")
    lines = [Line(f" job {job.number}: ", theme.style("accent", bold=True)).add(row.words, theme.style(bold=True))]
    if row.text:
        lines += [Line(f" {part}", theme.style("error")) for part in wrap(row.text, width - 2)]
    lines += [Line(f" {part}", dim) for part in wrap(" ".join(job.argv), width - 2)[:3]]
    if losses:
        lines.append(Line(" loss ", dim).join(spark(losses, min(60, width - 24), theme)))
        if row.loss is not None:
            lines[-1].add(f" {row.loss:.4f}", theme.style(bold=True))
    if not row.peak:
        return [*lines, *_without_steps(job, width, dim)]
    measure = any(phase.resident_peak is not None for rank in job.ranks for phase in rank.phases)
    lines.append(Line())
    names = ("rank", "phase", "alloc GiB", "rsvd GiB", *(("RSS GiB",) if measure else ()), "at step", "exit")
    lines.append(Line(" " + "".join(f"{name:>11}" for name in names), dim))
    for rank in job.ranks:
        top = rank.peak_phase
        for at, phase in enumerate(phases_of(rank)):
            resident = f"{gib_fixed(phase.resident_peak or 0):>11}" if measure else ""
            ending = "" if at else _ending(rank, _brief)
            style = theme.style("peak", bold=True) if phase is top else theme.base
            name = f"{rank.rank if not at else '':>11}{phase.name:>11}"
            lines.append(
                Line(f" {name}{gib_fixed(phase.allocated_peak):>11}{gib_fixed(phase.reserved_peak):>11}", style).add(
                    f"{resident}{phase.peak_step:>11,}{ending:>11}", theme.base
                )
            )
    return lines


def _without_steps(job: Job, width: int, style: Style) -> list[Line]:
    lines = [Line(" no step" if job.is_over else " no step yet", style)]
    endings = [f"rank {rank.rank} {ending}" for rank in job.ranks if (ending := _ending(rank, ending_in_words))]
    if len(endings) > _ENDINGS_SHOWN:
        endings = [*endings[:_ENDINGS_SHOWN], f"{len(endings) - _ENDINGS_SHOWN} more"]
    return lines + [Line(f" {part}", style) for part in wrap(", ".join(endings), width - 2)]


def _ending(rank: JobRank, words: Callable[[int | None, int | None], str]) -> str:
    """Return how a rank's process ended, by exit code and signal, or else the rank's state."""
    known = rank.exit_code is not None or rank.signal
    return words(rank.exit_code, rank.signal) if known else rank.state


def _brief(code: int | None, signal: int | None) -> str:
    return signal_name(signal) if signal else str(code)
