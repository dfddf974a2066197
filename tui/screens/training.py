"""The training curves: loss and evaluations, and another figure, with a cursor."""

import time
from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from ..model.training import ChartView, HistoryPoint
from ..widgets.base import Canvas
from ..widgets.drawing import Line
from ..widgets.state import AppState
from ..widgets.training import GUTTER, training_lines
from .base import ALERTS, BACK, LOGS, MonitorScreen, hidden, key


class TrainingCanvas(Canvas):
    """The screen between summary and keys."""

    def __init__(self, app_state: AppState, view: ChartView, name: str) -> None:
        super().__init__(app_state, name=name)
        self.view = view

    def key(self) -> object:
        """Return a value that changes with results, alerts and the user's selections, and with steps once a second."""
        model, source = self.app_state.model, self.app_state.source
        training, alerts = model.training, model.alerts
        paused = self.app_state.replaying and source is not None and not source.transport.playing
        steps = training.course.version if paused or model.ended else int(time.monotonic())
        return id(model), steps, training.version, id(alerts), alerts.version, *vars(self.view).values()

    def draw(self, width: int, height: int) -> list[Line]:
        return training_lines(self.app_state.model, self.view, width, height, self.theme)


class TrainingScreen(MonitorScreen):
    """The training curves."""

    NAME = "training"
    WHAT = (
        "The training over time. Top: the loss of each step (dots), smoothed by a bias-corrected moving average, and "
        "of evaluations. Bottom: learning rate, gradient norm, tokens/s, MFU, or the share of the step spent waiting "
        "for data. Titles show figures of the step named in the head: the newest, or the cursor's. Alerts and "
        "checkpoints are marked under the loss. Long runs are drawn in buckets of several steps: mean, lowest and "
        "highest value. MFU counts the model's FLOPs, without recomputation, relative to the data sheet; evaluations "
        "and checkpoints are excluded from speed and MFU."
    )
    LEGEND = ("training", "alerts")
    TITLE_LINES = 2
    BINDINGS: ClassVar[list[BindingType]] = [
        BACK,
        key("left", "cursor(-1)", "cursor", "move the cursor one column back", bar="← →"),
        key(
            "right",
            "cursor(1)",
            "cursor on",
            "move the cursor one column forward; beyond the newest step it follows the run",
            False,
        ),
        key("up,comma", "zoom(1)", "zoom", "show half as many steps, around the cursor", bar="↑ ↓"),
        key("down,full_stop", "zoom(-1)", "zoom out", "show twice as many steps", show=False),
        key("v,tab", "figure(1)", "figure", "the next figure below the loss", bar="v"),
        key("V,shift+tab", "figure(-1)", "figure before", "the figure before", show=False),
        key("x", "axis", "axis", "over steps, tokens or time"),
        key("w", "whole", "whole", "the whole run, and follow it"),
        key("u", "smoothing", "smooth", "smooth the loss more, or not at all", show=False),
        key("pageup", "pan(-1)", "earlier", "half a window back", show=False),
        key("pagedown", "pan(1)", "later", "half a window on", show=False),
        key("home", "edge(0)", "first", "the cursor to the first step", show=False),
        key("end", "edge(-1)", "last", "the cursor to the newest step", show=False),
        key("j", "jump", "replay there", "move the whole view (replay, or rewind) to the cursor's step", show=False),
        *(ALERTS, hidden(LOGS)),
    ]
    HIDDEN: ClassVar[frozenset[str]] = frozenset(("finer", "coarser"))

    def __init__(self, app_state: AppState) -> None:
        super().__init__(app_state)
        self.view = app_state.chart
        self.canvas = TrainingCanvas(app_state, self.view, "body")

    def body(self) -> Iterable[Widget]:
        yield self.canvas

    @property
    def moments(self) -> list[HistoryPoint]:
        return self.app_state.model.moments

    def action_cursor(self, direction: int) -> None:
        moments = self.moments
        begun = moments[0].t if moments else 0.0
        self.view.move(direction, moments, max(8, self.canvas.size.width - GUTTER), begun)
        self.tick()

    def action_zoom(self, direction: int) -> None:
        self.view.zoom(direction, self.moments)
        self.tick()

    def action_pan(self, direction: int) -> None:
        self.view.pan(direction / 2, self.moments)
        self.tick()

    def action_edge(self, index: int) -> None:
        moments = self.moments
        if moments:
            self.view.to(index % len(moments), moments)
        elif index < 0:  # the newest, once there is one
            self.view.follow()
        self.tick()

    def action_figure(self, direction: int) -> None:
        self.view.next_figure(direction)
        self.tick()

    def action_axis(self) -> None:
        self.view.next_axis()
        self.tick()

    def action_smoothing(self) -> None:
        self.view.next_smoothing()
        over = self.view.smoothing
        text = "by the length of the run" if over is None else "off" if over == 1 else f"over {over} steps"
        self.app_state.show_message(f"smoothing of the loss: {text}")
        self.tick()

    def action_whole(self) -> None:
        self.view.whole()
        self.tick()

    def action_jump(self) -> None:
        moments, source = self.moments, self.app_state.source
        at = self.view.at_cursor(moments)
        if at is not None and source is not None:
            source.transport.goto(str(moments[at].step))
            self.view.cursor = None
