import pytest
from ftmon.tui.model.rank import CAPACITY, StepSeries
from hypothesis import given, settings
from hypothesis import strategies as st


@given(st.lists(st.tuples(st.integers(0, 50_000), st.floats(-1e6, 1e6)), min_size=1, max_size=200))
@settings(deadline=None, max_examples=150)
def test_pooling_keeps_the_mean(values: list[tuple[int, float]]) -> None:
    series = StepSeries()
    for step, value in values:
        series.add(step, value)
    points = series.points()
    assert len(series) <= CAPACITY
    total = sum(point.mean * point.count for point in points)
    assert total == pytest.approx(sum(value for _, value in values), abs=1e-3)


def test_a_short_run_keeps_every_step() -> None:
    series = StepSeries()
    for step in range(1, 101):
        series.add(step, float(step))
    assert [point.mean for point in series.points()] == [float(step) for step in range(1, 101)]
    assert len(series.means(10)) == 10


def test_adopted_history_ends_where_what_is_known_begins() -> None:
    past, series = StepSeries(), StepSeries()
    for step in range(1, 201):
        past.add(step, 1.0)
    for step in range(150, 261):
        series.add(step, 2.0)
    series.adopt(past, 150)
    points = series.points()
    assert [point.step for point in points] == list(range(1, 261))
    assert {point.mean for point in points if point.step < 150} == {1.0}
    assert {point.mean for point in points if point.step >= 150} == {2.0}
    assert len(past.points()) == 200
