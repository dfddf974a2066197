"""What ``ftmon doctor`` says of terminals and directories."""

import json
import os
from pathlib import Path

from ftmon.tui.cli import output, set_up
from ftmon.tui.cli.main import main


def test_terminals_are_known_by_their_environment(capsys):
    assert output.why_no_app({"TERM": "xterm-256color"}) == "not a terminal"
    assert output.colours({"TERM": "xterm-256color"}) == "256"
    assert output.colours({"TERM": "xterm"}) == "16"
    assert output.colours({"TERM": "xterm", "COLORTERM": "truecolor"}) == "16 million"
    assert output.colours({"TERM": "xterm-256color", "NO_COLOR": "1"}) == "none (NO_COLOR is set)"
    assert output.multiplexer({"TMUX": "/tmp/tmux-0/default,1,0"}) == "tmux"
    assert output.multiplexer({"STY": "1.x"}) == "screen"
    assert output.multiplexer({}) == ""


def test_a_runs_directory_open_to_others_or_not_writable_is_flagged_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("FTMON_HOME", str(tmp_path))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(0o755)
    check = set_up.home_check()
    assert check.state == "warning"
    assert check.remedy == f"chmod 700 {tmp_path / 'runs'}"
    monkeypatch.setenv("FTMON_HOME", f"/proc/{os.getpid()}/ftmon")  # where even root cannot write
    assert not Path("/proc").is_dir() or set_up.home_check().state == "error"


def test_json_has_both_sides(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FTMON_HOME", str(tmp_path))
    monkeypatch.setattr("ftmon.tui.cli.set_up.find_spec", lambda name: None)
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {check["name"] for check in report["terminal"]} >= {"terminal", "characters", "run directory", "NVML"}
    assert report["training"][0]["remedy"] == 'pip install "ftmon[train]"'
