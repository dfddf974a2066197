"""A sweep that goes on in a results file with rows of an earlier plan."""

import signal
from pathlib import Path

import pytest
from ftmon.protocol.sweep.rows import FORMAT, Header, Row
from ftmon.protocol.sweep.store import Writer
from ftmon.trainer.sweep import plan
from ftmon.trainer.sweep.__main__ import main


def test_only_rows_of_its_own_plan_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # main() handles signals of this process
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text("command: python {seq}\naxes: {seq: [8, 16]}\n")
    wanted = plan.read("s.yaml")
    writer = Writer(Path("s.results.jsonl"), Header(FORMAT, "s", "", plan.fingerprint(wanted), ["seq"], 3, 2, 0.0))
    for seq in (8, 16, 32, 64):
        writer.append(Row({"seq": seq}, "out-of-memory", 1.0))
    writer.close()
    assert main(["s.yaml"]) == 0
    assert "2 runs have their rows already" in capsys.readouterr().out
