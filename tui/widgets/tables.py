"""Draws the jobs of a run, and the parts of the sweep screen: head, table, curve."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.style import Style

from ...protocol.analysis.sweep.summary import left_text
from ...protocol.messages.hosts import Job, JobRank
from ...protocol.run.end import ending_in_words, signal_name
from ...protocol.text import duration, gib
from ..model.runs import JobRow, phases_of
from ..model.sweep import Dots, SweepModel, TableRow
from .base import Canvas
from .drawing import Line, Theme, gib_fixed, spread, step_time, width_of, wrap
from .plots import Curve, plot_cells, row_line, sign_of, spark
from .state import AppState

_STATES = {"finished": "finished", "failed": "failed", "stopped": "stopped", "ended": "gone"}
"""State of a run or rank whose sign is used for a job's state."""
_WIDE = 110  # minimum cells of a line with the number of ranks and the duration; narrower ones use them for the command
_ENDINGS_SHOWN = 8


def head_line(width: int, theme: Theme) -> Line:
    """Draw the column heads."""
    ranks, time = (f"{'ranks':>6}", f"{'time':>10}") if width >= _WIDE else ("", "")
    text = f"  {'job':>3}  {'outcome':<11}{ranks}{'steps':>8}{'step time':>10}{'loss':>9}{'peak GiB':>9}{time}  command"
    return Line(theme.cut(text, width), theme.style("dim"))


def job_line(row: JobRow, width: int, theme: Theme, selected: bool, current: bool) -> Line:
    """Draw one job; ``width`` is one cell less than the head's, for the scroll mark."""
    job = row.job
    glyph, tone = theme.state(_STATES.get(job.state, "training" if job.state == "training" else "starting"))
    wide = width + 1 >= _WIDE
    bold = selected or current
    line = Line(theme.glyphs.selected + " " if selected else "  ", theme.style("accent"))
    line.add(f"{job.number:>3}  ", theme.style(bold=bold))
    line.add(f"{glyph} {row.outcome:<9}", theme.style(tone, bold=bold))
    loss = f"{job.loss:.4f}" if job.loss is not None else "-"
    ranks = f"{job.world_size:>6}" if wide else ""
    figures = f"{ranks}{job.steps:>8,}{step_time(job.step_us / 1e6) if job.step_us else '-':>10}{loss:>9}"
    line.add(figures, theme.style(bold=bold))
    line.add(f"{gib_fixed(job.peak) if job.peak else '-':>9}", theme.style("peak", bold=bold))
    line.add(f"{duration(row.seconds):>10}  " if wide else "  ", theme.style("dim"))
    note = "" if job.shown else " (beside another job: only counted)"
    return line.add(theme.cut(row.words + note, max(0, width - line.width)), theme.style(bold=bold))


def detail_lines(row: JobRow, losses: list[float], width: int, theme: Theme) -> list[Line]:
    """Draw the details of a job: its command, failure and loss, and each rank's peaks by phase."""
    job, dim = row.job, theme.style("dim")
    lines = [Line(f" job {job.number}: ", theme.style("accent", bold=True)).add(row.words, theme.style(bold=True))]
    if row.text:
        lines += [Line(f" {part}", theme.style("error")) for part in wrap(row.text, width - 2)]
    lines += [Line(f" {part}", dim) for part in wrap(" ".join(job.argv), width - 2)[:3]]
    if losses:
        lines.append(Line(" loss ", dim).join(spark(losses, min(60, width - 24), theme)))
        if job.loss is not None:
            lines[-1].add(f" {job.loss:.4f}", theme.style(bold=True))
    if not job.peak:
        return [*lines, *_without_steps(job, width, dim)]
    measure = any(phase.resident_peak is not None for rank in job.ranks for phase in rank.phases)
    lines.append(Line())
    names = ("rank", "phase", "alloc GiB", "rsvd GiB", *(("RSS GiB",) if measure else ()), "at step", "exit")
    lines.append(Line(" " + "".join(f"{name:>11}" for name in names), dim))
    for rank in job.ranks:
        top = rank.peak_phase
        for at, phase in enumerate(phases_of(rank)):
            resident = f"{gib_fixed(phase.resident_peak or 0):>11}" if measure else ""
            ending = "" if at else _ending(rank, lambda code, signal: signal_name(signal) if signal else str(code))
            style = theme.style("peak", bold=True) if phase is top else theme.base
            name = f"{rank.rank if not at else '':>11}{phase.name:>11}"
            peaks = f"{gib_fixed(phase.allocated_peak):>11}{gib_fixed(phase.reserved_peak):>11}"
            lines.append(Line(f" {name}{peaks}", style))
            lines[-1].add(f"{resident}{phase.peak_step:>11,}{ending:>11}", theme.base)
    return lines


