"""A recording of schema 1, which the Writer of commit c144ba7 wrote (2 ranks, 40 steps), is read by today's code."""

import gzip
import json
import os
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from ftmon.protocol.errors import RecordingError
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.recording.results import RecordingInfo
from ftmon.protocol.recording.writer import Writer
from ftmon.tui.cli.main import main
from places import DATA

PACKED = DATA / "recording_before_0_2.sqlite.gz"
STEPS = "95ca67382197fe18dde48bce3ce6d9648c7de1a6e00d57d678bc80fa6d1b5a56"
"""SHA-256 of its steps in msgpack, as read by the code of schema 1."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "recording.sqlite"
    path.write_bytes(gzip.decompress(PACKED.read_bytes()))
    return path


def test_status_describes_it(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(old), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["exit_code"], found["world_size"]) == ("finished", 0, 2)
    assert (found["step"], found["total_steps"]) == (40, 40)
    assert main(["status", str(old)]) == 0
    assert capsys.readouterr().out.count("warning: rank 1 optimizer +0.9 GiB for 4 ms") == 4


def test_memory_shows_the_cause_of_a_spike(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", str(old)]) == 0
    text = capsys.readouterr().out
    assert "highest peak: 37.20 GiB in backward, step 10" in text
    assert "1.00 GiB  x2      _multi_tensor_adamw  adamw.py:500" in text


def test_a_replay_shows_every_step_and_alert(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(old), "--plain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "step 40/40  loss 2.8328" in lines[-3]
    assert sum("spike: rank 1 optimizer" in line for line in lines) == 4
    assert lines[-1].endswith("finished")


def read(path: Path) -> tuple[RecordingInfo, list[Frame]]:
    with Reader(path) as reader:
        assert reader.marks()
        assert not reader.jobs()  # a table that it lacks counts as empty
        return reader.info(), reader.frames(limit=10_000)


def test_every_step_of_it_is_read_exactly_and_it_is_not_changed(old: Path) -> None:
    before = old.read_bytes()
    info, frames = read(old)
    steps = [frame.message for frame in frames if isinstance(frame.message, Step)]
    assert (info.schema, info.missing, len(steps)) == (1, "", 80)
    assert sha256(msgspec.msgpack.encode(steps)).hexdigest() == STEPS
    assert old.read_bytes() == before


def test_what_is_left_of_it_is_read(old: Path) -> None:
    _, frames = read(old)
    os.truncate(old, old.stat().st_size * 9 // 10)
    with Reader(old) as reader:
        left = reader.frames(limit=10_000)
        assert reader.info().missing.startswith("the file is cut short: ")
    assert left
    assert all(frame in frames for frame in left)


def test_a_writer_does_not_continue_it(old: Path) -> None:
    with pytest.raises(RecordingError, match="has recording schema 1, this ftmon writes 2; move it out of the way"):
        Writer(old)
