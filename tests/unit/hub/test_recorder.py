import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from eventually import eventually
from ftmon.protocol.messages.telemetry import DeviceSample, LogLine, Step
from ftmon.protocol.recording import writer as batches
from ftmon.protocol.recording import writer as writers
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.recording.writer import Batch, Writer
from ftmon.trainer.hub import telemetry as module
from ftmon.trainer.hub.telemetry import Recorder
from streams import RUN, Stream

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


def test_nobody_waits_for_a_disk_that_takes_its_time_and_nothing_is_lost(path: Path):
    recorder = Recorder(SlowWriter(path, RUN))
    done = threading.Event()
    put(recorder, FRAMES[:100])
    recorder.commit(done.set)
    assert SlowWriter.entered.wait(200)
    put(recorder, FRAMES[100:])
    recorder.commit()
    assert not done.is_set(), "what is asked for after a commit comes after it"
    SlowWriter.goes.set()
    assert done.wait(200)
    recorder.close()
    with Reader(path) as reader:
        assert reader.frames(limit=10**6) == FRAMES
        assert reader.info().complete


def test_a_disk_that_takes_nothing_for_long_is_told_of_and_its_end_too(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_STUCK_SECONDS", 0.05)
    recorder = Recorder(SlowWriter(path, RUN))
    assert recorder.error == ""
    recorder.commit()
    eventually(lambda: recorder.error, "the recorder's error")
    assert recorder.error.startswith(f"{path}: the disk has accepted no writes for ")
    done = threading.Event()
    recorder.commit(done.set)
    SlowWriter.goes.set()
    assert done.wait(200)
    recorder.close()
    assert recorder.error == ""


def test_what_cannot_be_held_is_let_go_and_counted_and_what_explains_the_run_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
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


def test_a_mistake_in_one_batch_is_counted_and_does_not_end_the_recording(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
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


def test_what_a_sender_numbered_is_kept_with_what_it_said(path: Path):
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
