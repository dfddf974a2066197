"""The jobs of a run: the results of a driver script's trainings."""

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from ..model.jobs import JobRow, job_rows
from ..widgets.base.canvas import Canvas
from ..widgets.base.listing import Listing
from ..widgets.drawing.line import Line
from ..widgets.jobs_view import detail_lines, head_line, job_line
from .base import MonitorScreen, key


class JobList(Listing):
    """All jobs, by number."""

    empty = "no job yet: none of its ranks has reported"
    follow = True

    def rows(self) -> list[JobRow]:
        model = self.app_state.model
        return job_rows(model.jobs, model.now)

    def key(self) -> object:
        """Return a value that changes with the jobs, the selection, and while a job runs with each second."""
        model = self.app_state.model
        return model.job, tuple(model.jobs.values()), self.selected, int(model.now)

    def count(self) -> int:
        return len(self.app_state.model.jobs)

    def head(self, width: int) -> list[Line]:
        return [head_line(width, self.theme)]

    def item(self, index: int, width: int, selected: bool) -> Line:
        row = self.rows()[index]
        return job_line(row, width, self.theme, selected, row.number == self.app_state.model.job)


class JobDetail(Canvas):
    """The details of the selected job."""

    number = 0
    top = 0

    def key(self) -> object:
        model = self.app_state.model
        losses = model.losses_of(self.number)
        return self.number, self.top, model.jobs.get(self.number), losses.version if losses is not None else 0

    def draw(self, width: int, height: int) -> list[Line]:
        model = self.app_state.model
        job = model.jobs.get(self.number)
        if job is None:
            return []
        row = next(row for row in job_rows(model.jobs, model.now) if row.number == self.number)
        losses = model.losses_of(self.number)
        lines = detail_lines(job, row, losses.means(60) if losses is not None else [], width, self.theme)
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
        key("escape", "app.back", "back", "back to the overview"),
        key("up", "move(-1)", "previous", "the job before"),
        key("down", "move(1)", "next job", "the job after"),
        key("pagedown", "scroll(1)", "scroll", "further down in the selected job"),
        key("pageup", "scroll(-1)", "scroll up", "further up in it", show=False),
        key("a", "app.alerts", "alerts", "all alerts, each with its evidence"),
        key("l", "app.logs", "logs", "the output of all ranks"),
    ]

    def body(self) -> Iterable[Widget]:
        yield JobList(self.app_state, name="jobs")
        yield JobDetail(self.app_state, name="job")

    def tick(self) -> None:
        listing, detail = self.query_one(JobList), self.query_one(JobDetail)
        listing.styles.height = min(listing.count() + 2, max(4, self.size.height // 3))
        listing.tick()
        numbers = list(self.app_state.model.jobs)
        if numbers:
            detail.number = numbers[max(0, min(listing.selected, len(numbers) - 1))]
        super().tick()

    def action_move(self, delta: int) -> None:
        self.query_one(JobList).move(delta)
        self.query_one(JobDetail).top = 0
        self.tick()

    def action_scroll(self, direction: int) -> None:
        self.query_one(JobDetail).top += direction * max(1, self.query_one(JobDetail).size.height - 2)
        self.tick()
