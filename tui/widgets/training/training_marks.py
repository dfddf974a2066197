"""Draws the lines under the plots of the training screen: marks of events, the axis, the events at the cursor."""

from bisect import bisect_left
from math import floor, log10

from ....protocol.text import duration, gib, sanitize
from ...model.alerts import SEVERITIES
from ...model.chartview import Axis, column_of
from ...model.progress import early_stop_words
from ...model.training import HistoryPoint
from ..drawing.figures import count
from ..drawing.line import Line
from ..plots.plot import row_line
from .training_scene import GUTTER, Scene

_TICK_CELLS = 14
_TIMES = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14_400, 43_200, 86_400, 172_800, 604_800)


def _marks(scene: Scene) -> list[tuple[int, str, str, str]]:
    """Return the marks in the window: column, sign, tone, words; the most important last."""
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
    if not scene.seen or not scene.seen[0].t <= t:
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