def _without_steps(job: Job, width: int, style: Style) -> list[Line]:
    lines = [Line(" no step" if job.is_over else " no step yet", style)]
    endings = [f"rank {rank.rank} {ending}" for rank in job.ranks if (ending := _ending(rank, ending_in_words))]
    if len(endings) > _ENDINGS_SHOWN:
        endings = [*endings[:_ENDINGS_SHOWN], f"{len(endings) - _ENDINGS_SHOWN} more"]
    return lines + [Line(f" {part}", style) for part in wrap(", ".join(endings), width - 2)]


def _ending(rank: JobRank, words: Callable[[int | None, int | None], str]) -> str:
    known = rank.exit_code is not None or rank.signal
    return words(rank.exit_code, rank.signal) if known else rank.state


_TONES = {"done": "good", "running": "accent", "planned": "dim"}
_STATE_TONES = {"running": "good", "predicting": "accent", "done": "dim", "killed": "error", "failed": "error"}
_TICK_WIDTH = 10


class SweepCanvas(Canvas):
    """A part of the screen, drawn from the sweep."""

    def __init__(self, app_state: AppState, model: SweepModel, name: str) -> None:
        super().__init__(app_state, name=name)
        self._model = model


class SweepHead(SweepCanvas):
    """Two lines: name, state and progress; used and remaining budget."""

    def draw(self, width: int, height: int) -> list[Line]:
        return head_lines(self._model, time.time(), width, self.theme)


class SweepTable(SweepCanvas):
    """A line per configuration; if not all fit, those around the current one, until the user scrolls."""

    _below: int | None = None
    """Lines between the last visible one and the table's end; None: follow the current configuration."""
    _shown_below = 0

    def scroll(self, lines: int) -> None:
        self._below = max(0, self._shown_below + lines)

    def draw(self, width: int, height: int) -> list[Line]:
        rows = self._model.table(time.time())
        below = rows_below_current(rows, height) if self._below is None else self._below
        self._shown_below = max(0, min(below, len(rows) - height + 1))
        return table_lines(self._model.heads(), rows, width, height, self._shown_below, self.theme)


class SweepChart(SweepCanvas):
    """Peaks over the integer axis."""

    def key(self) -> Any:
        return len(self._model.rows), self._model.state

    def draw(self, width: int, height: int) -> list[Line]:
        return chart_lines(self._model.dots(), width, height, self.theme)


def head_lines(model: SweepModel, at: float, width: int, theme: Theme) -> list[Line]:
    """Return the head's two lines."""
    line = Line(f" {model.title()}", theme.style("text", bold=True))
    total = f" / {model.total}" if model.total else ""
    right = Line(f"{len(model.rows)}{total} done  ", theme.base)
    right.add(model.counts() + ("  " if model.counts() else ""), theme.style("warning"))
    right.add(f"{model.state} ", theme.style(_STATE_TONES.get(model.state, "warning"), bold=True))
    found = model.left(at)
    below = Line(f" {left_text(found)}" if found is not None else " predicting", theme.style("dim"))
    return [spread(line, right, width, theme.base), below]


