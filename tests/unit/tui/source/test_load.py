"""A state built for a time from a recording must show what folding everything up to that time shows."""

import contextlib
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording.reader import Reader
from ftmon.tui.model import RunModel
from ftmon.tui.model.run import status
from ftmon.tui.model.training import HistoryPoint
from ftmon.tui.source.load import TAIL_FRAMES, Overview, Superseded, adopt, describe, load, read_overview
from hypothesis import given, settings
from hypothesis import strategies as st
from models import folded
from streams import Later, Stream, write
from trainscenes import frames

FRAMES = Later(lambda: Stream(ranks=4, steps=1500).frames())


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("load") / "run.sqlite"
    write(path, FRAMES)
    return path


def fold(reader: Reader, frames: list[Frame]) -> RunModel:
    model = RunModel(describe(reader.info()))
    for frame in frames:
        model.apply(frame)
    return model


def shown(model: RunModel) -> dict[str, Any]:
    """What the screens show that must be equal to the last digit."""
    out = status(model)
    out["alerts"] = [
        (alert.id, alert.count, alert.resolved) for alert in sorted(model.alerts, key=lambda alert: alert.id)
    ]
    out["marks"] = {rank.rank: rank.timeline.marks for rank in model.ranks.values()}
    out["logs"] = model.logs.select(limit=200)
    out["last"] = {rank.rank: rank.last for rank in model.ranks.values()}
    out["recent"] = {rank.rank: list(rank.steps)[-30:] for rank in model.ranks.values()}
    out["events"] = {rank.rank: rank.allocator.last for rank in model.ranks.values()}
    out["reserved"] = {rank.rank: rank.reserved_peak for rank in model.ranks.values()}
    return out


@given(place=st.deferred(lambda: st.integers(60, len(FRAMES) - 1)), with_overview=st.booleans())
@settings(deadline=None, max_examples=10)
def test_a_seek_shows_what_folding_everything_shows(recording, place, with_overview):
    t = FRAMES[place].t
    with Reader(recording) as reader:
        until = FRAMES[: reader.seq_at(t)]
        overview = read_overview(reader, reader.info()) if with_overview else None
        sought, all_folded = load(reader, t, describe(reader.info()), overview), fold(reader, until)
    all_folded.tick(t)
    assert sought.last_seq == all_folded.last_seq
    left, right = shown(sought), shown(all_folded)
    assert {name: left[name] for name in left if left[name] != right[name]} == {}


@given(place=st.deferred(lambda: st.integers(1, len(FRAMES) - 2)), more=st.integers(1, 400))
@settings(deadline=None, max_examples=8)
def test_history_and_then_the_tail_is_the_same_as_everything(recording, place, more):
    """A late join: the state as recorded, then the live frames, some of which are in both."""
    t = FRAMES[place].t
    end = min(place + more, len(FRAMES) - 1)
    with Reader(recording) as reader:
        joined = load(reader, t, describe(reader.info()))
        # Times of one moment need not be in order, so the state at a time may be of a later message than that one.
        end = max(end, joined.last_seq - 1)
        all_folded = fold(reader, FRAMES[: end + 1])
    for frame in FRAMES[max(0, place - 50) : end + 1]:
        joined.apply(frame)
    assert shown(joined) == shown(all_folded)


