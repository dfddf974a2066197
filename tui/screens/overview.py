"""The overview of all ranks with the latest alerts, and one rank in detail."""

from collections.abc import Iterable
from itertools import zip_longest
from typing import ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from ..widgets.alerts import log_line
from ..widgets.base import AlertStrip, Canvas
from ..widgets.drawing import Line, ruled
from ..widgets.memory import phase_table
from ..widgets.plots import Chart, Series, chart_lines
from ..widgets.ranks import RankGrid, figure_lines, grid_plan, title
from ..widgets.state import rank_view
from ..widgets.training import FEWEST_COLUMNS, STRIP_LINES, TrainingStrip
from .base import ALERTS, BACK, EVENTS, LOGS, MEMORY, STACKS, TRAINING, MonitorScreen, SelectedRankScreen, hidden, key


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
        *(TRAINING, ALERTS, MEMORY, LOGS, STACKS, hidden(EVENTS)),
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
        self.set_class(self._has_room(self.query_one(RankGrid)), "roomy")
        super().tick()

    def _has_room(self, grid: RankGrid) -> bool:
        width, height = grid.size
        if self.has_class("roomy"):
            height += STRIP_LINES
        ranks, view = len(self.app_state.model.ranks), self.app_state.view
        if not ranks or width < FEWEST_COLUMNS or height < 4 * STRIP_LINES:
            return False
        before, after = grid_plan(ranks, width, height, view), grid_plan(ranks, width, height - STRIP_LINES, view)
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


class RankHead(Canvas):
    """Title, figures and the phase table."""

    def draw(self, width: int, height: int) -> list[Line]:
        rank = self.app_state.rank
        if rank is None:
            return [Line(" no rank yet", self.theme.style("dim"))]
        view = rank_view(self.app_state.model, rank, with_host=True)
        lines = [title(view, width, self.theme, True)]
        lines += figure_lines(self.app_state.model, rank, view, width, self.theme)
        table = phase_table(rank.phases, width, self.theme)
        if rank.last is not None and rank.last.memory_every > 1 and rank.read is not None:
            words = f" read by phase in 1 of {rank.last.memory_every} steps, above in step {rank.read.step:,}"
            table.append(Line(words, self.theme.style("dim")))
        if len(lines) + len(table) < height:
            lines.append(Line())
        return [*lines, *table][:height]


class RankCharts(Canvas):
    """Step time, and each step's peak with reserved or resident memory behind it, over the recent steps."""

    def key(self) -> object:
        rank = self.app_state.rank
        return rank and (id(rank), rank.last, len(rank.steps))

    def draw(self, width: int, height: int) -> list[Line]:
        rank, half = self.app_state.rank, width // 2
        steps = list(rank.steps) if rank else []
        times = Series("step", "accent", [step.host_us / 1000 for step in steps])
        left = Chart("step time", "ms", [step.step for step in steps], [times], floor=True)
        steps = [step for step in steps if step.phases]
        cpu = rank is not None and rank.on_cpu
        peaks = [max(each.peak_span.peak for each in step.phases) / 2**30 for step in steps]
        behind = [[each.allocated.end if cpu else each.reserved.peak for each in step.phases] for step in steps]
        series = [
            Series("resident peak" if cpu else "peak", "peak", peaks),
            Series("in use" if cpu else "reserved", "allocated", [max(sizes) / 2**30 for sizes in behind]),
        ]
        right = Chart("memory", "GiB", [step.step for step in steps], series)
        pairs = zip_longest(
            chart_lines(left, half, height, self.theme), chart_lines(right, width - half, height, self.theme)
        )
        return [(one or Line()).fit(half, self.theme.base).join(other or Line()) for one, other in pairs]


class RankLog(Canvas):
    """The last lines of the rank's output."""

    def draw(self, width: int, height: int) -> list[Line]:
        theme = self.theme
        lines = [ruled(Line(" output ", theme.style("dim")), Line(), width, theme)]
        entries = self.app_state.model.logs.select(rank=self.app_state.selected, limit=height - 1)
        if not entries:
            return [*lines, Line(" no output yet", theme.style("dim"))]
        return [*lines, *(log_line(entry, width, theme, with_rank=False) for entry in entries)]


class RankScreen(SelectedRankScreen):
    """The selected rank."""

    NAME = "rank"
    WHAT = (
        "One rank: its last step phase by phase, with the memory at the start and the end of each phase and its peak. "
        "Growth is memory that stays allocated (the first optimizer step creates Adam's states), transient is memory "
        "freed within the phase. The charts show recent steps. Left and right select the neighbouring ranks."
    )
    LEGEND = ("phases", "states")
    TITLE_LINES = 1
    BINDINGS: ClassVar[list[BindingType]] = [
        BACK,
        key("left,up", "rank(-1)", "previous", "the rank before"),
        key("right,down", "rank(1)", "next rank", "the rank after"),
        *(hidden(TRAINING), ALERTS, MEMORY, LOGS, STACKS, hidden(EVENTS)),
    ]

    def body(self) -> Iterable[Widget]:
        yield RankHead(self.app_state, name="rank-head")
        yield RankCharts(self.app_state, name="charts")
        yield RankLog(self.app_state, name="rank-log")
