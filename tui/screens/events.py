"""The allocator screen: rates by phase, growth, retries and fragmentation of a rank, and a list of all ranks."""

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from ..widgets.base.canvas import Canvas
from ..widgets.drawing.line import Line
from ..widgets.drawing.wrapping import wrap
from ..widgets.memory.events_view import (
    course_lines,
    free_line,
    phase_lines,
    rank_lines,
    retry_line,
    title_line,
    unused_lines,
)
from ..widgets.ranks.card import name
from ..widgets.state.view_models import rank_view
from .base import TALL, SelectedRankScreen, key

_HIGH = 46
"""Minimum rows for graphs of five rows."""


class EventsCanvas(Canvas):
    """The screen between summary and keys."""

    def key(self) -> object:
        model, rank = self.app_state.model, self.app_state.rank
        if rank is None:
            return ()
        others = sum(each.allocator.version for each in model.ranks.values())
        return id(rank), rank.allocator.version, id(rank.last), others

    def draw(self, width: int, height: int) -> list[Line]:
        model, rank, theme = self.app_state.model, self.app_state.rank, self.theme
        if rank is None:
            return [Line(" no rank yet", theme.style("dim"))]
        view = rank_view(model, rank, with_host=True)
        lines = [title_line(rank, name(view, theme), width, theme)]
        if rank.on_cpu:
            text = "On a CPU there is no caching allocator to watch: m shows the resident set by phase."
            return [*lines, *(Line(f" {row}", theme.style("dim")) for row in wrap(text, width - 2))]
        if rank.allocator.last is None:
            lines += [Line(f" {row}", theme.style("dim")) for row in wrap(self._empty(), width - 2)]
        high = 5 if height >= _HIGH else 2 if height >= TALL else 1
        lines += phase_lines(rank, width, theme)
        lines += course_lines(rank, width, high, theme)
        lines += unused_lines(rank, width, high, theme)
        lines += [free] if (free := free_line(rank, width, theme)) is not None else []
        lines.append(retry_line(rank, width, theme))
        return [*lines, *rank_lines(list(model.ranks.values()), rank.rank, height - len(lines), theme)]

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
        key("escape", "app.back", "back", "back to the overview"),
        key("up,left", "rank(-1)", "previous", "the rank before"),
        key("down,right", "rank(1)", "next rank", "the rank after"),
        key("m", "app.memory", "memory", "where the memory of a step's peak goes"),
        key("a", "app.alerts", "alerts", "all alerts, each with its evidence"),
    ]

    def body(self) -> Iterable[Widget]:
        yield EventsCanvas(self.app_state, name="body")
