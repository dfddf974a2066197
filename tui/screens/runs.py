"""The list of runs, live and recorded; enter opens one."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widget import Widget

from ...protocol.errors import FtmonError
from ...protocol.run.run_store import home
from ...protocol.run.rundir import RunDir
from ...protocol.text import duration
from ..model.runs import RunEntry, RunList
from ..widgets.base.listing import Listing
from ..widgets.base.prompt import Prompt
from ..widgets.drawing.line import Line
from ..widgets.state.app_state import AppState
from .base import COMMON_KEYS, ListScreen, key

POLL_SECONDS = 1.0
"""Seconds between reads of the run directories."""

NEED_A_RUN = frozenset(
    binding.action.removeprefix("app.").split("(")[0] for binding in COMMON_KEYS if isinstance(binding, Binding)
) - {"help", "detach", "theme", "command_palette", "redraw", "suspend_process"}


_NO_RUNS = "no runs yet: start one with 'ftmon demo' or 'ftmon run -- COMMAND'"


class RunRows(Listing):
    """The runs that pass the filter, newest first."""

    empty = _NO_RUNS
    text = ""

    def __init__(self, app_state: AppState, name: str) -> None:
        super().__init__(app_state, name=name)
        self._list = RunList()
        self._entries: list[RunEntry] = []
        self._read_at = 0.0

    def refresh_entries(self, now: float) -> None:
        """Read the run directories again if that is due; the selection stays on its run."""
        if now - self._read_at < POLL_SECONDS:
            return
        chosen = self.chosen
        self._read_at = now
        try:
            self._entries = self._list.entries()
        except FtmonError:  # the directory of runs was changed: commands report the problem
            self._entries = []
        if chosen is not None:
            ids = [entry.id for entry in self.entries()]
            self.selected = ids.index(chosen.id) if chosen.id in ids else self.selected

    def filter(self, text: str) -> None:
        """Show only runs that contain ``text``; an empty text shows all."""
        self.text = text
        self.empty = f"no run contains '{text}'; / changes the filter" if text else _NO_RUNS

    def entries(self) -> list[RunEntry]:
        wanted = self.text.casefold()
        return [
            e for e in self._entries if wanted in f"{e.id} {e.kind} {e.condition} {e.subject} {e.reason}".casefold()
        ]

    @property
    def chosen(self) -> RunEntry | None:
        entries = self.entries()
        return entries[min(self.selected, len(entries) - 1)] if entries else None

    def key(self) -> object:
        return (
            self.entries(),
            self.text,
            self.selected,
            int(self._read_at) if any(e.live for e in self._entries) else 0,
        )

    def count(self) -> int:
        return len(self.entries())

    def head(self, width: int) -> list[Line]:
        theme = self.theme
        words = f"   {'run':<{self._name_width(width)}}{'state':<12}{'ranks':>6}{'step':>9}{'took':>11}{'started':>16}"
        live = sum(entry.live for entry in self._entries)
        title = Line(" ftmon", theme.style("accent", bold=True)).add("  runs", theme.style("text", bold=True))
        title.add(f"   {live} live, {len(self._entries) - live} recorded   {home() / 'runs'}", theme.style("dim"))
        return [title, *self._details(width), Line(words, theme.style("dim"))]

    def _details(self, width: int) -> list[Line]:
        """Draw the selected run: its losses, what it trains, and why it failed."""
        entry, theme = self.chosen, self.theme
        if entry is None:
            return [Line(), Line()]
        losses = [("loss", entry.loss), ("evaluation loss", entry.evaluation_loss)]
        words = [f"{name} {value:.4f}" for name, value in losses if value is not None]
        about = Line(f" {theme.cut('  '.join([*words, entry.subject]), width - 2)}", theme.style("text"))
        reason = theme.cut(entry.reason, width - 2)
        return [about, Line(f" {reason}" if reason else "", theme.style("error"))]

    @staticmethod
    def _name_width(width: int) -> int:
        return max(20, min(48, width - 58))

    def item(self, index: int, width: int, selected: bool) -> Line:
        entry, theme = self.entries()[index], self.theme
        ground = "raised" if selected else "background"
        names = self._name_width(width)
        glyph, tone = theme.state(entry.condition if entry.condition != "lost" else "unreachable")
        line = Line(f" {theme.glyphs.selected if selected else ' '} ", theme.style("accent", ground, bold=True))
        name = theme.cut(entry.id, names - 1)
        line.add(f"{name:<{names}}", theme.style("text", ground, bold=entry.live))
        line.add(f"{glyph} {entry.condition:<10}", theme.style(tone, ground))
        dim = theme.style("dim", ground)
        line.add(f"{entry.ranks or '':>6}{entry.step or '':>9}", theme.style("text", ground))
        line.add(f"{duration(entry.duration_s(time.time())):>11}", dim)
        line.add(f"{time.strftime('%d %b %H:%M', time.localtime(entry.created)):>16}", dim)
        note = entry.problem or entry.missing or entry.reason or entry.subject
        line.add("  " + theme.cut(note, max(0, width - line.width - 2)), theme.style("faint", ground))
        return line.fit(width, theme.style("text", ground))


class RunsScreen(ListScreen):
    """Live and recorded runs of this user on this host."""

    NAME = "runs"
    WHAT = (
        "The runs of this user on this host, the newest first. A live run opens at its live end, an ended run as a "
        "replay. lost: the end of the run was not recorded."
    )
    HIDDEN = NEED_A_RUN
    BINDINGS: ClassVar[list[BindingType]] = [
        key("enter", "open_chosen", "open", "open the selected run"),
        key("slash", "filter", "filter", "show only runs that contain a text"),
        key("up", "move(-1)", "up", "the run above", show=False),
        key("down", "move(1)", "down", "the run below", show=False),
        key("pageup", "page(-1)", "page up", "a screen up", show=False),
        key("pagedown", "page(1)", "page down", "a screen down", show=False),
        key("escape", "app.back", "back", "back to the run that is open", show=False),
    ]

    @dataclass
    class Opened(Message):
        """A run was selected."""

        run: RunDir

    def compose(self) -> Iterable[Widget]:
        """Return the widgets without summary and replay bar, as no run is open."""
        for widget in super().compose():
            if widget.id not in ("summary", "replay"):
                yield widget

    def body(self) -> Iterable[Widget]:
        yield RunRows(self.app_state, name="runs")
        yield Prompt(self.app_state, "filter", "words; enter keeps it, escape ends it", name="filter")

    def tick(self) -> None:
        self.query_one(RunRows).refresh_entries(time.monotonic())
        super().tick()

    def action_open_chosen(self) -> None:
        entry = self.query_one(RunRows).chosen
        if entry is not None:
            self.post_message(self.Opened(RunDir(home() / "runs" / entry.id)))

    def filter_by(self, text: str) -> None:
        self.query_one(RunRows).filter(text)
