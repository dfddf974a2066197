from ftmon.tui.model.timeline import EMPTY, KEEP, Mark, Timeline
from hypothesis import given, settings
from hypothesis import strategies as st

figures = st.lists(
    st.tuples(st.integers(0, 6000), st.integers(0, 5), st.integers(0, 2**40)),  # start s, length s, bytes
    min_size=1,
    max_size=120,
)


def filled(data: list[tuple[int, int, int]], origin: int = 1_700_000_000) -> Timeline:
    timeline = Timeline()
    for start, length, value in data:
        timeline.add_range(origin + start, origin + start + length, value, value + 1)
    return timeline


def highest(values: list[int]) -> int:
    return max(values, default=EMPTY)


@given(figures, st.integers(1, 200))
@settings(deadline=None, max_examples=200)
def test_the_whole_never_loses_a_maximum(data, width: int) -> None:
    columns = filled(data).whole(width)
    assert highest(columns.allocated) == max(value for _, _, value in data)
    assert highest(columns.reserved) == max(value for _, _, value in data) + 1
    assert len(columns.allocated) <= width


@given(figures, st.sampled_from([1, 2, 4, 8, 16, 64]), st.integers(1, 100))
@settings(deadline=None, max_examples=200)
def test_a_column_is_never_below_what_fell_in_it(data, span: int, width: int) -> None:
    timeline = filled(data)
    end = timeline.end
    columns = timeline.window(width, end - 1, span)
    for start, length, value in data:
        for second in range(1_700_000_000 + start, 1_700_000_000 + start + length + 1):
            index = int((second - columns.start) // span)
            if 0 <= index < width:
                assert columns.allocated[index] >= value


@given(figures)
@settings(deadline=None, max_examples=100)
def test_a_column_known_finely_is_exactly_the_highest_of_what_fell_in_it(data) -> None:
    recent = [(start % (KEEP // 2), length, value) for start, length, value in data]
    columns = filled(recent).whole(2 * KEEP)
    expected: dict[int, int] = {}
    for start, length, value in recent:
        for second in range(1_700_000_000 + start, 1_700_000_000 + start + length + 1):
            expected[second] = max(expected.get(second, 0), value)
    assert columns.span == 1
    assert all(columns.allocated[int(second - columns.start)] == value for second, value in expected.items())


def test_days_of_data_stay_bounded_and_columns_do_not_move_while_time_goes_on():
    timeline = Timeline()
    timeline.add(1000.5, 777, 888)
    for second in range(1001, 300_000, 7):
        timeline.add(second, 5, 6)
    assert timeline.start is not None
    assert timeline.start <= 1000
    assert timeline.whole(300).allocated[0] == 777
    assert sum(len(level) for level in timeline._levels) <= len(timeline._levels) * 2 * KEEP
    timeline = filled([(second, 0, second) for second in range(50)], origin=0)
    before = timeline.window(10, 49.0)
    timeline.add(49.9, 1000, 1000)
    after = timeline.window(10, 49.9)
    assert before.start == after.start
    assert before.allocated[:-1] == after.allocated[:-1]
    assert after.allocated[-1] == 1000


def test_a_gap_takes_its_smaller_neighbour_the_end_the_latest_figure_and_the_worst_mark_shows():
    timeline = Timeline()
    timeline.add(10, 30, 40)
    timeline.add(13, 20, 40)
    timeline.current = (7, 8, EMPTY)
    assert timeline.window(7, 15.0).allocated == [EMPTY, 30, 20, 20, 20, 7, 7]
    timeline = filled([(second, 0, 1) for second in range(20)], origin=0)
    timeline.mark(Mark(12.1, "spike", "warning", 1))
    timeline.mark(Mark(12.2, "hang", "error", 2))
    timeline.mark(Mark(12.3, "growth", "info", 3))
    assert timeline.window(10, 19.0).marks[2].kind == "hang"


def test_adopted_history_stands_in_front_of_what_is_known_and_older_columns_are_kept():
    past = dict.fromkeys(range(100, 110), (50, 60, EMPTY)) | {104: (900, 901, EMPTY)}
    timeline = Timeline()
    for second in range(1744, 1800):
        timeline.add(second, 70, 80)
    timeline.adopt(past, 16)
    whole = timeline.whole(40)
    assert whole.start <= 1600
    assert max(whole.allocated) == 900
    assert timeline.window(20, 1799.0).allocated == [70] * 20
    assert timeline.window(160, 1759.0).allocated[64:80] == [900] * 16
    timeline = Timeline()
    for second in range(1000, 1040):
        timeline.add(second, second, 5000)
    timeline.adopt(dict.fromkeys(range(1022, 1034), (1025, 6000, EMPTY)), 1)
    columns = timeline.window(40, 1039.0)
    found = columns.allocated
    assert found == [max(second, 1025) if 1022 <= second <= 1033 else second for second in range(1000, 1040)]
    assert columns.reserved == [6000 if 1022 <= second <= 1033 else 5000 for second in range(1000, 1040)]
