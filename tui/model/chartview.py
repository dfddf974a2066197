"""The view of a training chart: its axis, its window and its cursor, without a terminal.

Window and cursor are kept in steps, so they stay where they are when the axis changes or the run continues.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Literal

from .training import HistoryPoint

Axis = Literal["steps", "tokens", "time"]
AXES: tuple[Axis, ...] = ("steps", "tokens", "time")

SMOOTHINGS: tuple[int | None, ...] = (None, 10, 30, 100, 300, 1)
"""Number of steps over which the loss is smoothed; None: depends on the length of the run; 1: no smoothing."""

_FIFTIETH = 50
_MOST_SMOOTHED = 1000

FEWEST_STEPS = 8
"""Steps of the narrowest window."""

FIGURES = ("lr", "grad_norm", "tokens_per_second", "mfu", "data_share")
"""Attributes of a ``HistoryPoint`` that the second pane may show, in order."""


def x_of(moment: HistoryPoint, axis: Axis, begun: float) -> float:
    """Return a moment's coordinate on an axis: its step, tokens so far, or seconds since ``begun``."""
    if axis == "steps":
        return float(moment.step)
    return moment.tokens if axis == "tokens" else max(0.0, moment.t - begun)


class ChartView:
    """The user's choices, without data of the run."""

    def __init__(self) -> None:
        self.axis: Axis = "steps"
        self.figure = 0
        """Index into ``FIGURES``."""
        self.smoothing: int | None = None
        """One of ``SMOOTHINGS``."""
        self.span: int | None = None
        """Steps in view; None: all."""
        self.end: int | None = None
        """The last step in view; None: the newest, as the run continues."""
        self.cursor: int | None = None
        """The step whose figures are shown; None: the newest."""
        self.version = 0

    def visible(self, moments: Sequence[HistoryPoint]) -> Sequence[HistoryPoint]:
        """Return the moments in view."""
        if self.span is None or not moments:
            return moments
        last = moments[-1].step if self.end is None else self.end
        first = bisect_left(moments, last - self.span + 1, key=lambda moment: moment.step)
        return moments[first : bisect_right(moments, last, key=lambda moment: moment.step)]

    def at_cursor(self, moments: Sequence[HistoryPoint]) -> int | None:
        """Return the index of the moment whose figures are shown; None without moments."""
        if not moments:
            return None
        if self.cursor is None:
            return len(moments) - 1
        return min(bisect_left(moments, self.cursor, key=lambda moment: moment.step), len(moments) - 1)

    def next_axis(self) -> None:
        """Go to the next axis."""
        self.axis = AXES[(AXES.index(self.axis) + 1) % len(AXES)]
        self.version += 1

    def next_figure(self, direction: int = 1) -> None:
        """Go to another figure of the second pane."""
        self.figure = (self.figure + direction) % len(FIGURES)
        self.version += 1

    def next_smoothing(self) -> None:
        """Go to the next strength of smoothing."""
        self.smoothing = SMOOTHINGS[(SMOOTHINGS.index(self.smoothing) + 1) % len(SMOOTHINGS)]
        self.version += 1

    def smoothed_steps(self, steps: int) -> int:
        """Return the number of steps to smooth over in a run of that length; 1: no smoothing."""
        return self.smoothing or max(5, min(_MOST_SMOOTHED, steps // _FIFTIETH))

    def whole(self) -> None:
        """Show the whole run and follow its end."""
        self.span = self.end = self.cursor = None
        self.version += 1

    def zoom(self, direction: int, moments: Sequence[HistoryPoint]) -> None:
        """Show half as many steps, or twice as many; the cursor stays where it is on the screen."""
        if not moments:
            return
        first, last = moments[0].first_step, moments[-1].step
        everything = last - first + 1
        before = self.span or everything
        span = max(min(FEWEST_STEPS, everything), before // 2) if direction > 0 else before * 2
        self.version += 1
        if span >= everything:
            self.span = self.end = None
            return
        end = last if self.end is None else self.end
        if self.cursor is not None:
            share = (end - self.cursor) / before
            end = min(last, max(first + span - 1, round(self.cursor + share * span)))
            self.end = None if end >= last else end
        elif self.end is not None:
            self.end = max(self.end, first + span - 1)
        self.span = span

    def pan(self, share: float, moments: Sequence[HistoryPoint]) -> None:
        """Move the window by a share of its width; at the newest step it follows the run again."""
        if self.span is None or not moments:
            return
        first, last = moments[0].first_step, moments[-1].step
        end = (last if self.end is None else self.end) + round(share * self.span)
        end = max(first + self.span - 1, end)
        self.end = None if end >= last else end
        self.version += 1

    def move(self, direction: int, moments: Sequence[HistoryPoint], columns: int, begun: float) -> None:
        """Move the cursor to the next column of the chart that has a moment; the window follows."""
        at = self.at_cursor(moments)
        if at is None:
            return
        self.version += 1
        seen = self.visible(moments)
        low, high = span_of(seen, self.axis, begun)
        column = column_of(x_of(moments[at], self.axis, begun), low, high, columns)
        at += direction
        while 0 <= at < len(moments):
            if column_of(x_of(moments[at], self.axis, begun), low, high, columns) != column:
                break
            at += direction
        self.to(max(0, min(at, len(moments) - 1)), moments)

    def to(self, index: int, moments: Sequence[HistoryPoint]) -> None:
        """Put the cursor at a moment, and the window around it."""
        step, last = moments[index].step, moments[-1].step
        if index == len(moments) - 1:
            self.follow()
            return
        self.cursor = step
        self.version += 1
        if self.span is not None:
            end = last if self.end is None else self.end
            if step > end:
                end = step
            elif moments[index].first_step <= end - self.span:
                end = moments[index].first_step + self.span - 1
            self.end = None if end >= last else end

    def follow(self) -> None:
        """Show the newest step, and follow the run."""
        self.cursor = self.end = None
        self.version += 1


def span_of(moments: Sequence[HistoryPoint], axis: Axis, begun: float) -> tuple[float, float]:
    """Return the first and the last coordinate of moments on an axis."""
    if not moments:
        return 0.0, 1.0
    return x_of(moments[0], axis, begun), x_of(moments[-1], axis, begun)


def column_of(x: float, low: float, high: float, columns: int) -> int:
    """Return the column of a coordinate on an axis from ``low`` to ``high``; beyond the edges if it is outside."""
    if high <= low:
        return 0
    return round((x - low) / (high - low) * (columns - 1))


def value_range(values: Sequence[float], floor: bool = False) -> tuple[float, float]:
    """Return the lowest and highest value to draw, without outliers that would flatten the curve.

    Values farther above the median than three times the distance of the 90th percentile are cut off. With ``floor`` the
    range begins at zero, unless all values are in the upper half of it.
    """
    known = sorted(values)
    if not known:
        return 0.0, 1.0
    median, most = known[len(known) // 2], known[min(len(known) - 1, len(known) * 9 // 10)]
    low, high = known[0], known[-1]
    limit = median + 3 * max(most - median, abs(median) * 0.05)
    if len(known) >= 20 and high > limit:
        high = limit
    floor = floor and low < high / 2
    if floor:
        low = min(0.0, low)
    if high <= low:
        margin = abs(high) * 0.1 or 1.0
        return (low if floor and low == 0.0 and high > 0 else low - margin), high + margin
    margin = (high - low) * 0.04
    return low if floor else low - margin, high + margin