def rows_below_current(rows: Sequence[TableRow], height: int) -> int:
    """Return the number of rows to omit at the end, so that a third of the visible ones follow the current one."""
    verdicts = [row.verdict for row in rows]
    current = verdicts.index("running") if "running" in verdicts else len(rows) - 1
    return len(rows) - (current + 1 + height // 3)


def table_lines(
    heads: Sequence[str], rows: Sequence[TableRow], width: int, height: int, below: int, theme: Theme
) -> list[Line]:
    """Return the table, its head first, without the last ``below`` rows."""
    end = len(rows) - below
    shown = rows[max(0, end - height + 1) : end]
    widths = [
        max(width_of(text) for text in (head, *(row.cells[column] for row in shown if column < len(row.cells))))
        for column, head in enumerate(heads)
    ]
    first, dim = Line(" ", theme.base), theme.style("dim")
    for head, cells in zip(heads, widths, strict=True):
        first.join(Line(head, dim).pad(cells + 2, dim))
    lines = [first]
    for row in shown:
        tone = _TONES.get(row.verdict, "error")
        line = Line(_sign(row.verdict, theme), theme.style(tone))
        for cell, cells in zip(row.cells, widths, strict=False):
            style = theme.style("text" if row.verdict == "done" else "dim")
            line.join(Line(cell, style).pad(cells + 2, style))
        if row.text:
            line.add(theme.cut(row.text, max(1, width - line.width)), theme.style(tone))
        lines.append(line)
    return lines


def _sign(verdict: str, theme: Theme) -> str:
    if verdict in ("done", "planned"):
        return " "
    return theme.glyphs.selected if verdict == "running" else theme.glyphs.error


def chart_lines(dots: Dots | None, width: int, height: int, theme: Theme) -> list[Line]:
    """Return the curve with ticks: measured peaks, predicted ones, and values that did not fit."""
    points = [] if dots is None else [*dots.measured, *(point for curve in dots.predicted for point in curve)]
    xs = [] if dots is None else [x for x, _ in points] + dots.failed
    if dots is None or height < 4 or width < _TICK_WIDTH + 12 or not xs:
        return [Line(" the curve is drawn once a length is measured", theme.style("dim"))] if height else []
    name = dots.axis.rpartition(".")[2]
    head = Line(f" peak by {name} ", theme.style("text", bold=True))
    curves = [Curve("line", "dim", *_columns(curve)) for curve in dots.predicted]
    curves.append(Curve("marks", "allocated", *_columns(dots.measured)))
    for curve, words in ((curves[0], "predicted"), (curves[-1], "measured")):
        if curve.xs and (words == "measured") == (curve.kind == "marks"):
            head.add(f"  {sign_of(curve.kind, theme)} ", theme.style(curve.tone)).add(words, theme.style("dim"))
    top = max([y for _, y in points] or [1.0]) * 1.05
    if dots.failed:
        curves.append(Curve("marks", "error", [float(x) for x in dots.failed], [top] * len(dots.failed)))
        head.add(f"  {sign_of('marks', theme)} ", theme.style("error")).add("out of memory", theme.style("dim"))
    low, high = float(min(xs)), float(max(xs))
    rows = plot_cells(curves, width - _TICK_WIDTH - 1, height - 2, (low, high), (0.0, top), theme)
    lines = [head]
    for number, row in enumerate(rows):
        tick = gib(top, 1) if number == 0 else "0" if number == len(rows) - 1 else ""
        left = Line(f"{tick:>{_TICK_WIDTH}}", theme.style("dim")).add(theme.glyphs.bar, theme.style("faint"))
        lines.append(left.join(row_line(row, theme)))
    left, right = (Line(f"{x:,.0f}", theme.style("dim")) for x in (low, high))
    ends = spread(left, right, width - _TICK_WIDTH - 1, theme.base)
    lines.append(Line(" " * (_TICK_WIDTH + 1), theme.base).join(ends))
    return lines


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[float], list[float]]:
    return [float(x) for x, _ in points], [y for _, y in points]
