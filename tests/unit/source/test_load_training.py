"""The course of a training after a seek or a late join: what the recording tells, up to that time and not beyond."""

from pathlib import Path

import pytest
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording.reader import Reader
from ftmon.tui.model import RunModel
from ftmon.tui.model.training import HistoryPoint
from ftmon.tui.source.load import TAIL_FRAMES, adopt, describe, load, read_overview
from streams import Later, write
from trainscenes import frames

FRAMES = Later(lambda: frames(ranks=2, steps=3000, planned=3000, devices=False))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("trained") / "run.sqlite", FRAMES)


def folded(until: list[Frame]) -> RunModel:
    model = RunModel()
    for frame in until:
        model.apply(frame)
    return model


def mean_loss(moments: list[HistoryPoint]) -> float:
    return sum((moment.loss or 0.0) * moment.steps for moment in moments) / sum(moment.steps for moment in moments)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_seek_has_the_course_and_the_results_up_to_its_time(recording: Path, share: float) -> None:
    place = round(share * (len(FRAMES) - 1))
    assert place > TAIL_FRAMES
    t = FRAMES[place].t
    with Reader(recording) as reader:
        sought = load(reader, t, describe(reader.info()), read_overview(reader, reader.info()))
        until = FRAMES[: reader.seq_at(t)]
    all_folded = folded(until)
    left, right = (each.training.course.moments(2, each.peak_flops) for each in (sought, all_folded))
    assert (left[0].first_step, left[-1].step) == (1, right[-1].step)
    assert left[-1].tokens == pytest.approx(right[-1].tokens, rel=1e-3)
    assert left[-1].mfu == pytest.approx(right[-1].mfu)
    assert mean_loss(left) == pytest.approx(mean_loss(right), rel=2e-3)
    assert sought.training.evaluations == all_folded.training.evaluations
    assert sought.training.checkpoints == all_folded.training.checkpoints


def test_a_late_join_gets_the_course_from_before_it(recording: Path) -> None:
    live = folded([])
    cut = len(FRAMES) - 500
    for frame in [FRAMES[0], *FRAMES[cut:]]:
        live.apply(frame)
    joined = live.training.course.moments(2)[0].first_step
    assert joined > 2500
    with Reader(recording) as reader:
        adopt(live, read_overview(reader, reader.info()))
    moments = live.training.course.moments(2)
    assert moments[0].first_step == 1
    steps = [moment.step for moment in moments]
    assert steps == sorted(set(steps))
    assert moments[-1].tokens == pytest.approx(folded(FRAMES).training.course.moments(2)[-1].tokens, rel=1e-3)
    assert len(live.training.evaluations) == 60
