"""The list of runs, live and recorded, of which enter opens one; and the jobs of a run."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widget import Widget

from ...protocol.errors import FtmonError
from ...protocol.run.rundir import RunDir, home
from ...protocol.text import duration
from ..model.runs import JobRow, RunEntry, RunList, job_row, job_rows
from ..widgets.base import Canvas, Listing, Prompt
from ..widgets.drawing import Line
from ..widgets.state import AppState
from ..widgets.tables import detail_lines, head_line, job_line
from .base import ALERTS, BACK, COMMON_KEYS, LOGS, ListScreen, MonitorScreen, key

POLL_SECONDS = 1.0

NEED_A_RUN = frozenset(
    binding.action.removeprefix("app.").split("(")[0] for binding in COMMON_KEYS if isinstance(binding, Binding)
) - {"help", "detach", "theme", "command_palette", "redraw", "suspend_process"}


_NO_RUNS = "no runs yet: start one with 'ftmon demo' or 'ftmon run -- COMMAND'"


class RunRows(Listing[RunEntry]):
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
            ids = [entry.id for entry in self.items()]
            self.selected = ids.index(chosen.id) if chosen.id in ids else self.selected

    def filter(self, text: str) -> None:
        """Show only runs that contain ``text``; an empty text shows all."""
        self.text = text
        self.empty = f"no run contains '{text}'; / changes the filter" if text else _NO_RUNS

    def items(self) -> list[RunEntry]:
        wanted = self.text.casefold()
        return [
            e for e in self._entries if wanted in f"{e.id} {e.kind} {e.condition} {e.subject} {e.reason}".casefold()
        ]

    def head(self, width: int) -> list[Line]:
        theme = self.theme
        words = f"   {'run':<{self._name_width(width)}}{'state':<12}{'ranks':>6}{'step':>9}{'took':>11}{'started':>16}"
        live = sum(entry.live for entry in self._entries)
        title = Line(" ftmon", theme.style("accent", bold=True)).add("  runs", theme.style("text", bold=True))
        title.add(f"   {live} live, {len(self._entries) - live} recorded   {home() / 'runs'}", theme.style("dim"))
        return [title, *self._details(width), Line(words, theme.style("dim"))]

    def _details(self, width: int) -> list[Line]:
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

    def item(self, item: RunEntry, width: int, selected: bool) -> Line:
        entry, theme = item, self.theme
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


class JobList(Listing[JobRow]):
    """All jobs, by number."""

    empty = "no job yet: none of its ranks has reported"
    follow = True

    def items(self) -> list[JobRow]:
        return job_rows(self.app_state.model.jobs, self.app_state.model.now)

    def head(self, width: int) -> list[Line]:
        return [head_line(width, self.theme)]

    def item(self, item: JobRow, width: int, selected: bool) -> Line:
        return job_line(item, width, self.theme, selected, item.job.number == self.app_state.model.job)


class JobDetail(Canvas):
    """The details of the selected job."""

    number = 0
    top = 0

    def draw(self, width: int, height: int) -> list[Line]:
        model = self.app_state.model
        if self.number not in model.jobs:
            return []
        row = job_row(model.jobs, self.number, model.now)
        lines = detail_lines(row, model.losses_of(self.number), width, self.theme)
        self.top = max(0, min(self.top, len(lines) - height))
        shown = lines[self.top : self.top + height]
        below = len(lines) - self.top - height
        if below > 0:
            shown[-1] = Line(f" {below + 1} more lines: page down", self.theme.style("dim"))
        return shown


class JobsScreen(MonitorScreen):
    """The results of each job."""

    NAME = "jobs"
    WHAT = (
        "The jobs of the run: each is one process group of ranks. A driver script that starts deepspeed or torchrun "
        "once per configuration has one job per start, torchrun --max-restarts one per attempt. Each line shows the "
        "words in which the jobs' commands differ, the mean step time without the first step, the mean of the last "
        "losses, and the highest peak of any rank; oom marks a job that ran out of memory. Below is the selected job: "
        "why it failed, its loss, and each rank's highest memory by phase. All other screens show the job in bold."
    )
    TITLE_LINES = 1
    BINDINGS: ClassVar[list[BindingType]] = [
        BACK,
        key("up", "move(-1)", "previous", "the job before"),
        key("down", "move(1)", "next job", "the job after"),
        key("pagedown", "scroll(1)", "scroll", "further down in the selected job"),
        key("pageup", "scroll(-1)", "scroll up", "further up in it", show=False),
        *(ALERTS, LOGS),
    ]

    def body(self) -> Iterable[Widget]:
        yield JobList(self.app_state, name="jobs")
        yield JobDetail(self.app_state, name="job")

    def tick(self) -> None:
        listing, detail = self.query_one(JobList), self.query_one(JobDetail)
        listing.styles.height = min(len(self.app_state.model.jobs) + 2, max(4, self.size.height // 3))
        listing.tick()
        if (row := listing.chosen) is not None:
            detail.number = row.job.number
        super().tick()

    def action_move(self, delta: int) -> None:
        self.query_one(JobList).move(delta)
        self.query_one(JobDetail).top = 0
        self.tick()

    def action_scroll(self, direction: int) -> None:
        self.query_one(JobDetail).top += direction * max(1, self.query_one(JobDetail).size.height - 2)
        self.tick()
