"""The course of a training: what it shows of single steps, of pooled ones, and what it estimates."""

import math

import pytest
from ftmon.protocol.messages.control import RankState
from ftmon.protocol.messages.telemetry import Activity, Checkpoint, Evaluation, Heartbeat, PhaseRecord, Plan, Span, Step
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording.curves import point_of
from ftmon.protocol.recording.results import TrainingPoint
from ftmon.tui.model.run import RunModel, activity_words, epoch_words
from ftmon.tui.model.training import (
    CAPACITY,
    FIGURES,
    SMOOTHINGS,
    ChartView,
    HistoryPoint,
    Training,
    TrainingHistory,
    column_of,
    smoothed,
    times_left,
    value_range,
)
from ftmon.tui.widgets.drawing import Theme
from ftmon.tui.widgets.training import _written, training_lines
from models import folded
from streams import STARTED, Stream

BEGUN = 1000.0


def course(steps: int) -> list[HistoryPoint]:
    return [HistoryPoint(step, step, BEGUN + step * 2.0, step * 100.0, loss=1.0) for step in range(1, steps + 1)]


def steps_of(view: ChartView, moments: list[HistoryPoint]) -> tuple[int, int]:
    seen = view.visible(moments)
    return seen[0].step, seen[-1].step


def test_all_is_in_view_until_a_person_zooms_and_nothing_to_show_moves_nothing():
    view = ChartView()
    assert steps_of(view, course(100)) == (1, 100)
    assert steps_of(view, course(200)) == (1, 200)
    view.zoom(1, course(200))
    assert steps_of(view, course(200)) == (101, 200)
    assert steps_of(view, course(300)) == (201, 300), "the newest steps stay in view"
    view = ChartView()
    view.zoom(1, [])
    view.pan(1, [])
    view.move(1, [], 50, BEGUN)
    assert (view.visible([]), view.at_cursor([])) == ([], None)


def test_the_cursor_keeps_its_place_while_zooming():
    view, moments = ChartView(), course(1000)
    view.to(499, moments)
    view.zoom(1, moments)
    first, last = steps_of(view, moments)
    assert (view.cursor, last - first + 1) == (500, 500)
    assert (500 - first) / 500 == pytest.approx(0.5, abs=0.01)
    view.zoom(-1, moments)
    assert steps_of(view, moments) == (1, 1000)
    view.follow()
    for _ in range(20):
        view.zoom(1, moments)
    assert steps_of(view, moments) == (993, 1000), "not fewer"


def test_the_window_moves_within_the_run_the_cursor_by_columns_and_both_follow_again_at_its_end():
    view, moments = ChartView(), course(100)
    view.zoom(1, moments)
    view.pan(-0.5, moments)
    view.next_axis()  # the window stays on its steps
    assert steps_of(view, moments) == (26, 75)
    view.pan(-5, moments)
    assert steps_of(view, moments) == (1, 50)
    view.pan(9, moments)
    assert (steps_of(view, moments), view.end) == ((51, 100), None)
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


def test_axis_figure_and_smoothing_go_round():
    view = ChartView()
    seen = [view.axis]
    for _ in range(3):
        view.next_axis()
        seen.append(view.axis)
    assert seen == ["steps", "tokens", "time", "steps"]
    for _ in FIGURES:
        view.next_figure()
    assert view.figure == 0
    view.next_figure(-1)
    assert FIGURES[view.figure] == "data_share"
    for _ in SMOOTHINGS:
        view.next_smoothing()
    assert view.smoothing is None
    assert [view.smoothed_steps(steps) for steps in (20, 400, 10_000, 10_000_000)] == [5, 8, 200, 1000]
    view.next_smoothing()
    assert view.smoothed_steps(10_000) == 10


def test_one_far_value_does_not_flatten_the_others():
    low, high = value_range([1.0 + index / 100 for index in range(100)] + [5000.0])
    assert low < 1.0
    assert 2.0 < high < 10.0
    assert [value_range(values, floor=True)[0] for values in ([0.1, 0.4], [10.0, 100.0])] == [0.0, 0.0]
    assert value_range([99.0, 100.0], floor=True)[0] > 90
    assert [column_of(x, 1, 100, 80) for x in (1, 100)] == [0, 79]
    assert column_of(5, 5, 5, 80) == 0
    low, high = value_range([2.0, 2.0])
    assert low < 2.0 < high


NO_MEMORY = Span(0, 0, 0)


def point(step: int, **fields: object) -> TrainingPoint:
    known = {"t": 1000.0 + step, "first_step": step, "training_us": 500_000, "tokens": 100} | fields
    return TrainingPoint(step=step, **known)  # pyright: ignore[reportArgumentType]


