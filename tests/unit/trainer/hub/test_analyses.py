"""A batch of steps raises the same alerts as single steps; a detector's exception costs one step, not the batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from ftmon.protocol.analysis import kinds
from ftmon.protocol.analysis.findings.finding import Detector, Handler
from ftmon.protocol.messages.control import Alert, HubStats, RankState, RunState
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.messages.wire import Frame, Message
from ftmon.protocol.run.rundir import RunFile
from ftmon.trainer.hub.analyses import Analysis
from streams import Stream

OF_THE_HUB = (Alert, RankState, RunState, HubStats)


def frames() -> list[Frame]:
    """Rank 1 has spikes; rank 2 is slow in every forward, its loss becomes NaN, and its memory grows."""
    found = [f for f in Stream(ranks=4, steps=200, finished=False).frames() if not isinstance(f.message, OF_THE_HUB)]
    return [
        msgspec.structs.replace(frame, message=changed(frame.message))
        if isinstance(frame.message, Step) and frame.message.rank == 2
        else frame
        for frame in found
    ]


def made(emit: Callable[[Message], tuple[int, float]] = lambda _: (0, 0.0)) -> Analysis:
    return Analysis(RunFile("run", "run", 0.0, ["x"], "/", "here", "watch"), emit)


def feed(analysis: Analysis, given: Sequence[Frame]) -> None:
    for frame in given:
        analysis.feed(frame.seq, frame.t, frame.message)


@pytest.fixture(scope="module")
def steps() -> list[Frame]:
    return [frame for frame in frames() if isinstance(frame.message, Step)][:20]


def changed(step: Step) -> Step:
    grown = step.step * 40 * 2**20
    phases = []
    for record in step.phases:
        own = record.allocated
        held = msgspec.structs.replace(own, start=own.start + grown, end=own.end + grown, peak=own.peak + grown)
        phases.append(msgspec.structs.replace(record, allocated=held))
    loss = float("nan") if step.step >= 150 else step.loss
    return msgspec.structs.replace(step, phases=phases, loss=loss)


def alerts_of(given: Sequence[Frame], *, one_by_one: bool) -> dict[tuple[Any, ...], Alert]:
    """Return the last state of every alert."""
    emitted: list[Message] = []

    def emit(message: Message) -> tuple[int, float]:
        emitted.append(message)
        return len(emitted), given[-1].t

    analysis = made(emit)
    for frame in given:
        analysis.feed(frame.seq, frame.t, frame.message)
        if one_by_one:
            analysis.flush()
    analysis.tick(given[-1].t + 1.0)
    alerts = [msgspec.structs.replace(one, id=0) for one in emitted if isinstance(one, Alert)]
    return {(one.kind, one.rank, one.phase, one.evidence.get("rule")): one for one in alerts}


def test_a_batch_of_steps_raises_the_alerts_of_single_ones_before_a_message_of_another_type(steps):
    given = frames()
    assert max(given.index(one) for one in given[:300] if isinstance(one.message, Step)) > 64
    found = alerts_of(given, one_by_one=True)
    assert {kind for kind, *_ in found} >= {"spike", "leak", "health"}
    assert alerts_of(given, one_by_one=False) == found
    analysis = made()
    seen: list[int] = []
    analysis._detectors.steps = lambda steps, _failed: [seen.extend(step.step for _, step in steps)][:0]  # type: ignore[method-assign]
    feed(analysis, steps)
    assert seen == []
    analysis.feed(99, steps[-1].t, Stream(ranks=4).hello(0, steps[-1].t))
    assert seen == [frame.message.step for frame in steps]


def test_a_detector_that_fails_for_one_step_still_gets_the_others(steps, monkeypatch, capsys):
    first, later = [], []

    class FailsOnce(Detector):
        def handlers(self) -> Mapping[type, Handler]:
            return {Step: self.step}

        def step(self, step: Step) -> None:
            first.append(step.step)
            if len(first) == 3:
                raise ZeroDivisionError("step three")

    class Works(Detector):
        def handlers(self) -> Mapping[type, Handler]:
            return {Step: lambda step: later.append(step.step)}

    monkeypatch.setattr(kinds, "DETECTORS", [FailsOnce, Works])
    analysis = made()
    feed(analysis, steps)
    analysis.flush()
    assert len(first) == len(later) == 20
    assert "ZeroDivisionError: step three" in capsys.readouterr().err
