"""The memory of one rank or of all ranks side by side, and the allocator screen."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from ...protocol.messages import control
from ..model.oom import spike_alert, verdict_of
from ..model.rank import RankModel
from ..model.waterfall import RankBar, Waterfall, next_phase, rank_bars
from ..widgets import memory
from ..widgets.base import Canvas
from ..widgets.drawing import Line, wrap
from ..widgets.plots import Chart, Series, chart_lines
from ..widgets.ranks import name
from ..widgets.state import AppState, rank_view
from .base import ALERTS, BACK, EVENTS, MEMORY, TALL, SelectedRankScreen, hidden, key
from .dialogs import CommandStatus

_CHART_LINES = 14  # minimum remaining rows for the chart of peaks over steps


class MemoryCanvas(Canvas):
    """The screen between summary and keys."""

    choice = memory.MemoryChoice()
    bars = False
    top = 0

    def key(self) -> object:
        model, rank = self.app_state.model, self.app_state.rank
        if rank is None:
            return None
        title = id(rank), rank.hello, self.choice
        if self.bars:
            return title, self.app_state.selected, self._bars_of(), self._capacity
        found = rank.memory.latest, rank.memory.highest, tuple(rank.memory.causes.values()), rank.memory.ranking
        steps, alerts = (rank.last, len(rank.steps)), model.alerts
        around = model.device_of(rank), id(alerts), alerts.version, model.prediction, self._why()
        return title, self.top, steps, found, around

    def draw(self, width: int, height: int) -> list[Line]:
        rank, theme = self.app_state.rank, self.theme
        if rank is None:
            return [Line(" no rank yet", theme.style("dim"))]
        view = rank_view(self.app_state.model, rank, with_host=True)
        lines = [memory.memory_title_line(rank, name(view, theme), width, theme)]
        if self.bars:
            return [*lines, *self._bars(width, height - 1)]
        fall = memory.fall_of(rank, self.choice, self.app_state.model.device_of(rank))
        if fall is None:
            text = "no step is finished yet: the first one gives its peaks by phase"
            return [*lines, *(Line(f" {row}", theme.style("dim")) for row in wrap(text, width - 2))]
        lines += memory.head_lines(rank, fall, self.choice, width, theme)
        cause = memory.cause_of(rank, fall.phase)
        alert = spike_alert(self.app_state.model.alerts, rank.rank, cause.phase) if cause is not None else None
        prediction = self.app_state.model.prediction
        body = memory.body_lines(rank, fall, self.choice, verdict_of(alert), self._why(), width, theme, prediction)
        room = height - len(lines)
        if len(body) > room:
            self.top = max(0, min(self.top, len(body) - room))
            more = self.top + room < len(body)
            body = body[self.top : self.top + room]
            if more:
                body[-1] = Line(f"   {theme.glyphs.ellipsis} page down for more", theme.style("dim"))
        else:
            self.top = 0
            body += self._chart(rank, width, room - len(body) - 1)
        return [*lines, *body]

    def _bars(self, width: int, height: int) -> list[Line]:
        bars, phase, selected = self._bars_of(), self.choice.phase, self.app_state.selected
        if not bars:
            return [Line(" no step is finished yet", self.theme.style("dim"))]
        return memory.peak_bars(bars, phase, selected, self._capacity, width, height, self.theme)

    def _bars_of(self) -> list[RankBar]:
        return rank_bars(self.app_state.model.ranks.values(), self.choice.phase)

    @property
    def _capacity(self) -> int:
        """Of the smallest device, bytes; 0: not known."""
        ranks = self.app_state.model.ranks.values()
        return min((rank.capacity_bytes for rank in ranks if rank.capacity_bytes), default=0)

    def _why(self) -> str:
        source = self.app_state.source
        if source is not None and source.transport.mode == "replay":
            return "No step was analysed up to here: the recording has no composition of this rank yet."
        if self.app_state.can_act:
            return (
                "Not analysed yet. The probe captures one of the first steps, then one from time to time, and one "
                "after a spike; c captures the next step."
            )
        return "Not analysed yet. The probe captures one of the first steps, then another one periodically."

    def _chart(self, rank: RankModel, width: int, height: int) -> list[Line]:
        steps = [step for step in rank.steps if step.phases]
        if height < _CHART_LINES or len(steps) < 2:
            return []
        ranking = rank.memory.ranking
        names = [mark.phase for mark in ranking.standing[:3]] if ranking is not None else []
        steps = [step for step in steps if all(_is_read(step, each) for each in names)]
        series = [
            Series(each, self.theme.phase(each), [_peak(step, each) for step in steps]) for each in reversed(names)
        ]
        if len(steps) < 2 or not series:
            return []
        chart = Chart("peaks by phase", "GiB", [step.step for step in steps], series)
        return [Line(), *chart_lines(chart, width, min(height, 24), self.theme)]


def _is_read(step: Any, phase: str) -> bool:
    record = step.phase(phase)
    return record is not None and not record.coarse


def _peak(step: Any, phase: str) -> float:
    return step.phase(phase).peak_span.peak / 2**30


class MemoryScreen(SelectedRankScreen):
    """The composition of a step's peak."""

    NAME = "memory"
    WHAT = (
        "The composition of a step's memory peak. Each bar begins where the one above it ends: memory allocated by "
        "PyTorch at the peak of the selected phase, by purpose, then memory reserved but unused, memory of the process "
        "outside PyTorch, and other processes. 'not attributed' is allocated memory of unknown purpose, 'unexplained' "
        "is memory that the device reports as used and no row covers. Below: the phase that sets the run's peak, at "
        "which batch lengths, and the code that allocated the last spike. For runs of ftmon's trainer on GPUs, the "
        "column 'predicted' shows a dry run of the configuration at that batch length. v shows all ranks."
    )
    LEGEND = ("parts",)
    TITLE_LINES = 1
    BINDINGS: ClassVar[list[BindingType]] = [
        BACK,
        key("right,tab", "phase(1)", "phase", "the next phase of the step", bar="tab"),
        key("left,shift+tab", "phase(-1)", "phase before", "the phase before", show=False),
        key("up", "rank(-1)", "previous", "the rank before", show=False),
        key("v", "view", "ranks", "one rank's waterfall, or the bars of all ranks side by side"),
        key("c", "compose", "parts", "capture the next step of this rank"),
        key("x", "arm", "stacks", "record Python stacks of the selected phase at the next step"),
        key("t", "take", "snapshot", "write a memory snapshot of this rank into the run's folder"),
        key("down", "rank(1)", "rank", "the next rank"),
        key("h", "highest", "highest", "the analysed step with the highest peak, or the latest"),
        key("enter", "unfold", "all stacks", "all stacks of the cause with all frames, or the first ones", show=False),
        key("pageup", "page(-1)", "page up", "scroll up", show=False),
        key("pagedown", "page(1)", "page down", "scroll down", show=False),
        *(EVENTS, hidden(ALERTS)),
    ]

    def __init__(self, app_state: AppState, phase: str = "") -> None:
        super().__init__(app_state)
        self._canvas = MemoryCanvas(app_state, name="body")
        self._canvas.choice = memory.MemoryChoice(phase=phase)
        self._asking = CommandStatus(app_state)

    def body(self) -> Iterable[Widget]:
        yield self._canvas

    def tick(self) -> None:
        self._asking.tick()
        super().tick()

    def _choose(self, **changes: Any) -> None:
        self._canvas.choice = replace(self._canvas.choice, **changes)
        self._canvas.top = 0
        self.tick()

    def _fall(self) -> Waterfall | None:
        rank = self.app_state.rank
        return memory.fall_of(rank, self._canvas.choice, None) if rank is not None else None

    @property
    def phase(self) -> str:
        """The visible phase; empty before the first step."""
        fall = self._fall()
        return fall.phase if fall is not None else ""

    def action_phase(self, direction: int) -> None:
        """Select another phase; with the bars of all ranks, left and right select another rank."""
        fall = self._fall()
        phases = [phase for phase, _ in fall.standing] if fall is not None else []
        self._choose(phase=next_phase(phases, self.phase, direction))

    def action_rank(self, delta: int) -> None:
        self._canvas.top = 0
        super().action_rank(delta)

    def action_view(self) -> None:
        self._canvas.bars = not self._canvas.bars
        self.tick()

    def action_highest(self) -> None:
        highest = not self._canvas.choice.highest
        self.app_state.show_message("the highest analysed peak" if highest else "the latest analysed step")
        self._choose(highest=highest)

    def action_unfold(self) -> None:
        """Show all stacks, or the first; from the bars, the rank's waterfall."""
        if self._canvas.bars:
            self._canvas.bars = False
            self.tick()
        else:
            self._choose(unfolded=not self._canvas.choice.unfolded)

    def action_page(self, direction: int) -> None:
        self._canvas.top = max(0, self._canvas.top + direction * max(1, self._canvas.size.height - 4))
        self.tick()

    def action_compose(self) -> None:
        rank = self.app_state.selected
        self._asking.ask(control.Compose([rank]), f"rank {rank}: the next step is captured")

    def action_arm(self) -> None:
        rank, phase = self.app_state.selected, self.phase
        where = f"the next step's {phase}" if phase else "the next step"
        self._asking.ask(control.Arm([rank], phase), f"rank {rank}: stacks are recorded in {where}")

    def action_take(self) -> None:
        rank = self.app_state.selected
        self._asking.ask(control.Snapshot([rank]), f"rank {rank}: writing a memory snapshot")


