"""Which rows of a sweep are shown where they do not all fit."""

import pytest
from ftmon.tui.model.sweep import TableRow
from ftmon.tui.widgets.sweep_view import rows_below_current


@pytest.mark.parametrize(("current", "first", "last"), [(0, 0, 8), (20, 15, 23), (39, 31, 39)])
def test_the_configuration_under_way_is_shown_with_what_comes_next(current: int, first: int, last: int) -> None:
    verdicts = ["done"] * current + ["running"] + ["planned"] * (39 - current)
    rows = [TableRow([], verdict, "") for verdict in verdicts]
    height = 10  # nine rows below the head
    below = max(0, min(rows_below_current(rows, height), len(rows) - height + 1))
    assert (len(rows) - below - height + 1, len(rows) - below - 1) == (first, last)
