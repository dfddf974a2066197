"""A recording that the Writer of commit c144ba7 wrote (2 ranks, 40 steps) is read by today's commands."""

import gzip
import json
from pathlib import Path

import pytest
from ftmon.protocol.recording.reader import Reader
from ftmon.tui.cli.main import main

PACKED = Path(__file__).parents[2] / "data" / "recording_before_0_2.sqlite.gz"


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


def test_the_reader_finds_nothing_missing(old: Path) -> None:
    with Reader(old) as reader:
        assert not reader.info().missing
