"""The sources against the real hub, launcher and pretended rank processes."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from eventually import eventually
from ftmon.protocol.messages import control
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.recording.reader import Reader
from ftmon.tui.model import RunModel
from ftmon.tui.model.rank import RECENT_STEPS
from ftmon.tui.model.runs import RunList
from ftmon.tui.source.base import Source
from ftmon.tui.source.live import LiveSource
from ftmon.tui.source.replay import ReplaySource
from hub_client import exit_of, fake_ranks, hub_gone, hub_of, started

pytestmark = pytest.mark.usefixtures("private_home")


def pump(source: Source, until: Callable[[], bool]) -> None:
    eventually(until, "what was to be shown", each=source.pump, state=lambda: source.connection, every=0.005)


def step_numbers(model: RunModel, rank: int) -> list[int]:
    return [step.step for step in model.ranks[rank].steps]


def test_a_run_is_watched_from_a_late_join_to_its_kill_and_its_replay_is_what_was_seen() -> None:
    with started(fake_ranks({"rate": 60}, {"rate": 60})) as run:
        early = LiveSource(run)
        early.start()
        pump(early, lambda: len(early.model.ranks) == 2 and early.model.step >= 40)
        late = LiveSource(run)
        late.start()
        pump(late, lambda: late.connection.state == "live" and len(late.model.ranks) == 2 and late.model.step >= 60)
        shown = step_numbers(late.model, 1)
        # From the first step on, unless the run has made more than are kept by now.
        assert shown == list(range(max(1, shown[-1] - RECENT_STEPS + 1), shown[-1] + 1))
        assert RunList().entry(run).live

        late.transport.goto("10")
        pump(late, lambda: not late.transport.seeking)
        assert (late.transport.mode, late.model.step) == ("rewound", 10)
        late.transport.live()
        pump(late, lambda: late.transport.mode == "live" and late.model.step >= 70)

        record = late.commands[late.send(control.Kill())]
        # The result is published too, and that may come before both answers.
        pump(late, lambda: record.result is not None and record.accepted is not None)
        assert record.accepted.ok
        exit_of(run)
        hub_gone(run)
        for source in (early, late):
            pump(source, lambda source=source: source.connection.state == "ended" and source.model.ended)
            assert step_numbers(source.model, 0) == step_numbers(early.model, 0)
        replay = ReplaySource(run.recording, at_end=True)
        replay.start()
        pump(replay, lambda: replay.model.last_seq > 0)
        for number, rank in early.model.ranks.items():
            assert replay.model.ranks[number].last == rank.last
            assert replay.model.ranks[number].state == rank.state
            assert replay.model.ranks[number].peak == rank.peak
        assert list(replay.model.alerts) == list(early.model.alerts)
        assert replay.model.state == early.model.state
        entry = RunList().entry(run)
        assert not entry.live
        assert entry.state == early.model.state
        assert entry.step >= 70
        for source in (early, late, replay):
            source.close()


def test_a_killed_hub_is_gone_on_screen_until_the_next_and_nothing_recorded_is_missing() -> None:
    with started(fake_ranks({"rate": 60})) as run:
        source = LiveSource(run)
        source.start()
        pump(source, lambda: source.model.step >= 30)
        os.kill(hub_of(run).process.pid, signal.SIGKILL)
        step, joined = source.model.step, source.connection.since
        # The launcher may bring a new one back before anybody looks.
        pump(source, lambda: source.connection.since > joined and source.connection.state == "live")
        pump(source, lambda: source.model.step >= step + 60)
        # The stream runs ahead of the recording, which is written in batches.
        pump(source, lambda: max(_recorded_steps(run.recording), default=0) >= step + 60)
        recorded = _recorded_steps(run.recording)
        last = source.model.step
        assert set(step_numbers(source.model, 0)) >= {number for number in recorded if last - 200 < number <= last}
        source.close()


def _recorded_steps(path: Path) -> set[int]:
    with Reader(path) as reader:
        found, after = set[int](), 0
        while frames := reader.frames(after, 2000):
            after = frames[-1].seq
            found |= {frame.message.step for frame in frames if isinstance(frame.message, Step)}
    return found
