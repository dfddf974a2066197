"""What the publisher does with items that make no message, with a request to stop, and with a host's agent."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.telemetry import Checkpoint, Step
from ftmon.protocol.run.environment import PLACE_ENV
from ftmon.protocol.run.rundir import RunDir, RunOptions
from ftmon.trainer.probe.link import output, publisher
from ftmon.trainer.probe.link.commands import agree_on_step
from ftmon.trainer.probe.link.publisher import Publisher
from ftmon.trainer.probe.loop.training import Training
from ftmon.trainer.probe.memory.snapshots import PhaseMarks
from ftmon.trainer.probe.oom.console import Hold
from ftmon.trainer.probe.oom.report import OomHistory
from ftmon.trainer.probe.phases.tracker import Counts, Mark, Notes, Pace, StepRaw, StopRequest
from ftmon.trainer.probe.rank.context import RankContext
from ftmon.trainer.probe.values.batch import Seen


class Sent:
    def __init__(self, context: "zmq.Context[Any]", place: Path) -> None:
        training = Training(RankContext(0, 0, 1, RunDir(place)), Counts())
        self.tracker, self.outbox = training.tracker, training.outbox
        self.publisher = Publisher(training, Pace(), StopRequest(), Hold(RunOptions()), OomHistory(), PhaseMarks())
        self.received = context.socket(zmq.PULL)
        self.received.bind("inproc://telemetry")
        self.publisher._telemetry = context.socket(zmq.PUSH)
        self.publisher._telemetry.connect("inproc://telemetry")

    def messages(self) -> list[Any]:
        return [wire.decode_body(self.received.recv_multipart()[1]) for _ in iter(lambda: self.received.poll(0), 0)]


@pytest.fixture
def sent(tmp_path: Path) -> Iterator[Sent]:
    context: zmq.Context[Any] = zmq.Context()
    yield Sent(context, tmp_path)
    context.destroy(linger=0)


def test_labels_that_have_not_arrived_are_not_read_and_ranks_agree_on_the_step_to_stop_after(tmp_path):
    seen, mark = Seen(None, None, "of the batch", "on their way"), Mark("idle", 0, None, None, 0, 0)
    raw = publisher.without_device(StepRaw(1, [mark, mark], 0.0, Notes(seen=[seen]), 0))
    assert raw.notes.seen == [Seen(None, None, "of the batch")]
    first = agree_on_step(tmp_path / "stop-after", 40, 0.1)
    assert first == agree_on_step(tmp_path / "stop-after", 42, 0.2) == 53
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stop-after"]


def test_a_message_that_cannot_be_encoded_is_dropped_and_counted(sent):
    unencodable: Any = 1 << 70
    sent.publisher.send(Checkpoint(0, 1, 0.0, "a", unencodable))
    sent.publisher.send(Checkpoint(0, 1, 0.0, "b"))
    assert [message.path for message in sent.messages()] == ["b"]
    assert sent.publisher.dropped == 1


def test_a_step_that_makes_no_message_is_dropped_and_the_next_one_is_sent(sent):
    unreadable: Any = object()
    sent.tracker.notes.tokens.append(unreadable)
    sent.tracker.end_step()
    sent.tracker.end_step()
    sent.publisher._drain()
    sent.publisher._send_steps()
    steps = [message for message in sent.messages() if isinstance(message, Step)]
    assert [(step.step, step.dropped) for step in steps] == [(2, 1)]


def test_last_steps_that_the_device_has_finished_are_sent_whole_though_the_thread_stood_still(sent, monkeypatch):
    def refused(_: Any) -> Any:
        raise AssertionError("the device has finished it")

    monkeypatch.setattr(publisher, "LAST_STEPS_SECONDS", -1.0)  # the time is up before the first look
    monkeypatch.setattr(publisher, "without_device", refused)
    sent.tracker.end_step()
    sent.publisher._drain()
    sent.publisher._send_last_steps()
    assert [message.step for message in sent.messages() if isinstance(message, Step)] == [1]


def test_an_agent_that_cannot_be_started_is_logged_once_and_ends_nothing(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # a short path: sockets are in the folder itself
        for name in ("logs", "agent.lock"):
            (Path(place) / name).mkdir()
        monkeypatch.setenv(PLACE_ENV, place)
        monkeypatch.setattr(output, "_failed", False)
        with pytest.raises(IsADirectoryError):
            output.start_agent()
        for _ in range(3):
            output.tend()
        (line,) = (Path(place) / "logs" / "probe.log").read_text().splitlines()
    assert "agent cannot be started: IsADirectoryError" in line
