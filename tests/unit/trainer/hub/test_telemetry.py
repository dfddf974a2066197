import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from eventually import eventually
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.messages.telemetry import DeviceSample, Goodbye, Heartbeat, LogLine, Step
from ftmon.protocol.recording import writer as batches
from ftmon.protocol.recording import writer as writers
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.recording.writer import Batch, Writer
from ftmon.trainer.hub import telemetry as module
from ftmon.trainer.hub.telemetry import Intake, Recorder
from streams import RUN, Stream

BEAT = Heartbeat(rank=0, step=1, phase="data", phase_started=1.0, progress=1, time=1.0)
BEAT_1, BEAT_2 = (msgspec.structs.replace(BEAT, rank=rank) for rank in (1, 2))


class Line:
    def __init__(self, known: dict[str, int] | None) -> None:
        self.context = zmq.Context()
        self.pull = self.context.socket(zmq.PULL)
        self.pull.bind("inproc://telemetry")
        self.push = self.context.socket(zmq.PUSH)
        self.push.connect("inproc://telemetry")
        self.accepted: list[tuple[wire.Message, str, bytes]] = []
        self.missed: list[int] = []
        self.refusals: list[tuple[str, str]] = []
        self.intake = Intake(
            lambda message, t, sender, body: self.accepted.append((message, sender, body)),
            lambda sender, reason: self.refusals.append((sender, reason)),
            known,
            lambda count: self.missed.append(count),
        )

    def send(self, seq: int, message: wire.Message = BEAT, src: str = "rank-0-1-1") -> None:
        self.push.send_multipart(wire.encode(src, seq, 1.0, message))

    def drain(self) -> int:
        assert self.pull.poll(5000)
        return self.intake.drain(self.pull, 1000)


@pytest.fixture
def line():
    made = Line({})
    yield made
    made.context.destroy(linger=0)


def test_a_message_is_handed_on_untouched_and_gaps_and_self_declared_drops_are_both_losses(line):
    line.send(1)
    line.drain()
    assert (line.accepted, line.intake.received) == ([(BEAT, "rank-0-1-1", wire.encode_body(BEAT))], 1)
    line.send(5)
    line.send(6, Goodbye(rank=0, time=1.0, step=1, reason="finished", dropped=2))
    line.drain()
    assert line.intake.lost == {"rank-0-1-1": 5}


def test_a_first_number_is_counted_from_what_was_recorded_before_and_unknown_without_that(line):
    line.send(4)
    line.drain()
    assert (line.intake.lost, line.intake.numbers()) == ({"rank-0-1-1": 3}, {"rank-0-1-1": 4})
    for known, lost in ((None, {}), ({"rank-0-1-1": 7, "rank-1-1-1": 2}, {"rank-0-1-1": 12, "rank-2-1-1": 1})):
        successor = Line(known)
        successor.send(20)
        successor.send(21)
        if known:
            successor.send(3, BEAT_1, "rank-1-1-1")
            successor.send(2, BEAT_2, "rank-2-1-1")
        successor.drain()
        assert (successor.intake.lost, sum(successor.missed)) == (lost, sum(lost.values()))
        successor.context.destroy(linger=0)


def test_another_major_version_is_refused_counted_and_told_once(line):
    foreign = msgspec.msgpack.encode({"v": [9, 0], "src": "rank-3-1-1", "seq": 1, "t": 0.0})
    for _ in range(3):
        line.push.send_multipart([foreign, wire.encode_body(BEAT)])
    line.send(1)
    line.drain()
    assert (line.intake.refused, len(line.refusals)) == (3, 1)
    assert "protocol 9.0" in line.refusals[0][1]
    assert len(line.accepted) == 1


def test_an_unknown_type_is_counted_and_its_number_is_not_a_loss(line):
    line.send(1)
    header = wire.encode_header("rank-0-1-1", 2, 1.0)
    line.push.send_multipart([header, msgspec.msgpack.encode({"type": "from_the_future", "x": 1})])
    line.send(3)
    line.drain()
    assert (line.intake.unknown, line.intake.refused, line.intake.lost) == (1, 0, {})


BODY = msgspec.msgpack.decode(wire.encode_body(BEAT))
FORGED = Alert(id=1, kind="note", severity="info", time=1.0, title="forged")


@pytest.mark.parametrize(
    "frames",
    [
        *([b"x"], [b"\xff", b"\xff"], [b"a", b"b", b"c"], [b"", b""]),
        *(
            [wire.encode_header("x", 1, 1.0), msgspec.msgpack.encode({**BODY, **wrong})]
            for wrong in ({"rank": 2**40}, {"rank": -7}, {"time": float("nan")}, {"time": 1e300}, {"phase_started": -1})
        ),
        wire.encode("rank-0-1-2", 1, 1.0, FORGED),
    ],
)
def test_what_cannot_be_is_refused_and_the_next_message_still_read(line, frames):
    line.push.send_multipart(frames)
    line.send(1)
    assert (line.drain(), line.intake.refused) == (2, 1)
    assert [message for message, _, _ in line.accepted] == [BEAT]


