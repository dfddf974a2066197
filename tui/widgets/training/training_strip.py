"""Draws the course of loss, tokens per second and step time beside the ranks, where the overview has room for them."""

from collections.abc import Callable, Sequence
from math import floor, log10
from typing import NamedTuple

from ...model.chartview import value_range
from ...model.run import RunModel
from ...model.training import HistoryPoint
from ..base.canvas import Canvas
from ..drawing.figures import count, loss, step_time
from ..drawing.line import Line, cut
from ..drawing.theme import Theme, ruled
from ..plots.spark import pool_mean

STRIP_LINES = 9
"""Lines of the strip: a rule, and of each chart a title, six rows and the steps."""

FEWEST_COLUMNS = 120
"""Columns of a terminal in which three charts fit side by side."""

_SECONDS = 2
"""Seconds between readings of the curves, which of a long run takes some milliseconds."""

_LABEL = 7


class Course(NamedTuple):
    """One figure over the steps of a run."""

    name: str
    now: str
    """Its present value, formatted; empty: unknown."""
    values: Sequence[float | None]
    form: Callable[[float], str]
    floor: bool
    """Whether the scale begins at zero."""


def courses(model: RunModel, points: Sequence[HistoryPoint]) -> list[Course]:
    """Return what the strip shows of a run."""
    rates = model.rates
    return [
        Course(
            "loss",
            loss(model.loss) if model.loss is not None else "",
            [point.loss for point in points],
            loss,
            False,
        ),
        Course(
            "tokens/s",
            count(float(f"{rates.tokens_per_second:.3g}")) if rates.tokens_per_second else "",
            [point.tokens_per_second for point in points],
            count,
            True,
        ),
        Course(
            "step time",
            step_time(float(f"{rates.seconds_per_step:.2g}")) if rates.seconds_per_step else "",
            [point.step_seconds for point in points],
            step_time,
            True,
        ),
    ]


def course_lines(course: Course, steps: tuple[int, int], width: int, height: int, theme: Theme) -> list[Line]:
    """Draw one chart: its name and present value, columns scaled to the usual range of its values, and the steps.

    A value beyond the range, such as a first step that compiles, reaches to the edge.
    """
    title = Line(f" {course.name} ", theme.style("dim")).add(course.now, theme.style(bold=True))
    rows = height - 2
    known = [value for value in course.values if value is not None and value == value]
    if not known:
        words = Line(f" {'after the first step' if not steps[1] else 'not known'}", theme.style("dim"))
        return [title, words, *([Line()] * (height - 2))]
    low, high = nice_range(*value_range(known, course.floor))
    low = max(0.0, low) if min(known) >= 0 else low
    columns = pool_mean(grouped(course.values, width - _LABEL - 1), width - _LABEL - 1)
    levels = [_level(value, low, high, rows * 8) for value in columns]
    lines = [title]
    for row in range(rows - 1, -1, -1):
        label = course.form(high) if row == rows - 1 else course.form(low) if row == 0 else ""
        line = Line(f"{cut(label, _LABEL - 1, ''):>{_LABEL - 1}} ", theme.style("dim"))
        full = theme.style("text", "accent") if not theme.plain_graphs else theme.style("accent")
        for level in levels:
            part = max(0, min(8, level - row * 8))
            if part == 8 and not theme.plain_graphs:
                line.add(" ", full)  # as in memory graphs: a full block leaves seams in some fonts
            else:
                line.add(theme.glyphs.eighths[part], theme.style("accent") if part else theme.base)
        lines.append(line.pad(width, theme.base))
    first, last = (f"{step:,}" for step in steps)
    at = Line(" " * _LABEL + first, theme.style("dim"))
    reached = max(at.width + 2, min(width - 1, _LABEL + len(levels)) - len(last))
    return [*lines, at.pad(reached, theme.base).add(last, theme.style("dim"))]


def grouped(values: Sequence[float | None], columns: int) -> list[float | None]:
    """Return means over groups of 1, 2, 4, 8 ... values, at most ``columns``: a new value changes the last one only."""
    size = 1
    while -(-len(values) // size) > max(1, columns):
        size *= 2
    groups = (values[at : at + size] for at in range(0, len(values), size))
    return [pool_mean(group, 1)[0] for group in groups] if size > 1 else list(values)


def nice_range(low: float, high: float) -> tuple[float, float]:
    """Return a range around another with round ends, so that it rarely changes while a run continues."""
    unit = 10.0 ** floor(log10(max(high - low, 1e-12))) / 4
    return floor(low / unit) * unit, -floor(-high / unit) * unit


def _level(value: float | None, low: float, high: float, top: int) -> int:
    if value is None or value != value:
        return 0
    return max(1, min(top, round((value - low) / (high - low) * top))) if high > low else top // 2


class TrainingStrip(Canvas):
    """The charts side by side, below a rule."""

    _points: list[HistoryPoint]
    _read: object = None

    def key(self) -> object:
        """Return a value that changes with the present values, and every few seconds with the charts."""
        model = self.app_state.model
        course = model.training.course
        playing = self.app_state.source is not None and self.app_state.source.transport.playing
        read = id(course), floor(model.now / _SECONDS) if playing and len(course) else course.version
        if read != self._read:
            self._read, self._points = read, model.moments
        return read, [one.now for one in courses(model, ())]

    def draw(self, width: int, height: int) -> list[Line]:
        theme, model = self.theme, self.app_state.model
        title = Line(" training ", theme.style("dim"))
        right = Line(" t: all curves ", theme.style("dim"))
        points = self._points
        steps = (points[0].first_step, points[-1].step) if points else (0, 0)
        shown = courses(model, points)
        each = width // len(shown)
        charts = [course_lines(course, steps, each - 1, height - 1, theme) for course in shown]
        rows = [Line() for _ in range(height - 1)]
        for chart in charts:
            for row, line in zip(rows, chart, strict=True):
                row.join(line.fit(each, theme.base))
        return [ruled(title, right, width, theme), *rows]
