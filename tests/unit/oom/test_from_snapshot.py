"""The report of a real snapshot from an H200 that ran out of memory at its loss."""

import json
from pathlib import Path

import pytest
from ftmon.protocol.analysis.allocator.snapshot.replay import Replay
from ftmon.protocol.analysis.oom.from_snapshot import report_of
from ftmon.protocol.snapshot.reader import open_snapshot
from ftmon.tui.cli.main import main

DATA = Path(__file__).parents[2] / "data"
OOM, FINE = DATA / "oom_backward.pickle.gz", DATA / "step_zero3.pickle.gz"


def test_a_real_failure_at_the_loss_is_told_as_logits_with_the_size_of_a_copy() -> None:
    snapshot = open_snapshot(OOM)
    report = report_of(snapshot, [Replay(snapshot, 0)])
    assert report is not None
    assert report.phase == "forward"
    assert (report.verdict.kind, report.verdict.sure) == ("logits", True)
    assert report.oom.stack[-1].endswith("functional.py:3504 cross_entropy")
    assert "120.12 GiB free" in report.verdict.text  # a limit was set on that process
    first = report.remedies[0]
    assert (first.kind, first.frees_bytes) == ("chunked_loss", report.oom.requested_bytes)


def test_what_the_snapshot_held_adds_up_and_who_held_most_is_named() -> None:
    snapshot = open_snapshot(OOM)
    report = report_of(snapshot, [Replay(snapshot, 0)])
    assert report is not None
    oom = report.oom
    assert sum(segment.size_bytes for segment in oom.segments) == oom.reserved_bytes
    assert sum(segment.free_blocks for segment in oom.segments) == oom.free_blocks
    assert oom.holders[0].frames[-1].endswith("loss_utils.py:59 ForCausalLMLoss")
    assert oom.holders == sorted(oom.holders, key=lambda group: -group.bytes)


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
    assert main(["oom", str(path)]) != 0
    assert capsys.readouterr().err.count("\n") == 1
