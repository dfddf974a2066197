"""Steps that the detectors look at together have the alerts of one step after another."""

from collections.abc import Sequence
from typing import Any

import msgspec
from ftmon.protocol.messages.control import Alert, HubStats, RankState, RunState
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.messages.wire import Frame, Message
from ftmon.protocol.run.rundir import RunFile
from ftmon.trainer.hub.analyses.analysis import Analysis
from streams import Stream

OF_THE_HUB = (Alert, RankState, RunState, HubStats)


def frames() -> list[Frame]:
    """Rank 1 has spikes; rank 2 is slow in every forward, its loss becomes NaN, and its memory grows."""
    found: list[Frame] = []
    for frame in Stream(ranks=4, steps=200, finished=False).frames():
        message = frame.message
        if isinstance(message, OF_THE_HUB):
            continue
        if isinstance(message, Step) and message.rank == 2:
            message = changed(message)
        found.append(msgspec.structs.replace(frame, message=message))
    return found


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

    analysis = Analysis(RunFile("run", "run", 0.0, ["x"], "/", "here", "watch"), emit)
    for frame in given:
        analysis.feed(frame.seq, frame.t, frame.message)
        if one_by_one:
            analysis.flush()
    analysis.tick(given[-1].t + 1.0)
    alerts = [msgspec.structs.replace(one, id=0) for one in emitted if isinstance(one, Alert)]
    return {(one.kind, one.rank, one.phase, one.evidence.get("rule")): one for one in alerts}


def test_steps_together_raise_what_steps_one_by_one_raise() -> None:
    given = frames()
    assert max(given.index(one) for one in given[:300] if isinstance(one.message, Step)) > 64
    found = alerts_of(given, one_by_one=True)
    assert {kind for kind, *_ in found} >= {"spike", "leak", "health"}
    assert alerts_of(given, one_by_one=False) == found


def test_a_step_is_looked_at_before_the_message_after_it() -> None:
    given = [frame for frame in frames() if isinstance(frame.message, Step)][:20]
    analysis = Analysis(RunFile("run", "run", 0.0, ["x"], "/", "here", "watch"), lambda _: (0, 0.0))
    seen: list[int] = []
    analysis._detectors.steps = lambda steps: [seen.extend(step.step for _, step in steps)][:0]  # type: ignore[method-assign]
    for frame in given:
        analysis.feed(frame.seq, frame.t, frame.message)
    assert seen == []
    analysis.feed(99, given[-1].t, Stream(ranks=4).hello(0, given[-1].t))
    assert seen == [frame.message.step for frame in given]