def test_memory_after_a_seek_has_the_runs_maxima_and_none_of_what_came_later(recording):
    t = FRAMES[len(FRAMES) // 2].t
    with Reader(recording) as reader:
        overview = read_overview(reader, reader.info())
        assert isinstance(overview, Overview)
        assert overview.span > 1
        sought = load(reader, t, describe(reader.info()), overview)
        all_folded = fold(reader, FRAMES[: reader.seq_at(t)])
    for number, rank in all_folded.ranks.items():
        expected, found = rank.timeline.whole(120), sought.ranks[number].timeline.whole(120)
        assert found.span >= expected.span
        assert max(found.allocated) == max(expected.allocated)
        assert max(found.reserved) == max(expected.reserved)
        assert found.start <= expected.start
        # A recording pools by when a step was received, the fold by when its phases ran: a step apart at the most.
        recent, exact = sought.ranks[number].timeline.window(60, t), rank.timeline.window(60, t)
        for index in range(1, 59):
            around = exact.allocated[index - 1 : index + 2]
            assert min(around) <= recent.allocated[index] <= max(around)


def test_charts_after_a_seek_reach_back_to_the_beginning_and_not_beyond_the_time(recording):
    t = FRAMES[len(FRAMES) // 2].t
    with Reader(recording) as reader:
        overview = read_overview(reader, reader.info())
        sought = load(reader, t, describe(reader.info()), overview)
        all_folded = fold(reader, FRAMES[: reader.seq_at(t)])
    expected, found = all_folded.losses.points(), sought.losses.points()
    assert found[0].step <= 8
    assert found[-1].step == expected[-1].step == all_folded.leading_step
    assert found[len(found) // 2].mean == pytest.approx(
        next(point.mean for point in expected if point.step == found[len(found) // 2].step), rel=0.2
    )


def test_the_state_before_the_first_step_has_the_ranks_and_no_steps(recording):
    first_step = next(frame for frame in FRAMES if type(frame.message).__name__ == "Step")
    with Reader(recording) as reader:
        model = load(reader, first_step.t - 0.2, describe(reader.info()), read_overview(reader, reader.info()))
    assert len(model.ranks) == 4
    assert model.step == 0
    assert model.peak is None


def test_steps_of_no_rank_in_a_damaged_recording_are_left_out(recording, tmp_path):
    damaged = tmp_path / "damaged.sqlite"
    shutil.copy(recording, damaged)
    with contextlib.closing(sqlite3.connect(damaged)) as connection, connection:
        connection.execute("UPDATE steps SET rank = -1 WHERE rank = 0 AND step = 3")
    with Reader(damaged) as reader:
        model = load(reader, FRAMES[-1].t, describe(reader.info()), read_overview(reader, reader.info()))
    assert sorted(model.ranks) == [0, 1, 2, 3]


def test_alerts_are_as_they_stood_then(recording):
    alerts = [frame for frame in FRAMES if isinstance(frame.message, Alert)]
    with Reader(recording) as reader:
        model = load(reader, alerts[0].t, describe(reader.info()))
    assert [alert.id for alert in model.alerts] == [alerts[0].message.id]  # type: ignore[union-attr]


def test_loading_is_given_up_when_something_else_is_wanted(recording):
    asked: list[int] = []

    def superseded() -> bool:
        asked.append(1)
        return len(asked) == 2

    with Reader(recording) as reader, pytest.raises(Superseded):
        load(reader, FRAMES[-1].t, describe(reader.info()), superseded=superseded)
    assert len(asked) == 2


LOAD_TRAINING_FRAMES = Later(lambda: frames(ranks=2, steps=3000, planned=3000, devices=False))


@pytest.fixture(scope="module")
def load_training_recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("trained") / "run.sqlite", LOAD_TRAINING_FRAMES)


def mean_loss(moments: list[HistoryPoint]) -> float:
    return sum((moment.loss or 0.0) * moment.steps for moment in moments) / sum(moment.steps for moment in moments)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_seek_has_the_course_and_the_results_up_to_its_time(load_training_recording, share):
    place = round(share * (len(LOAD_TRAINING_FRAMES) - 1))
    assert place > TAIL_FRAMES
    t = LOAD_TRAINING_FRAMES[place].t
    with Reader(load_training_recording) as reader:
        sought = load(reader, t, describe(reader.info()), read_overview(reader, reader.info()))
        until = LOAD_TRAINING_FRAMES[: reader.seq_at(t)]
    all_folded = folded(until)
    left, right = (each.training.course.moments(2, each.peak_flops) for each in (sought, all_folded))
    assert (left[0].first_step, left[-1].step) == (1, right[-1].step)
    assert left[-1].tokens == pytest.approx(right[-1].tokens, rel=1e-3)
    assert left[-1].mfu == pytest.approx(right[-1].mfu)
    assert mean_loss(left) == pytest.approx(mean_loss(right), rel=2e-3)
    assert sought.training.evaluations == all_folded.training.evaluations
    assert sought.training.checkpoints == all_folded.training.checkpoints


def test_a_late_join_gets_the_course_from_before_it(load_training_recording):
    live = folded([])
    cut = len(LOAD_TRAINING_FRAMES) - 500
    for frame in [LOAD_TRAINING_FRAMES[0], *LOAD_TRAINING_FRAMES[cut:]]:
        live.apply(frame)
    joined = live.training.course.moments(2)[0].first_step
    assert joined > 2500
    with Reader(load_training_recording) as reader:
        adopt(live, read_overview(reader, reader.info()))
    moments = live.training.course.moments(2)
    assert moments[0].first_step == 1
    steps = [moment.step for moment in moments]
    assert steps == sorted(set(steps))
    assert moments[-1].tokens == pytest.approx(
        folded(LOAD_TRAINING_FRAMES).training.course.moments(2)[-1].tokens, rel=1e-3
    )
    assert len(live.training.evaluations) == 60
