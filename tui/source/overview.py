"""A whole run at a coarse resolution, read once, so that a seek has the run's past to show at once."""

import contextlib
from collections.abc import Callable
from math import ceil, floor, inf

from ...protocol.errors import FtmonError
from ...protocol.phasepeaks import PeakMark
from ...protocol.recording.results import RecordingInfo
from ...protocol.telemetry import AllocatorEvents
from ..model.events import KEPT
from ..model.levels import EMPTY, RATIO, Level
from ..model.series import StepSeries
from .history import History

MAX_COLUMNS = 512
MAX_CELLS = 40_000
"""Columns of all ranks together: with many ranks each gets fewer."""

MAX_SAMPLES = 3_000
FEWEST_SAMPLES = 8
"""Sampled steps of all ranks together; with so many ranks that each would get fewer than those, none are read."""

SERIES_POINTS = 512
SERIES_RANKS = 64
"""Ranks whose step times are read; beyond, only the recent steps are charted."""


class Overview:
    """Memory of every rank in aligned columns, step times, and losses; copies of its parts go into models."""

    def __init__(self, begin: float, end: float, ranks: int) -> None:
        columns = max(32, min(MAX_COLUMNS, MAX_CELLS // max(ranks, 1)))
        self.span = 1
        """Seconds a column covers: a power of four, as in a timeline."""
        while (floor(end / self.span) - floor(begin / self.span) + 1) > columns:
            self.span *= RATIO
        self.first = floor(begin / self.span)
        self.columns = floor(end / self.span) - self.first + 1
        self.end = end
        """The time it was read up to."""
        self.memory: dict[int, Level] = {}
        self.step_ms: dict[int, StepSeries] = {}
        self.losses = StepSeries()
        self.marks: dict[int, list[PeakMark]] = {}
        """By rank: where a phase came higher than before."""
        self.events: dict[int, list[AllocatorEvents]] = {}
        """By rank: sampled steps, by step."""


def read_overview(history: History, info: RecordingInfo, cancelled: Callable[[], bool] = lambda: False) -> Overview:
    """Read the overview of a recording as it is now, which may take a second on a long one.

    Args:
        history: where to read.
        info: what it holds.
        cancelled: asked between reads; True ends it with what there is.
    """
    end = info.last_t
    overview = Overview(info.first_t, end, len(info.ranks))
    overview.memory = read_memory(history, overview.first, overview.columns, overview.span)
    for rank in info.ranks[:SERIES_RANKS]:
        if cancelled():
            break
        series = overview.step_ms[rank] = StepSeries()
        for point in history.series(rank, info.first_t, end, SERIES_POINTS):
            series.add_pooled(point.step, point.host_ms, point.host_ms, point.max_host_ms or point.host_ms, point.count)
            if point.loss is not None:
                overview.losses.add_pooled(point.step, point.loss, point.loss, point.loss, point.count)
    with contextlib.suppress(FtmonError):  # a hub of an earlier version knows neither
        _read_explanations(overview, history, info.ranks, cancelled)
    return overview


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

    A single column may end early, at ``until``.
    """
    levels: dict[int, Level] = {}
    if columns <= 0:
        return levels
    for column in history.memory(float(first * span), min(float((first + columns) * span), until), columns):
        level = levels.get(column.rank)
        if level is None:
            level = levels[column.rank] = Level(span, first)
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
    """Where one-second columns begin that end at ``t``: at a multiple of 16 s, and not within the first column."""
    step = min(span, RATIO * RATIO)
    return ceil((floor(t) - seconds) / step) * step
