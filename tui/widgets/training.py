"""Draws the training screen, and the strip of training charts below the overview's ranks."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10
from typing import NamedTuple

from ...protocol.messages.telemetry import Evaluation
from ...protocol.text import duration, gib, sanitize
from ..model.alerts import SEVERITIES
from ..model.run import RunModel, early_stop_words, epoch_words
from ..model.training import (
    FIGURES,
    Axis,
    ChartView,
    HistoryPoint,
    column_of,
    perplexity_of,
    smoothed,
    span_of,
    value_range,
    with_loss,
    x_of,
)
from .base import Canvas
from .drawing import Line, Theme, count, cut, loss, ruled, small, step_time, wrap
from .header import time_of_day
from .plots import Curve, plot_cells, pool_mean, put_cursor, row_line, sign_of

GUTTER = 9


class Scene:
    """State shared by the parts of one drawing."""

    def __init__(self, model: RunModel, view: ChartView, width: int, theme: Theme) -> None:
        self.model, self.view, self.theme = model, view, theme
        self.all = model.moments
        self.begun = self.all[0].t if self.all else 0.0
        self.seen = view.visible(self.all)
        self.columns = max(8, width - GUTTER)
        self.width = width
        self.xs = span_of(self.seen, view.axis, self.begun)
        at = view.at_cursor(self.all)
        self.moment = self.all[at] if at is not None else None
        self.over = view.smoothed_steps(self.all[-1].step - self.all[0].first_step + 1 if self.all else 0)
        """Number of steps over which the loss is smoothed."""
        self.smooth = smoothed(self.all, 1 - 1 / self.over)
        self.smooth_at = self.smooth[at] if at is not None else None

    def x(self, moment: HistoryPoint) -> float:
        return x_of(moment, self.view.axis, self.begun)

    def column(self, moment: HistoryPoint) -> int:
        return column_of(self.x(moment), *self.xs, self.columns)

    @property
    def cursor_column(self) -> int | None:
        """The cursor's column; None without a cursor."""
        if self.view.cursor is None or self.moment is None:
            return None
        return self.column(self.moment)

    def moment_of(self, step: int) -> HistoryPoint | None:
        """Return the moment of a step; None outside the window."""
        if not self.seen or not self.seen[0].first_step <= step <= self.seen[-1].step:
            return None
        place = bisect_left(self.seen, step, key=lambda moment: moment.step)
        return self.seen[min(place, len(self.seen) - 1)]


_TICK_CELLS = 14
_TIMES = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14_400, 43_200, 86_400, 172_800, 604_800)


def _marks(scene: Scene) -> list[tuple[int, str, str, str]]:
    theme = scene.theme
    found: list[tuple[int, str, str, str]] = []
    for checkpoint in scene.model.training.checkpoints:
        moment = scene.moment_of(checkpoint.step)
        if moment is not None:
            size = f", {gib(checkpoint.bytes)}" if checkpoint.bytes else ""
            best = ", the best so far" if checkpoint.best else ""
            words = f"checkpoint of step {checkpoint.step:,}{size}{best}"
            found.append((scene.column(moment), "C" if checkpoint.best else "c", "good", words))
    stop = scene.model.training.early_stop
    if stop is not None and (moment := scene.moment_of(stop.step)) is not None:
        found.append((scene.column(moment), "E", "accent", early_stop_words(stop)))
    alerts = sorted(scene.model.alerts, key=lambda alert: SEVERITIES[alert.severity])
    for alert in alerts:
        moment = _moment_of_alert(scene, alert.step, alert.time)
        if moment is not None:
            sign, tone = theme.severity(alert.severity)
            found.append((scene.column(moment), sign, tone, sanitize(alert.title, 200)))
    return found


def _moment_of_alert(scene: Scene, step: int | None, t: float) -> HistoryPoint | None:
    if step:
        return scene.moment_of(step)
    if not scene.seen or scene.seen[0].t > t:
        return None
    place = bisect_left(scene.seen, t, key=lambda moment: moment.t)
    if place < len(scene.seen):
        return scene.seen[place]
    return scene.seen[-1] if scene.view.end is None else None


