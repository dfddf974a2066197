"""The overview: all ranks, and the latest alerts."""

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from ..widgets.base.panes import AlertStrip
from ..widgets.ranks.rank_grid import RankGrid, plan
from ..widgets.training.training_strip import FEWEST_COLUMNS, STRIP_LINES, TrainingStrip
from .base import MonitorScreen, key


class OverviewScreen(MonitorScreen):
    """Shows whether the run trains, fits its devices, and has problems."""

    NAME = "overview"
    WHAT = (
        "Every rank of the run: as cards while they fit, else as lines, else as cells of a heat map. The top lines "
        "show the run's state and progress, and the highest memory peak relative to the device's capacity. A rank in "
        "trouble shows its state instead of its power draw. A large terminal also shows the course of loss, tokens/s "
        "and step time. The bottom lines show the latest alerts."
    )
    LEGEND = ("graph", "phases", "states", "alerts", "heat")
    BINDINGS: ClassVar[list[BindingType]] = [
        key("enter", "app.open", "open", "open the selected rank"),
        key("t", "app.training", "training", "loss, evaluations, learning rate, speed and MFU over the run"),
        key("a", "app.alerts", "alerts", "all alerts, each with its evidence"),
        key("m", "app.memory", "memory", "where the memory of a step's peak goes"),
        key("l", "app.logs", "logs", "the output of all ranks"),
        key("s", "app.stacks", "stacks", "where every rank is: Python stacks, equal ones together"),
        key("e", "app.events", "events", "what the allocator does, by phase", show=False),
        key("z", "zoom", "zoom", "scale graphs to the device's capacity, or to the run's highest peak"),
        key("v", "view", "view", "cards, rows or heat map", show=False),
        key("left", "move(-1,0)", "left", "select the rank to the left", show=False),
        key("right", "move(1,0)", "right", "select the rank to the right", show=False),
        key("up", "move(0,-1)", "up", "select the rank above", show=False),
        key("down", "move(0,1)", "down", "select the rank below", show=False),
    ]

    def body(self) -> Iterable[Widget]:
        yield RankGrid(self.app_state)
        yield TrainingStrip(self.app_state, name="training-strip")
        yield AlertStrip(self.app_state, name="alerts")

    def tick(self) -> None:
        grid = self.query_one(RankGrid)
        self.set_class(self._has_room(grid), "roomy")
        super().tick()
        grid.tick()

    def _has_room(self, grid: RankGrid) -> bool:
        """Return whether the training strip fits without a smaller kind of picture of the ranks."""
        width, height = grid.size
        if self.has_class("roomy"):
            height += STRIP_LINES
        ranks, view = len(self.app_state.model.ranks), self.app_state.view
        if not ranks or width < FEWEST_COLUMNS or height < 4 * STRIP_LINES:
            return False
        before, after = plan(ranks, width, height, view), plan(ranks, width, height - STRIP_LINES, view)
        return before.mode == after.mode and before.rows * before.columns <= after.rows * after.columns

    def action_move(self, dx: int, dy: int) -> None:
        self.query_one(RankGrid).move(dx, dy)

    def action_zoom(self) -> None:
        self.app_state.toggle_zoom()
        self.tick()

    def action_view(self) -> None:
        self.app_state.next_view()
        self.app_state.show_message(f"view: {self.app_state.view}")
        self.tick()
