"""Which rows of a sweep are shown where they do not all fit."""

import pytest
from ftmon.protocol.analysis.sweep.summary import aligned, budget_text
from ftmon.protocol.sweep.rows import Budget
from ftmon.protocol.text import cells_of
from ftmon.tui.model.sweep import TableRow
from ftmon.tui.widgets.drawing import Theme, width_of
from ftmon.tui.widgets.tables import rows_below_current, table_lines


@pytest.mark.parametrize(("current", "first", "last"), [(0, 0, 8), (20, 15, 23), (39, 31, 39)])
def test_the_configuration_under_way_is_shown_with_what_comes_next(current, first, last) -> None:
    verdicts = ["done"] * current + ["running"] + ["planned"] * (39 - current)
    rows = [TableRow([], verdict, "") for verdict in verdicts]
    height = 10  # nine rows below the head
    below = max(0, min(rows_below_current(rows, height), len(rows) - height + 1))
    assert (len(rows) - below - height + 1, len(rows) - below - 1) == (first, last)


def test_columns_stand_below_each_other_whatever_their_letters_take_and_a_budget_is_in_words():
    table = [["model", "peak"], ["日本語", "1"], ["e\u0301tude", "2"]]
    text = aligned(table)
    assert {width_of(line[: -len(row[1])]) for line, row in zip(text, table, strict=True)} == {8}
    rows = [TableRow(row, "done", "") for row in table[1:]]
    drawn = [line.plain for line in table_lines(table[0], rows, 60, 5, 0, Theme())]
    assert {width_of(line[: line.index(row[1])]) for line, row in zip(drawn, table, strict=True)} == {9}
    assert all(cells_of(one) == width_of(one) for row in table for one in row)
    found = [budget_text(Budget(7200.0, None, price, 8)) for price in (None, 1.79)]
    assert found == ["2 h 00 m", "2 h 00 m (28.64)"]
    assert budget_text(Budget()) == "no limit"