def marks_line(scene: Scene) -> Line:
    """Draw the signs of the marks under their columns."""
    theme = scene.theme
    cells = [(" ", "dim")] * scene.columns
    column = scene.cursor_column
    if column is not None and 0 <= column < len(cells):
        cells[column] = (theme.glyphs.bar, "faint")
    for place, sign, tone, _ in _marks(scene):
        if 0 <= place < len(cells):
            cells[place] = (sign, tone)
    line = Line(f"{'marks':>{GUTTER - 2}} ", theme.style("dim")).add(theme.glyphs.bar, theme.style("rule"))
    return line.join(row_line(cells, theme))


def axis_line(scene: Scene) -> Line:
    """Draw round figures under their columns; the newest step's figure is in the head."""
    theme = scene.theme
    text = [" "] * scene.columns
    free = 0
    for place in _ticks(scene.xs, scene.view.axis, max(2, scene.columns // _TICK_CELLS)):
        label = _tick(place, scene.view.axis)
        column = column_of(place, *scene.xs, scene.columns)
        start = min(column, scene.columns - len(label))
        if start < free or column < 0:
            continue
        text[start : start + len(label)] = label
        free = start + len(label) + 2
    unit = {"steps": "step", "tokens": "tokens", "time": "time"}[scene.view.axis]
    line = Line(f"{unit:>{GUTTER - 2}} ", theme.style("dim")).add(theme.glyphs.bar, theme.style("rule"))
    return line.add("".join(text), theme.style("dim"))


def _ticks(xs: tuple[float, float], axis: Axis, most: int) -> list[float]:
    low, high = xs
    if high <= low:
        return [low]
    wanted = (high - low) / most
    if axis == "time":
        size = next((each for each in _TIMES if each >= wanted), wanted)
    else:
        power = 10 ** floor(log10(wanted))
        size = next(each * power for each in (1, 2, 5, 10) if each * power >= wanted * 0.999)
        size = max(1.0, size)
    first = -(-low // size)
    return [(first + number) * size for number in range(int((high - first * size) / size) + 1)]


def _tick(place: float, axis: Axis) -> str:
    if axis == "steps":
        return f"{place:,.0f}"
    return count(place) if axis == "tokens" else (duration(place) if place else "0")


def foot(scene: Scene) -> Line:
    """Draw the events at the cursor (or the newest), and the part of the run in view."""
    theme, view = scene.theme, scene.view
    dim = theme.style("dim")
    line = Line(" ", dim)
    column = scene.cursor_column
    marks = _marks(scene)
    here = marks if column is None else [mark for mark in marks if mark[0] == column]
    part = "whole run"
    if view.span is not None and scene.seen:
        part = f"steps {scene.seen[0].first_step:,} to {scene.seen[-1].step:,} of {scene.all[-1].step:,}"
    right = Line(f" {part}, over {view.axis} ", dim)
    if here:
        # At the cursor the most severe is first, else the newest.
        _, sign, tone, words = here[-1] if column is not None else max(here, key=lambda mark: mark[0])
        more = f" (and {len(here) - 1} more)" if column is not None and len(here) > 1 else ""
        latest = "latest mark: " if column is None else ""
        line.add(f"{sign} ", theme.style(tone)).add(latest, dim)
        line.add(theme.cut(words + more, scene.width - line.width - right.width - 1), theme.base)
    else:
        line.add("nothing is marked " + ("in view" if column is None else "at the cursor"), theme.style("faint"))
    gap = scene.width - line.width - right.width
    return line.add(" " * max(0, gap), dim).join(right)


_FIXED = 6  # rows besides the plots: head, two titles, marks, axis, foot
_EACH = 1


@dataclass(frozen=True, slots=True)
class _Figure:
    title: str
    write: Callable[[float], str]
    floor: bool = False
    zero: bool = False
    extreme: str = ""  # attribute with the highest value of a moment's steps


def _percent(value: float) -> str:
    return f"{value * 100:.1f} %" if value < 0.0995 else f"{value * 100:.0f} %"


_FIGURES: dict[str, _Figure] = {
    "lr": _Figure("learning rate", small, floor=True),
    "grad_norm": _Figure("gradient norm", small, floor=True, extreme="max_grad_norm"),
    "tokens_per_second": _Figure("tokens/s", count, floor=True),
    "mfu": _Figure("MFU", _percent, floor=True),
    "data_share": _Figure("share of the step waiting for data", _percent, zero=True),
}


def training_lines(model: RunModel, view: ChartView, width: int, height: int, theme: Theme) -> list[Line]:
    """Draw the whole screen between summary and keys."""
    scene = Scene(model, view, width, theme)
    lines = [_head(scene)]
    if not scene.all:
        text = "No step is finished yet: the curves begin with the first one."
        shown = [row for each in (text, *map(sanitize, model.training.said)) for row in wrap(each, width - 2)]
        return [*lines, *(Line(f" {row}", theme.style("dim")) for row in shown[: height - 1])]
    said = [row for each in model.training.said for row in wrap(sanitize(each), width - 2)][: max(0, height // 8 - 2)]
    height -= len(said)
    panes = 1 if height < 30 else 2 if height < 44 else 3
    rooms = _rooms(height - _FIXED - (panes - 1) * _EACH, panes)
    lines += _loss_pane(scene, rooms[0])
    lines.append(marks_line(scene))
    for number, room in enumerate(rooms[1:]):
        lines += _figure_pane(scene, (view.figure + number) % len(FIGURES), room)
    lines.append(axis_line(scene))
    lines.append(foot(scene))
    return [*lines, *(Line(f" {row}", theme.style("dim")) for row in said)]


def _rooms(rows: int, panes: int) -> list[int]:
    rows = max(rows, 2 * (panes + 1))
    each = max(2, rows * 2 // (2 * panes + 3))
    return [rows - each * panes, *([each] * panes)]


def _head(scene: Scene) -> Line:
    theme, moment, model = scene.theme, scene.moment, scene.model
    rule, dim = theme.style("rule"), theme.style("dim")
    line = Line(theme.glyphs.rule, rule).add(" training ", theme.style(bold=True))
    if moment is None:
        return line.add(theme.glyphs.rule * max(0, scene.width - line.width), rule)
    steps = f"step {moment.step:,}" if moment.steps == 1 else f"steps {moment.first_step:,} to {moment.step:,}"
    where = "at the cursor: " if scene.view.cursor is not None else "newest: "
    line.add(where, dim).add(steps, theme.style("accent", bold=True))
    words = [f"{count(moment.tokens)} tokens" if moment.tokens else "", time_of_day(moment.t)]
    words.append(f"{duration(moment.t - scene.begun)} in" if moment.t > scene.begun else "")
    if scene.view.cursor is None and (epochs := epoch_words(model)):
        words.insert(0, f"epoch {epochs}")
    for word in words:
        if word and line.width + len(word) + 5 <= scene.width:
            line.add(f" {theme.glyphs.dot} {word}", dim)
    line.add(" ", dim)
    return line.add(theme.glyphs.rule * max(0, scene.width - line.width), rule)


def _loss_pane(scene: Scene, rows: int) -> list[Line]:
    evaluations = [(each, scene.moment_of(each.step)) for each in with_loss(scene.model.training.evaluations)]
    shown = [(each, moment) for each, moment in evaluations if moment is not None]
    first = scene.all.index(scene.seen[0]) if scene.seen else 0
    smooth = scene.smooth[first : first + len(scene.seen)]
    raw_x: list[float] = []
    raw_y: list[float] = []
    for place, low, high in _extremes(scene, "low_loss", "high_loss", "loss"):
        raw_x += [place, place] if high > low else [place]
        raw_y += [low, high] if high > low else [low]
    line = _pooled(scene, smooth)
    losses = [each.loss for each, _ in shown if each.loss is not None]
    title = _loss_title(scene)
    if not raw_y and not losses:
        return [title, *_unknown(scene, rows, "the script reports no loss")]
    levels = [value for _, value in line] + losses
    low, high = value_range(raw_y + losses)
    low, high = min([low, *levels]), max([high, *levels])
    curves = [Curve("points", "dim", raw_x, raw_y)]
    if scene.over > 1:
        curves.append(Curve("line", "accent", [place for place, _ in line], [value for _, value in line]))
    curves.append(Curve("marks", "warning", [scene.x(moment) for _, moment in shown], losses))
    return [title, *_plot(scene, curves, rows, (low, high), loss)]


def _loss_title(scene: Scene) -> Line:
    theme, moment = scene.theme, scene.moment
    dim, strong = theme.style("dim"), theme.style(bold=True)
    line = Line(" loss", theme.style(bold=True))
    line.add(f"   {sign_of('points', theme)} raw ", dim).add(_written(moment, "loss", loss), strong)
    if scene.over > 1 and scene.smooth_at is not None:
        line.add(f"   {sign_of('line', theme)} ", theme.style("accent")).add("smoothed ", dim)
        line.add(loss(scene.smooth_at), strong)
        if scene.width >= 100:
            line.add(f" (moving average over {scene.over:,} steps)", dim)
    evaluation = _evaluation_at(scene)
    if evaluation is not None and evaluation.loss is not None:
        line.add(f"   {sign_of('marks', theme)} ", theme.style("warning"))
        line.add(f"{sanitize(evaluation.name, 20)} ", dim).add(loss(evaluation.loss), strong)
        at = f" at step {evaluation.step:,}" if scene.width >= 100 else f" @{evaluation.step:,}"
        line.add(at, dim)
        ppl = perplexity_of(evaluation)
        best = scene.model.training.best
        more = [f", perplexity {ppl:.4g}" if ppl is not None and isfinite(ppl) else ""]
        if best is not None and best.loss is not None:
            more.append(f"   best {loss(best.loss)} at step {best.step:,}")
        for words in more:
            if line.width + len(words) < scene.width:
                line.add(words, dim)
    return line


def _written(moment: HistoryPoint | None, name: str, write: Callable[[float], str]) -> str:
    """Return a figure of a moment as text; ``-`` if it was not measured, ``some`` are ranks or pooled steps."""
    value, lost = getattr(moment, name, None), getattr(moment, f"{name}_not_finite", 0)
    if not lost:
        return "-" if value is None else write(value)
    return "not finite" if value is None else f"{write(value)}, some not finite"


def _evaluation_at(scene: Scene) -> Evaluation | None:
    evaluations = with_loss(scene.model.training.evaluations)
    if scene.moment is None or not evaluations:
        return None
    name = evaluations[0].name
    return next((e for e in reversed(evaluations) if e.name == name and e.step <= scene.moment.step), None)


def _figure_pane(scene: Scene, index: int, rows: int) -> list[Line]:
    name = FIGURES[index]
    figure = _FIGURES[name]
    values = [getattr(moment, name) for moment in scene.seen]
    line = _pooled(scene, values)
    title = _figure_title(scene, index)
    if not line:
        return [title, *_unknown(scene, rows, _why_unknown(scene.model, name))]
    drawn = [value for _, value in line]
    curves: list[Curve] = []
    if figure.extreme:
        points = [(place, high) for place, _, high in _extremes(scene, figure.extreme, figure.extreme, name)]
        curves.append(Curve("points", "dim", [place for place, _ in points], [high for _, high in points]))
        drawn = drawn + [high for _, high in points]
    curves.append(Curve("line", "accent", [place for place, _ in line], [value for _, value in line]))
    low, high = value_range(drawn, figure.floor)
    return [title, *_plot(scene, curves, rows, (0.0 if figure.zero else low, high), figure.write)]


def _figure_title(scene: Scene, index: int) -> Line:
    theme, name = scene.theme, FIGURES[index]
    figure = _FIGURES[name]
    dim = theme.style("dim")
    line = Line(f" {figure.title} ", theme.style(bold=True))
    line.add(_written(scene.moment, name, figure.write), theme.style(bold=True))
    highest = getattr(scene.moment, figure.extreme) if figure.extreme and scene.moment is not None else None
    if highest is not None and scene.moment is not None and scene.moment.steps > 1:
        line.add(f"   {sign_of('points', theme)} highest {figure.write(highest)}", dim)
    if name == "tokens_per_second" and scene.width >= 100:
        line.add("   all ranks, without evaluations and checkpoints", dim)
    if name == "mfu" and scene.model.peak_flops and scene.width >= 100:
        peak = f"{scene.model.peak_flops / 1e12:,.0f} TFLOP/s"
        line.add(f"   of the data sheet's {peak}", dim)
    if index == scene.view.figure:
        right = f"v: {_FIGURES[FIGURES[(index + 1) % len(FIGURES)]].title} "
        room = scene.width - line.width
        if room > len(right) + 2:
            line.add(" " * (room - len(right)), dim).add(right, theme.style("faint"))
    return line


def _why_unknown(model: RunModel, name: str) -> str:
    if name == "mfu":
        if any(rank.on_cpu for rank in model.ranks.values()):
            return "a CPU has no data-sheet peak to compare with"
        if model.peak_flops is None:
            return "the data-sheet peak of this device, or its data type, is not known"
        return "the FLOPs of this model are not known"
    return {"tokens_per_second": "the script's batches hold no tokens that can be counted"}.get(
        name, "the script does not report it"
    )


def _unknown(scene: Scene, rows: int, why: str) -> list[Line]:
    lines = [Line() for _ in range(rows)]
    lines[rows // 2] = Line(" " * GUTTER + f"not known: {why}", scene.theme.style("dim"))
    return lines


def _plot(
    scene: Scene, curves: Sequence[Curve], rows: int, ys: tuple[float, float], write: Callable[[float], str]
) -> list[Line]:
    theme = scene.theme
    cells = plot_cells(curves, scene.columns, rows, scene.xs, ys, theme)
    column = scene.cursor_column
    if column is not None:
        put_cursor(cells, column, theme)
    labels = {0: ys[1], rows - 1: ys[0]}
    if rows >= 7:
        labels[rows // 2] = ys[1] - (ys[1] - ys[0]) * (rows // 2) / (rows - 1)
    lines: list[Line] = []
    for number, row in enumerate(cells):
        label = cut(write(labels[number]), GUTTER - 2, "") if number in labels else ""
        line = Line(f"{label:>{GUTTER - 2}} ", theme.style("dim")).add(theme.glyphs.bar, theme.style("rule"))
        lines.append(line.join(row_line(row, theme)))
    return lines


def _pooled(scene: Scene, values: Sequence[float | None]) -> list[tuple[float, float]]:
    found: dict[int, tuple[float, float]] = {}
    for moment, value in zip(scene.seen, values, strict=True):
        if value is not None and isfinite(value):
            place = scene.x(moment)
            found[column_of(place, *scene.xs, 2 * scene.columns)] = (place, value)
    return list(found.values())


def _extremes(scene: Scene, low: str, high: str, otherwise: str) -> list[tuple[float, float, float]]:
    """Return the lowest and the highest value of each half column of the window, with its coordinate."""
    found: dict[int, tuple[float, float, float]] = {}
    for moment in scene.seen:
        lowest, highest = getattr(moment, low), getattr(moment, high)
        lowest = getattr(moment, otherwise) if lowest is None else lowest
        highest = getattr(moment, otherwise) if highest is None else highest
        if lowest is None or highest is None or not isfinite(lowest) or not isfinite(highest):
            continue
        place = scene.x(moment)
        column = column_of(place, *scene.xs, 2 * scene.columns)
        known = found.get(column)
        if known is not None:
            lowest, highest = min(lowest, known[1]), max(highest, known[2])
        found[column] = (place, lowest, highest)
    return list(found.values())


STRIP_LINES = 9  # lines of the strip: a rule, and of each chart a title, six rows and the steps
FEWEST_COLUMNS = 120  # columns of a terminal in which three charts fit side by side
_SECONDS = 2  # seconds between readings of the curves, which of a long run takes some milliseconds
_LABEL = 7


class Course(NamedTuple):
    """One figure over the steps of a run."""

    name: str
    now: str
    values: Sequence[float | None]
    form: Callable[[float], str]
    floor: bool


def courses(model: RunModel, points: Sequence[HistoryPoint]) -> list[Course]:
    """Return what the strip shows of a run."""
    speed, seconds = model.rates.tokens_per_second, model.rates.seconds_per_step
    present = loss(model.loss) if model.loss is not None else ""
    rate = count(float(f"{speed:.3g}")) if speed else ""
    time = step_time(float(f"{seconds:.2g}")) if seconds else ""
    return [
        Course("loss", present, [point.loss for point in points], loss, False),
        Course("tokens/s", rate, [point.tokens_per_second for point in points], count, True),
        Course("step time", time, [point.step_seconds for point in points], step_time, True),
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
