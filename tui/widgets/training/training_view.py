"""Draws the training screen: loss with evaluations, a second figure, marks, and the values at the cursor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from ....protocol.messages.telemetry import Evaluation
from ....protocol.text import duration, sanitize
from ...model.chartview import FIGURES, ChartView, column_of, value_range
from ...model.progress import epoch_words
from ...model.run import RunModel
from ...model.training import perplexity_of, with_loss
from ..drawing.figures import count, small
from ..drawing.figures import loss as loss_words
from ..drawing.line import Line, cut
from ..drawing.theme import Theme
from ..drawing.wrapping import wrap
from ..lines.scrubber import time_of_day
from ..plots.plot import Curve, plot_cells, put_cursor, row_line, sign_of
from .training_marks import axis_line, foot, marks_line
from .training_scene import GUTTER, Scene

_FIXED = 6
"""Rows besides the plots: head, two titles, marks, axis, foot."""
_EACH = 1


@dataclass(frozen=True, slots=True)
class _Figure:
    """Name and format of a figure of the second pane."""

    title: str
    write: Callable[[float], str]
    floor: bool = False
    zero: bool = False
    """Whether the axis always begins at zero."""
    extreme: str = ""
    """Attribute with the highest value of a moment's steps."""


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
        return [*lines, *(Line(f" {row}", theme.style("dim")) for row in wrap(text, width - 2))]
    panes = 1 if height < 30 else 2 if height < 44 else 3
    rooms = _rooms(height - _FIXED - (panes - 1) * _EACH, panes)
    lines += _loss_pane(scene, rooms[0])
    lines.append(marks_line(scene))
    for number, room in enumerate(rooms[1:]):
        lines += _figure_pane(scene, (view.figure + number) % len(FIGURES), room)
    lines.append(axis_line(scene))
    lines.append(foot(scene))
    return lines


def _rooms(rows: int, panes: int) -> list[int]:
    """Divide the rows among the panes; the loss has the most."""
    rows = max(rows, 2 * (panes + 1))
    each = max(2, rows * 2 // (2 * panes + 3))
    return [rows - each * panes, *([each] * panes)]


# The head -------------------------------------------------------------------------------------------------------------


def _head(scene: Scene) -> Line:
    """Draw the rule with the displayed step: the cursor's, or the newest."""
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


# The loss -------------------------------------------------------------------------------------------------------------


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
    return [title, *_plot(scene, curves, rows, (low, high), loss_words)]


def _loss_title(scene: Scene) -> Line:
    theme, moment = scene.theme, scene.moment
    dim, strong = theme.style("dim"), theme.style(bold=True)
    line = Line(" loss", theme.style(bold=True))
    value = moment.loss if moment is not None else None
    line.add(f"   {sign_of('points', theme)} raw ", dim).add("-" if value is None else loss_words(value), strong)
    if scene.over > 1 and scene.smooth_at is not None:
        line.add(f"   {sign_of('line', theme)} ", theme.style("accent")).add("smoothed ", dim)
        line.add(loss_words(scene.smooth_at), strong)
        if scene.width >= 100:
            line.add(f" (moving average over {scene.over:,} steps)", dim)
    evaluation = _evaluation_at(scene)
    if evaluation is not None and evaluation.loss is not None:
        line.add(f"   {sign_of('marks', theme)} ", theme.style("warning"))
        line.add(f"{sanitize(evaluation.name, 20)} ", dim).add(loss_words(evaluation.loss), strong)
        at = f" at step {evaluation.step:,}" if scene.width >= 100 else f" @{evaluation.step:,}"
        line.add(at, dim)
        ppl = perplexity_of(evaluation)
        best = scene.model.training.best
        more = [f", perplexity {ppl:.4g}" if ppl is not None and isfinite(ppl) else ""]
        if best is not None and best.loss is not None:
            more.append(f"   best {loss_words(best.loss)} at step {best.step:,}")
        for words in more:
            if line.width + len(words) < scene.width:
                line.add(words, dim)
    return line


def _evaluation_at(scene: Scene) -> Evaluation | None:
    """Return the latest evaluation at the displayed moment."""
    evaluations = with_loss(scene.model.training.evaluations)
    if scene.moment is None or not evaluations:
        return None
    name = evaluations[0].name
    return next((e for e in reversed(evaluations) if e.name == name and e.step <= scene.moment.step), None)


# The other figures ----------------------------------------------------------------------------------------------------


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
    value = getattr(scene.moment, name) if scene.moment is not None else None
    line = Line(f" {figure.title} ", theme.style(bold=True))
    line.add("-" if value is None else figure.write(value), theme.style(bold=True))
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


# Plots ----------------------------------------------------------------------------------------------------------------


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
    """Return the last value of each half column of the window, with its coordinate."""
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
