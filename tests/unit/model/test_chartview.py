"""The window and the cursor of a chart over a course, without a terminal."""

import pytest
from ftmon.tui.model.training import FIGURES, SMOOTHINGS, ChartView, HistoryPoint, column_of, value_range

BEGUN = 1000.0


def course(steps: int, per: int = 1) -> list[HistoryPoint]:
    return [
        HistoryPoint(last - per + 1, last, BEGUN + last * 2.0, last * 100.0, loss=1.0)
        for last in range(per, steps + 1, per)
    ]


def steps_of(view: ChartView, moments: list[HistoryPoint]) -> tuple[int, int]:
    seen = view.visible(moments)
    return seen[0].step, seen[-1].step


def test_all_is_in_view_and_follows_the_run_until_a_person_zooms() -> None:
    view = ChartView()
    assert steps_of(view, course(100)) == (1, 100)
    assert steps_of(view, course(200)) == (1, 200)
    view.zoom(1, course(200))
    assert steps_of(view, course(200)) == (101, 200)
    assert steps_of(view, course(300)) == (201, 300), "the newest steps stay in view"


def test_the_cursor_keeps_its_place_while_zooming() -> None:
    view, moments = ChartView(), course(1000)
    view.to(499, moments)
    view.zoom(1, moments)
    first, last = steps_of(view, moments)
    assert (view.cursor, last - first + 1) == (500, 500)
    assert (500 - first) / 500 == pytest.approx(0.5, abs=0.01)
    view.zoom(-1, moments)
    assert steps_of(view, moments) == (1, 1000)


def test_zooming_in_ends_at_a_few_steps() -> None:
    view, moments = ChartView(), course(1000)
    for _ in range(20):
        view.zoom(1, moments)
    assert steps_of(view, moments) == (993, 1000)


def test_the_window_moves_within_the_run_and_follows_again_at_its_end() -> None:
    view, moments = ChartView(), course(100)
    view.zoom(1, moments)
    view.pan(-0.5, moments)
    assert steps_of(view, moments) == (26, 75)
    view.pan(-5, moments)
    assert steps_of(view, moments) == (1, 50)
    view.pan(9, moments)
    assert (steps_of(view, moments), view.end) == ((51, 100), None)


def test_the_cursor_goes_by_columns_and_takes_the_window_along() -> None:
    view, moments = ChartView(), course(100)
    view.move(-1, moments, 50, BEGUN)
    assert view.cursor == 98, "two steps share a column"
    view.zoom(1, moments)
    for _ in range(80):
        view.move(-1, moments, 50, BEGUN)
    assert view.cursor is not None
    first, last = steps_of(view, moments)
    assert first <= view.cursor <= last
    for _ in range(200):
        view.move(1, moments, 50, BEGUN)
    assert (view.cursor, view.end) == (None, None), "at the newest step it follows again"


def test_axis_figure_and_smoothing_go_round() -> None:
    view = ChartView()
    seen = []
    for _ in range(3):
        seen.append(view.axis)
        view.next_axis()
    assert (seen, view.axis) == (["steps", "tokens", "time"], "steps")
    for _ in FIGURES:
        view.next_figure()
    assert view.figure == 0
    view.next_figure(-1)
    assert FIGURES[view.figure] == "data_share"
    for _ in SMOOTHINGS:
        view.next_smoothing()
    assert view.smoothing is None


def test_a_window_stays_on_the_same_steps_when_the_axis_changes() -> None:
    view, moments = ChartView(), course(100)
    view.zoom(1, moments)
    view.pan(-0.5, moments)
    before = steps_of(view, moments)
    view.next_axis()
    assert steps_of(view, moments) == before


def test_nothing_to_show_moves_nothing() -> None:
    view = ChartView()
    view.zoom(1, [])
    view.pan(1, [])
    view.move(1, [], 50, BEGUN)
    assert (view.visible([]), view.at_cursor([])) == ([], None)


def test_columns_go_from_edge_to_edge() -> None:
    assert [column_of(x, 1, 100, 80) for x in (1, 100)] == [0, 79]
    assert column_of(5, 5, 5, 80) == 0


def test_one_far_value_does_not_flatten_the_others() -> None:
    low, high = value_range([1.0 + index / 100 for index in range(100)] + [5000.0])
    assert low < 1.0
    assert 2.0 < high < 10.0
    assert value_range([0.1, 0.4], floor=True)[0] == 0.0
    low, high = value_range([2.0, 2.0])
    assert low < 2.0 < high


def test_the_loss_is_smoothed_over_a_part_of_the_run_unless_a_person_chose() -> None:
    view = ChartView()
    assert [view.smoothed_steps(steps) for steps in (20, 400, 10_000, 10_000_000)] == [5, 8, 200, 1000]
    view.next_smoothing()
    assert view.smoothed_steps(10_000) == 10


def test_a_range_begins_at_zero_unless_all_values_are_far_from_it() -> None:
    assert value_range([10.0, 100.0], floor=True)[0] == 0.0
    assert value_range([99.0, 100.0], floor=True)[0] > 90