def test_a_moment_has_the_figures_of_its_step_over_all_ranks():
    course = TrainingHistory()
    for rank, loss in enumerate((1.0, 2.0)):
        labels = 10 * (rank + 1)
        course.add(point(7, loss=loss, label_tokens=labels, lr=0.1, grad_norm=3.0, flops=2e12, whole_us=10, data_us=2))
    (moment,) = course.moments(2, 8e12)
    assert (moment.first_step, moment.step, moment.t) == (7, 7, 1007.0)
    assert moment.loss == pytest.approx((1.0 * 10 + 2.0 * 20) / 30)
    assert (moment.lr, moment.grad_norm, moment.data_share) == (0.1, 3.0, 0.2)
    assert moment.tokens_per_second == 2 * 100 / 0.5
    # 2e12 FLOPs of each rank in half a second, against 8e12 a second.
    assert moment.mfu == pytest.approx(0.5)
    assert course.moments(2, None)[0].mfu is None
    course = TrainingHistory()
    for step in (1, 2, 3):
        course.add(point(step))
    assert [moment.tokens for moment in course.moments(8)] == [800, 1600, 2400], "one rank read of eight"
    assert course.moments(8)[0].tokens_per_second == 8 * 100 / 0.5


def test_a_long_course_is_bounded_and_loses_neither_tokens_nor_extremes():
    course = TrainingHistory()
    steps = 3 * CAPACITY
    for step in range(1, steps + 1):
        spike = step == 5000
        course.add(point(step, loss=9.0 if spike else 1.0, grad_norm=70.0 if spike else 0.5))
    moments = course.moments(1)
    assert course.per == 4
    assert len(moments) <= CAPACITY
    assert moments[-1].tokens == pytest.approx(100 * steps)
    (high,) = [moment for moment in moments if moment.high_loss == 9.0]
    assert high.first_step <= 5000 <= high.step
    assert high.max_grad_norm == 70.0
    means = course.loss_means(60)
    assert 30 < len(means) <= 60
    assert sum(means) / len(means) == pytest.approx(1 + 8 / steps, rel=1e-3)
    assert max(means) > means[0] == 1.0, "the outlier is in one of them"


def test_pooled_history_and_live_steps_join_without_a_hole_or_a_token_twice():
    past, live = TrainingHistory(), TrainingHistory()
    for first in range(1, 200, 16):
        past.add(point(first + 15, first_step=first, count=16, tokens=1600, training_us=8_000_000))
    for step in range(150, 231):
        live.add(point(step))
    live.adopt(past, 1 << 62)
    moments = live.moments(1)
    assert (moments[0].first_step, moments[-1].step) == (1, 230)
    assert moments[-1].tokens == pytest.approx(23_000)
    assert all(moment.tokens_per_second == pytest.approx(200) for moment in moments)
    assert [moment.tokens for moment in moments] == sorted(moment.tokens for moment in moments)


def test_the_smoothed_loss_is_an_unbiased_moving_average():
    course = TrainingHistory()
    for step, loss in enumerate((4.0, 2.0, 3.0), 1):
        course.add(point(step, loss=loss))
    found = smoothed(course.moments(1), 0.9)
    assert found[0] == pytest.approx(4.0), "not drawn towards zero at the start"
    assert found[1] == pytest.approx((4.0 * 0.9 + 2.0) / (0.9 + 1))
    assert found[2] == pytest.approx((4.0 * 0.81 + 2.0 * 0.9 + 3.0) / (0.81 + 0.9 + 1))
    sparse, single, pooled = TrainingHistory(), TrainingHistory(), TrainingHistory()
    for step, loss in enumerate((None, 2.0, None), 1):
        sparse.add(point(step, loss=loss))
    assert smoothed(sparse.moments(1), 0.9) == [None, 2.0, 2.0]
    for step in range(1, 65):
        single.add(point(step, loss=1.0 if step <= 32 else 0.0))
    for first in (1, 33):
        pooled.add(point(first + 31, first_step=first, count=32, loss=1.0 if first == 1 else 0.0))
    fine, coarse = smoothed(single.moments(1), 0.95)[-1], smoothed(pooled.moments(1), 0.95)[-1]
    assert fine == pytest.approx(coarse), "it forgets by steps and not by buckets"


@pytest.mark.parametrize(
    ("every", "at_end", "step", "total", "left"),
    [
        (50, True, 0, 200, 4), (50, True, 0, 220, 5), (50, False, 60, 220, 3), (0, True, 10, 20, 1),
        (50, True, 200, 200, 0),
    ],
)  # fmt: skip
def test_what_is_done_every_so_many_steps_is_counted_to_the_end(every, at_end, step, total, left):
    assert times_left(every, at_end, step, total) == left


def stepping(model: RunModel, steps: int, pause_s: float = 0.0) -> None:
    """Give a model steps of a second, after every tenth of which the next one begins with an evaluation."""
    t, seq = STARTED, model.last_seq
    for number in range(1, steps + 1):
        evaluated = pause_s and number > 1 and number % 10 == 1
        pause = [PhaseRecord("eval", 0, int(pause_s * 1e6), NO_MEMORY, NO_MEMORY)] if evaluated else []
        length = 1.0 + (pause_s if evaluated else 0.0)
        data = PhaseRecord("data", 0, 1000, NO_MEMORY, NO_MEMORY)
        seq += 1
        step = Step(0, number, t, int(length * 1e6), [*pause, data], tokens=50, loss=1.0)
        t += length
        model.apply(Frame(seq, t, step))


