"""The output of all ranks, filtered by rank and text, following the end."""

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from ..model.alerts import LogEntry
from ..widgets.alerts import log_line
from ..widgets.base import Listing, Prompt
from ..widgets.drawing import Line
from ..widgets.theme import ruled
from .base import ALERTS, BACK, LINE_KEYS, ListScreen, key


class LogList(Listing[LogEntry]):
    """The lines that pass the filter."""

    follow = True
    empty = "no lines"
    rank: int | None = None
    text = ""
    _entries: list[LogEntry]
    _made_of: object = None

    def key(self) -> object:
        logs = self.app_state.model.logs
        return id(logs), logs.version, self.rank, self.text, self.follow, self.selected

    def items(self) -> list[LogEntry]:
        """Return the lines that pass the filter, cached until log or filter changes."""
        logs = self.app_state.model.logs
        made_of = (id(logs), logs.version, self.rank, self.text)
        if made_of != self._made_of:
            self._made_of = made_of
            self._entries = logs.select(rank=self.rank, text=self.text)
        return self._entries

    def item(self, item: LogEntry, width: int, selected: bool) -> Line:
        return log_line(item, width, self.theme, self.rank is None, selected and not self.follow)

    def head(self, width: int) -> list[Line]:
        theme = self.theme
        dim = theme.style("dim")
        who = "all ranks" if self.rank is None else "the launcher" if self.rank < 0 else f"rank {self.rank}"
        left = Line(f" output of {who} ", theme.style("text", bold=True))
        left.add(f"{len(self.items()):,} lines ", dim)
        if self.text:
            left.add(f"with {self.text!r} ", theme.style("accent"))
        right = Line(
            " following " if self.follow else " held: f follows ", theme.style("good" if self.follow else "dim")
        )
        return [ruled(left, right, width, theme)]


class LogsScreen(ListScreen):
    """The output of the run."""

    NAME = "logs"
    WHAT = (
        "Output of the ranks and the launcher, oldest first. Left and right select a rank; / filters by text. The "
        "view follows the end until you scroll up; f follows again."
    )
    TITLE_LINES = 1
    BINDINGS: ClassVar[list[BindingType]] = [
        BACK,
        key("slash", "filter", "filter", "show only lines that contain a text"),
        key("left", "whose(-1)", "rank", "the output of another rank"),
        key("right", "whose(1)", "next rank", "the output of the next rank", show=False),
        key("f", "follow", "follow", "follow the end"),
        *LINE_KEYS,
        key("home", "end(0)", "first", "the first line", show=False),
        key("end", "end(-1)", "last", "the last line", show=False),
        ALERTS,
    ]

    def body(self) -> Iterable[Widget]:
        yield LogList(self.app_state, name="logs")
        yield Prompt(self.app_state, "filter", "words; enter keeps it, escape ends it", name="filter")

    def action_whose(self, delta: int) -> None:
        """Select the next source: all ranks, the launcher, rank 0, 1, ..."""
        lines = self.query_one(LogList)
        model = self.app_state.model
        # A rank that failed before its first message has lines, although it is not in the model's ranks.
        order: list[int | None] = [None, -1, *sorted({*model.ranks, *model.logs.ranks} - {-1})]
        index = order.index(lines.rank) if lines.rank in order else 0
        lines.rank = order[(index + delta) % len(order)]
        lines.tick()

    def action_follow(self) -> None:
        self.query_one(LogList).follow = True
        self.tick()

    def action_end(self, index: int) -> None:
        lines = self.query_one(LogList)
        lines.follow = index < 0
        lines.go_to(index)

    def filter_by(self, text: str) -> None:
        self.query_one(LogList).text = text
