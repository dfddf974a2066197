"""Reads a whole run once at a coarse resolution, so that a seek can show the run's past at once."""

import contextlib
from collections.abc import Callable
from math import ceil, floor, inf

from ...protocol.errors import FtmonError
from ...protocol.messages.jobs import Job
from ...protocol.messages.telemetry import AllocatorEvents
from ...protocol.messages.wire import Frame
from ...protocol.recording.phase_peaks import PeakMark
from ...protocol.recording.results import RecordingInfo
from ..model.events import KEPT
from ..model.max_pyramid import EMPTY, RATIO, Level
from ..model.series import StepSeries
from ..model.training import TrainingHistory
from .history import History

MAX_COLUMNS = 512
MAX_CELLS = 40_000
"""Maximum number of columns of all ranks together; with many ranks each has fewer."""

MAX_SAMPLES = 3_000
FEWEST_SAMPLES = 8
"""Sampled steps: the maximum of all ranks together, and the minimum per rank, below which none are read."""

SERIES_POINTS = 512
FEWEST_RANKS = 4
JOBS_READ = 16
"""Maximum number of jobs whose curves are read, and the minimum number of ranks per job."""

COURSE_POINTS = 2048
COURSE_RANKS = 4
"""Number of training points read, and of ranks: the other ranks are assumed to be similar."""

RESULTS_READ = 1000
"""Maximum number of evaluations, and of checkpoints, that are read, spread evenly over the recording."""

SERIES_RANKS = 64
"""Maximum number of ranks whose losses are read."""


_RESULT_KINDS = ("evaluation", "checkpoint")


class Curves:
    """Losses, training figures and results of one job."""

    def __init__(self) -> None:
        self.losses = StepSeries()
        self.course = TrainingHistory()
        self.results: list[Frame] = []
        """Evaluations and checkpoints, in the order of the stream."""


class Overview:
    """Memory of every rank in aligned columns, and losses; copies of its parts go into models."""

    def of(self, job: int) -> Curves | None:
        """Return the curves of a job; of a run with one job its only ones."""
        return self.curves.get(job) or (next(iter(self.curves.values())) if len(self.curves) == 1 else None)

    def __init__(self, begin: float, end: float, ranks: int) -> None:
        columns = max(32, min(MAX_COLUMNS, MAX_CELLS // max(ranks, 1)))
        self.span = 1
        """Seconds per column: a power of four, as in a timeline."""
        while (floor(end / self.span) - floor(begin / self.span) + 1) > columns:
            self.span *= RATIO
        self.first = floor(begin / self.span)
        self.columns = floor(end / self.span) - self.first + 1
        self.end = end
        """Time up to which it was read."""
        self.memory: dict[int, Level] = {}
        self.curves: dict[int, Curves] = {}
        """By job; a run without jobs has one part, under 0."""
        self.marks: dict[int, list[PeakMark]] = {}
        """By rank: the steps in which a phase reached a new peak."""
        self.events: dict[int, list[AllocatorEvents]] = {}
        """By rank: sampled steps, by step."""


def read_overview(history: History, info: RecordingInfo, cancelled: Callable[[], bool] = lambda: False) -> Overview:
    """Read the overview of a recording; takes up to a second for a long one."""
    end = info.last_t
    overview = Overview(info.first_t, end, len(info.ranks))
    overview.memory = read_memory(history, overview.first, overview.columns, overview.span)
    spans = _job_spans(history, info)
    for job, (begin, until) in spans.items():
        curves = overview.curves[job] = Curves()
        for rank in info.ranks[: max(FEWEST_RANKS, SERIES_RANKS // len(spans))]:
            if cancelled():
                break
            for point in history.series(rank, begin, until, SERIES_POINTS):
                if point.loss is not None:
                    curves.losses.add(point.step, point.loss, point.count)
        with contextlib.suppress(FtmonError):  # a hub of an earlier version has no such query
            _read_course(curves.course, history, info.ranks[:COURSE_RANKS], (begin, until), cancelled)
    _read_results(overview, spans, history, info.ranks)
    with contextlib.suppress(FtmonError):  # a hub of an earlier version has neither query
        _read_explanations(overview, history, info.ranks, cancelled)
    return overview


def _read_course(
    course: TrainingHistory,
    history: History,
    ranks: list[int],
    span: tuple[float, float],
    cancelled: Callable[[], bool],
) -> None:
    for rank in ranks:
        if cancelled():
            return
        for point in history.training(rank, *span, COURSE_POINTS):
            course.add(point)


def _read_results(
    overview: Overview, spans: dict[int, tuple[float, float]], history: History, ranks: list[int]
) -> None:
    """Read evaluations and checkpoints of the first rank, which reports them, into the jobs they belong to."""
    found = [frame for kind in _RESULT_KINDS for frame in history.sampled(kind, min(ranks, default=0), RESULTS_READ)]
    for frame in sorted(found, key=lambda frame: frame.seq):
        for job, (begin, until) in spans.items():
            if begin <= frame.t <= until:
                overview.curves[job].results.append(frame)


def _job_spans(history: History, info: RecordingInfo) -> dict[int, tuple[float, float]]:
    """Return the span of each of the last jobs in the stream; of a run with one job, under 0, all of it."""
    jobs: list[Job] = []
    with contextlib.suppress(FtmonError):  # a hub of an earlier version has no such query
        jobs = [frame.message for frame in history.jobs() if isinstance(frame.message, Job) and frame.message.shown]
    if len(jobs) < 2:
        return {0: (info.first_t, info.last_t)}
    ends = [*(job.started for job in jobs[1:]), info.last_t]
    spans = {job.number: (job.started, end) for job, end in zip(jobs, ends, strict=True)}
    return dict(list(spans.items())[-JOBS_READ:])


def _read_explanations(overview: Overview, history: History, ranks: list[int], cancelled: Callable[[], bool]) -> None:
    for mark in history.marks():
        overview.marks.setdefault(mark.rank, []).append(mark)
    limit = min(KEPT, MAX_SAMPLES // max(len(ranks), 1))
    for rank in ranks if limit >= FEWEST_SAMPLES else ():
        if cancelled():
            break
        found = [frame.message for frame in history.sampled("events", rank, limit)]
        samples = [message for message in found if isinstance(message, AllocatorEvents)]
        overview.events[rank] = sorted(samples, key=lambda events: events.step)


def read_memory(history: History, first: int, columns: int, span: int, until: float = inf) -> dict[int, Level]:
    """Read aligned columns of ``span`` seconds from column ``first`` (spans since the epoch) on, by rank.

    A rank's begin with its first data. A single column may end early, at ``until``.
    """
    levels: dict[int, Level] = {}
    if columns <= 0:
        return levels
    found = history.memory(float(first * span), min(float((first + columns) * span), until), columns)
    begins: dict[int, int] = {}
    for column in found:
        begins[column.rank] = min(begins.get(column.rank, column.index), column.index)
    for column in found:
        level = levels.get(column.rank)
        if level is None:
            level = levels[column.rank] = Level(span, first + begins[column.rank])
        level.reach(first + column.index)
        level.lift(
            first + column.index,
            first + column.index,
            column.allocated_peak,
            column.reserved_peak,
            EMPTY if column.resident_peak is None else column.resident_peak,
        )
    return levels


def fine_begin(t: float, seconds: int, span: int) -> int:
    """Return the begin of the one-second columns that end at ``t``: a multiple of 16 s, not within the first column."""
    step = min(span, RATIO * RATIO)
    return ceil((floor(t) - seconds) / step) * step
