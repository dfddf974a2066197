"""``ftmon oom`` of a snapshot file, which a process of its own reads."""

import json
from pathlib import Path

import pytest
from ftmon.tui.cli.main import main
from snapshot_files import DATA

OOM, FINE = DATA / "oom_backward.pickle.gz", DATA / "step_zero3.pickle.gz"


def test_the_command_prints_the_report_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["oom", str(OOM)]) == 0
    text = capsys.readouterr().out
    assert "verdict: logits and loss" in text
    assert "1. Compute the loss in chunks" in text
    assert main(["oom", str(OOM), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["file"]) == ("", str(OOM))
    assert found["reports"][0]["verdict"]["kind"] == "logits"
    assert found["reports"][0]["oom"]["requested_bytes"] == 4_978_638_848


def test_a_file_without_an_oom_is_one_line_and_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["oom", str(FINE)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"ftmon: {FINE}: no out-of-memory error is recorded\n"


def test_a_file_that_is_no_snapshot_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("nothing")
    assert main(["oom", str(path)]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ftmon: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
