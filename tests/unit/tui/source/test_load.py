"""A state built for a time from a recording must show what folding everything up to that time shows."""

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording.reader import Reader
from ftmon.tui.model import RunModel
from ftmon.tui.model.run import status
from ftmon.tui.model.training import HistoryPoint
from ftmon.tui.source.load import TAIL_FRAMES, Overview, adopt, describe, load, read_overview
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import folded
from streams import Later, Stream, write
from trainscenes import frames

FRAMES = Later(lambda: Stream(ranks=4, steps=1500).frames())


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("load") / "run.sqlite", FRAMES)


@pytest.fixture(scope="module")
def reader(recording: Path) -> Iterator[Reader]:
    with Reader(recording) as reader:
        yield reader


@pytest.fixture(scope="module")
def overview(reader: Reader) -> Overview:
    return read_overview(reader, reader.info())


def fold(reader: Reader, frames: list[Frame]) -> RunModel:
    model = RunModel(describe(reader.info()))
    for frame in frames:
        model.apply(frame)
    return model


def shown(model: RunModel) -> dict[str, Any]:
    """What the screens show that must be equal to the last digit."""
    ranks = {
        rank.rank: (rank.timeline.marks, rank.last, list(rank.steps)[-30:], rank.allocator.last, rank.reserved_peak)
        for rank in model.ranks.values()
    }
    alerts = sorted((alert.id, alert.count, alert.resolved) for alert in model.alerts)
    return {**status(model), "alerts": alerts, "logs": model.logs.select(limit=200), "of ranks": ranks}


@given(place=st.deferred(lambda: st.integers(60, len(FRAMES) - 1)), with_overview=st.booleans())
@settings(deadline=None, max_examples=10)
def test_a_seek_shows_what_folding_everything_shows(reader, overview, place, with_overview):
    t = FRAMES[place].t
    sought = load(reader, t, describe(reader.info()), overview if with_overview else None)
    all_folded = fold(reader, FRAMES[: reader.seq_at(t)])
    all_folded.tick(t)
    assert sought.last_seq == all_folded.last_seq
    left, right = shown(sought), shown(all_folded)
    assert {name: left[name] for name in left if left[name] != right[name]} == {}


@given(place=st.deferred(lambda: st.integers(1, len(FRAMES) - 2)), more=st.integers(1, 400))
@example(place=9751, more=400)  # up to the end, where speeds are means over all steps
@settings(deadline=None, max_examples=8)
def test_history_and_then_the_tail_is_the_same_as_everything(reader, overview, place, more):
    """A late join: the state as recorded, then the live frames, some of which are in both."""
    joined = load(reader, FRAMES[place].t, describe(reader.info()))
    # Times of one moment need not be in order, so the state at a time may be of a later message than that one.
    end = max(min(place + more, len(FRAMES) - 1), joined.last_seq - 1)
    all_folded = fold(reader, FRAMES[: end + 1])
    for frame in FRAMES[max(0, place - 50) : end + 1]:
        joined.apply(frame)
    if joined.ended:  # then speeds are means over all steps, the early ones of which are in the overview
        adopt(joined, overview)
    mine, whole = shown(joined), shown(all_folded)
    for name in ("steps_per_second", "seconds_per_step", "tokens_per_second") if joined.ended else ():
        assert mine.pop(name) == pytest.approx(whole.pop(name), rel=1e-5)
    assert mine == whole


def test_memory_and_charts_after_a_seek_have_the_past_and_none_of_what_came_later(reader, overview):
    t = FRAMES[len(FRAMES) // 2].t
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
    expected, found = (each.training.course.moments(4) for each in (all_folded, sought))
    assert found[0].step <= 8
    assert found[-1].step == expected[-1].step == all_folded.leading_step
    middle = found[len(found) // 2]
    assert middle.loss == pytest.approx(next(each.loss for each in expected if each.step == middle.step), rel=0.2)


def test_before_the_first_step_there_are_ranks_and_no_steps_and_at_the_first_alert_only_that(reader, overview):
    first_step = next(frame for frame in FRAMES if type(frame.message).__name__ == "Step")
    model = load(reader, first_step.t - 0.2, describe(reader.info()), overview)
    assert (len(model.ranks), model.step) == (4, 0)
    assert model.peak is None
    first = next(frame for frame in FRAMES if isinstance(frame.message, Alert))
    model = load(reader, first.t, describe(reader.info()))
    assert [alert.id for alert in model.alerts] == [first.message.id]


TRAINED = Later(lambda: frames(ranks=2, steps=3000, planned=3000, devices=False))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    with Reader(write(tmp_path_factory.mktemp("trained") / "run.sqlite", TRAINED)) as reader:
        yield reader


def mean_loss(moments: list[HistoryPoint]) -> float:
    return sum((moment.loss or 0.0) * moment.steps for moment in moments) / sum(moment.steps for moment in moments)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_seek_has_the_course_and_the_results_up_to_its_time(trained, share):
    place = round(share * (len(TRAINED) - 1))
    assert place > TAIL_FRAMES
    t = TRAINED[place].t
    sought = load(trained, t, describe(trained.info()), read_overview(trained, trained.info()))
    all_folded = folded(TRAINED[: trained.seq_at(t)])
    left, right = (each.training.course.moments(2, each.peak_flops) for each in (sought, all_folded))
    assert (left[0].first_step, left[-1].step) == (1, right[-1].step)
    assert left[-1].tokens == pytest.approx(right[-1].tokens, rel=1e-3)
    assert left[-1].mfu == pytest.approx(right[-1].mfu)
    assert mean_loss(left) == pytest.approx(mean_loss(right), rel=2e-3)
    assert sought.training.evaluations == all_folded.training.evaluations
    assert sought.training.checkpoints == all_folded.training.checkpoints


def test_a_seek_before_the_first_step_has_no_course_and_steps_of_no_rank_are_left_out(trained, recording, tmp_path):
    sought = load(trained, TRAINED[0].t, describe(trained.info()), read_overview(trained, trained.info()))
    assert not any(rank.steps for rank in sought.ranks.values())
    assert (sought.training.course.moments(2), sought.losses_of(sought.job)) == ([], [])
    damaged = tmp_path / "damaged.sqlite"
    shutil.copy(recording, damaged)
    with contextlib.closing(sqlite3.connect(damaged)) as connection, connection:
        connection.execute("UPDATE steps SET rank = -1 WHERE rank = 0 AND step = 3")
    with Reader(damaged) as reader:
        model = load(reader, FRAMES[-1].t, describe(reader.info()), read_overview(reader, reader.info()))
    assert sorted(model.ranks) == [0, 1, 2, 3]


def test_a_late_join_gets_the_course_from_before_it(trained):
    live = folded([TRAINED[0], *TRAINED[len(TRAINED) - 500 :]])
    assert live.training.course.moments(2)[0].first_step > 2500
    adopt(live, read_overview(trained, trained.info()))
    moments = live.training.course.moments(2)
    assert moments[0].first_step == 1
    steps = [moment.step for moment in moments]
    assert steps == sorted(set(steps))
    everything = folded(TRAINED).training.course.moments(2)
    assert moments[-1].tokens == pytest.approx(everything[-1].tokens, rel=1e-3)
    assert len(live.training.evaluations) == 60
