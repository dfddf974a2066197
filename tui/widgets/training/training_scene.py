"""State shared by the parts of one drawing of the training screen: window, columns, displayed step."""

from bisect import bisect_left

from ...model.chartview import ChartView, column_of, span_of, x_of
from ...model.run import RunModel
from ...model.training import HistoryPoint, smoothed
from ..drawing.theme import Theme

GUTTER = 9
"""Columns before a plot, for the values of its rows."""


class Scene:
    """State shared by the parts of one drawing."""

    def __init__(self, model: RunModel, view: ChartView, width: int, theme: Theme) -> None:
        self.model, self.view, self.theme = model, view, theme
        self.all = model.moments
        self.begun = self.all[0].t if self.all else 0.0
        self.seen = view.visible(self.all)
        self.columns = max(8, width - GUTTER)
        self.width = width
        self.xs = span_of(self.seen, view.axis, self.begun)
        at = view.at_cursor(self.all)
        self.moment = self.all[at] if at is not None else None
        self.over = view.smoothed_steps(self.all[-1].step - self.all[0].first_step + 1 if self.all else 0)
        """Number of steps over which the loss is smoothed."""
        self.smooth = smoothed(self.all, 1 - 1 / self.over)
        self.smooth_at = self.smooth[at] if at is not None else None

    def x(self, moment: HistoryPoint) -> float:
        """Return a moment's coordinate on the selected axis."""
        return x_of(moment, self.view.axis, self.begun)

    def column(self, moment: HistoryPoint) -> int:
        """Return a moment's column."""
        return column_of(self.x(moment), *self.xs, self.columns)

    @property
    def cursor_column(self) -> int | None:
        """The cursor's column; None without a cursor."""
        if self.view.cursor is None or self.moment is None:
            return None
        return self.column(self.moment)

    def moment_of(self, step: int) -> HistoryPoint | None:
        """Return the moment of a step; None outside the window."""
        if not self.seen or not self.seen[0].first_step <= step <= self.seen[-1].step:
            return None
        place = bisect_left(self.seen, step, key=lambda moment: moment.step)
        return self.seen[min(place, len(self.seen) - 1)]