def test_a_drain_takes_no_more_than_its_limit(line):
    for seq in range(1, 11):
        line.send(seq)
    assert line.pull.poll(5000)
    assert line.intake.drain(line.pull, 4) == 4
    assert line.intake.drain(line.pull, 1000) == 6


def test_a_rank_speaks_for_itself_alone(line):
    line.send(1, BEAT_1)
    line.send(2)
    line.drain()
    assert [message.rank for message, _, _ in line.accepted] == [0]
    assert line.refusals == [("rank-0-1-1", "rank-0-1-1 sent a message in another rank's name")]


def test_names_without_end_are_not_kept(line, monkeypatch):
    monkeypatch.setattr("ftmon.trainer.hub.telemetry.MAX_SENDERS", 6)
    monkeypatch.setattr("ftmon.trainer.hub.telemetry.MAX_OTHERS", 3)
    for name in ("stranger {}", "rank-0-{}-1"):
        for number in range(10):
            line.send(1, src=name.format(number))
    line.send(1, src="rank-99999-1-1")
    line.drain()
    assert (len(line.accepted), line.intake.refused, len(line.refusals)) == (6, 15, 1)


def test_losses_beyond_all_numbers_stay_a_number(line):
    huge = Goodbye(rank=0, time=1.0, step=1, reason="finished", dropped=2**63 - 1)
    for number in range(4):
        line.send(1, src=f"s{number}")
        line.send(2, huge, src=f"s{number}")
    line.drain()
    msgspec.msgpack.encode(line.intake.lost)
    assert sum(line.intake.lost.values()) >= 2**53


FRAMES = list(Stream(ranks=2, steps=60).frames())


class SlowWriter(Writer):
    """The real one, on a disk that takes nothing until ``goes`` is set."""

    goes = threading.Event()
    entered = threading.Event()

    def write(self, batch: Batch) -> None:
        self.entered.set()
        self.goes.wait()
        super().write(batch)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    SlowWriter.goes.clear()
    SlowWriter.entered.clear()
    yield tmp_path / "r.sqlite"
    SlowWriter.goes.set()


def put(recorder: Recorder, frames: list) -> None:
    for frame in frames:
        recorder.writer.append(frame.seq, frame.t, frame.message)


def test_nobody_waits_for_a_disk_that_takes_its_time_which_is_told_of_and_nothing_is_lost(path, monkeypatch):
    monkeypatch.setattr(module, "_STUCK_SECONDS", 0.05)
    recorder = Recorder(SlowWriter(path, RUN))
    assert recorder.error == ""
    done = threading.Event()
    put(recorder, FRAMES[:100])
    recorder.commit(done.set)
    assert SlowWriter.entered.wait(200)
    put(recorder, FRAMES[100:])
    recorder.commit()
    eventually(lambda: recorder.error, "the recorder's error")
    assert recorder.error.startswith(f"{path}: the disk has accepted no writes for ")
    assert not done.is_set(), "what is asked for after a commit comes after it"
    SlowWriter.goes.set()
    assert done.wait(200)
    recorder.close()
    assert recorder.error == ""
    with Reader(path) as reader:
        assert reader.frames(limit=10**6) == FRAMES
        assert reader.info().complete


def test_what_cannot_be_held_is_let_go_and_counted_and_what_explains_the_run_stays(path, monkeypatch):
    monkeypatch.setattr(batches, "PENDING_LIMIT", 50)
    recorder = Recorder(SlowWriter(path, RUN))
    recorder.commit()
    assert SlowWriter.entered.wait(200)
    put(recorder, FRAMES)
    recorder.commit()
    SlowWriter.goes.set()
    recorder.close()
    bulky = [frame for frame in FRAMES if isinstance(frame.message, (Step, DeviceSample, LogLine))]
    with Reader(path) as reader:
        assert reader.frames(limit=10**6) == [frame for frame in FRAMES if frame not in bulky]
        assert f"{len(bulky)} messages" in reader.info().missing
    assert recorder.writer.recorded == len(FRAMES) - len(bulky)


def test_a_mistake_in_one_batch_is_counted_and_does_not_end_the_recording(path, monkeypatch, capsys):
    def mistaken(*_: object) -> int:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(writers, "RETRY_S", 0.0)
    recorder = Recorder(Writer(path, RUN))
    done = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(Batch, "insert", mistaken)
        put(recorder, FRAMES[:10])
        recorder.commit(done.set)
        assert done.wait(200)
    put(recorder, FRAMES[10:])
    recorder.close()
    assert "RuntimeError: a mistake" in capsys.readouterr().err
    with Reader(path) as reader:
        assert reader.frames(limit=10**6) == FRAMES[10:]
        assert "10 messages" in reader.info().missing


def test_what_a_sender_numbered_is_kept_with_what_it_said(path):
    numbers = {"a": 7}
    recorder = Recorder(Writer(path, RUN))
    recorder.agent_numbers = lambda: dict(numbers)
    put(recorder, FRAMES[:10])
    recorder.commit()
    numbers |= {"a": 9, "b": 1}
    put(recorder, FRAMES[10:20])
    recorder.close()
    again = Writer(path, RUN)
    assert again.agent_numbers == {"a": 9, "b": 1}
    again.close()