_HIGH = 46  # minimum rows for graphs of five rows


class EventsCanvas(Canvas):
    """The screen between summary and keys."""

    def draw(self, width: int, height: int) -> list[Line]:
        model, rank, theme = self.app_state.model, self.app_state.rank, self.theme
        if rank is None:
            return [Line(" no rank yet", theme.style("dim"))]
        view = rank_view(model, rank, with_host=True)
        lines = [memory.title_line(rank, name(view, theme), width, theme)]
        if rank.on_cpu:
            text = "On a CPU there is no caching allocator to watch: m shows the resident set by phase."
            return [*lines, *(Line(f" {row}", theme.style("dim")) for row in wrap(text, width - 2))]
        if rank.allocator.last is None:
            lines += [Line(f" {row}", theme.style("dim")) for row in wrap(self._empty(), width - 2)]
        high = 5 if height >= _HIGH else 2 if height >= TALL else 1
        lines += memory.phase_lines(rank, width, theme)
        lines += memory.course_lines(rank, width, high, theme)
        lines += memory.unused_lines(rank, width, high, theme)
        lines += [free] if (free := memory.free_line(rank, width, theme)) is not None else []
        lines.append(memory.retry_line(rank, width, theme))
        return [*lines, *memory.rank_lines(list(model.ranks.values()), rank.rank, height - len(lines), theme)]

    def _empty(self) -> str:
        source = self.app_state.source
        if source is not None and source.transport.mode == "replay":
            return "No step was sampled up to here."
        return (
            "No step is sampled yet. The probe reads the allocator's own trace of some steps (numbers only, within "
            "its time budget); a run started with --no-allocator-events has none."
        )


class EventsScreen(SelectedRankScreen):
    """Shows the allocator's activity."""

    NAME = "events"
    WHAT = (
        "What PyTorch's CUDA allocator does, from its own trace of sampled steps: blocks and bytes allocated in each "
        "phase and per second of it, the largest single allocation, and the growth of reserved memory. The graphs "
        "cover the sampled steps. 'unused of reserved' covers the whole run: memory reserved but not allocated at the "
        "peaks, mostly rounding and fragmentation. A retry means that the device was full: the allocator freed its "
        "cache and waited for the device before it tried again."
    )
    TITLE_LINES = 1
    BINDINGS: ClassVar[list[BindingType]] = [
        BACK,
        key("up,left", "rank(-1)", "previous", "the rank before"),
        key("down,right", "rank(1)", "next rank", "the rank after"),
        *(MEMORY, ALERTS),
    ]

    def body(self) -> Iterable[Widget]:
        yield EventsCanvas(self.app_state, name="body")