def test_time_left_has_the_evaluations_to_come_and_a_long_one_is_no_slow_down():
    model = RunModel()
    model.apply(Frame(1, STARTED, Plan(0, 100, 2.0, evaluate_every=10, evaluate_at_end=True)))
    stepping(model, 55, pause_s=6.0)
    assert model.rates.seconds_per_step == pytest.approx(1.0, rel=1e-3), "an evaluation is no slow step"
    assert model.rates.tokens_per_second == pytest.approx(50, rel=1e-3)
    # 45 steps of a second, and the evaluations after 60, 70, 80, 90 and 100.
    assert model.seconds_left == pytest.approx(45 + 5 * 6.0, rel=1e-3)
    assert epoch_words(model) == "1.10 / 2"
    model = RunModel()
    stepping(model, 30)
    now = model.now
    model.apply(Frame(1000, now + 60, Heartbeat(0, 31, "eval", now, 5, now + 60)))
    assert model.rates.tokens_per_second == pytest.approx(50, rel=1e-3)
    assert activity_words(model) == "evaluation"


def test_results_are_kept_by_step_and_name_and_an_activity_is_named_until_it_is_over():
    training = Training()
    for step, loss in ((10, 2.0), (30, 1.5), (20, 1.0), (30, 1.6)):
        training.on_evaluation(Evaluation(0, step, STARTED, "validation", loss))
        training.on_evaluation(Evaluation(0, step, STARTED, "other", loss / 10))
    training.on_evaluation(Evaluation(0, 40, STARTED, "validation", math.nan))
    training.on_checkpoint(Checkpoint(0, 20, STARTED, "a"))
    kept = [(each.step, each.loss) for each in training.evaluations if each.name == "validation"]
    assert kept[:3] == [(10, 2.0), (20, 1.0), (30, 1.6)]
    assert (training.best.step, training.best.name, training.evaluation.step) == (20, "validation", 40)
    model = RunModel()
    model.apply(Frame(1, STARTED, Activity(0, STARTED, "rehearsal", done=1, total=4)))
    assert activity_words(model) == "rehearsal 1/4"
    for seq, over in ((2, False), (3, True)):
        model.apply(Frame(seq, STARTED, Activity(0, STARTED, "note", text="not compiled", over=over)))
    assert [each.name for each in model.training.begun] == ["rehearsal", "note"]
    assert model.training.activity is not None, "a note is said beside it"
    model.apply(Frame(4, STARTED, Activity(0, STARTED, "rehearsal", over=True)))
    assert activity_words(model) == ""


def test_settings_and_notes_are_shown_before_the_first_step_and_below_the_curves_where_there_is_room():
    before, after = RunModel(), folded(Stream(ranks=1, steps=5, finished=False).frames())
    for model in (before, after):
        for seq in (10_001, 10_002):
            model.apply(Frame(seq, STARTED, Activity(0, STARTED, "note", text="layers are not compiled")))
    said = " note: layers are not compiled"
    for height, curves in ((20, 0), (55, 1)):
        drawn = [line.plain for line in training_lines(before, ChartView(), 80, height, Theme())]
        assert (drawn.count(said), drawn[-1]) == (1, said)
        drawn = [line.plain for line in training_lines(after, ChartView(), 80, height, Theme())]
        assert (len(drawn), drawn.count(said)) == (height, curves)


def with_rank_1_until(step: int) -> RunModel:
    late = ((frame, frame.message) for frame in Stream(ranks=2, steps=12, finished=False).frames())
    return folded(frame for frame, one in late if not (isinstance(one, Step) and one.rank == 1 and one.step > step))


def test_a_step_is_drawn_once_all_living_ranks_have_it_and_a_loss_not_finite_is_not_an_unknown_one():
    model = with_rank_1_until(10)
    assert (model.leading_step, model.complete_step, model.moments[-1].step) == (12, 10, 10)
    model.apply(Frame(1_000_000, STARTED + 100, RankState(1, "gone", STARTED + 100)))
    assert model.moments[-1].step == 12, "nothing more comes of a rank that is gone"
    assert with_rank_1_until(3).moments[-1].step == 12, "nor is a rank waited for that is far behind"
    history = TrainingHistory()
    for step, loss in enumerate((2.0, math.nan, None), 1):
        history.add(point_of(Step(0, step, STARTED, 100, [], loss=loss), BEGUN + step))
    history.add(point_of(Step(1, 1, STARTED, 100, [], loss=math.inf), BEGUN + 1))
    moments = history.moments(2)
    assert [(moment.loss, moment.loss_not_finite) for moment in moments] == [(2.0, 1), (None, 1), (None, 0)]
    assert [_written(moment, "loss", str) for moment in moments] == ["2.0, some not finite", "not finite", "-"]
