"""What ``ftmon doctor`` says of terminals and directories."""

import json
import os
from pathlib import Path

import pytest
from ftmon.tui.cli import output, set_up
from ftmon.tui.cli.main import main


def test_terminals_are_known_by_their_environment(capsys):
    assert output.why_no_app({"TERM": "xterm-256color"}) == "not a terminal"
    assert output.colours({"TERM": "xterm-256color"}) == "256"
    assert output.colours({"TERM": "xterm"}) == "16"
    assert output.colours({"TERM": "xterm", "COLORTERM": "truecolor"}) == "16 million"
    assert output.colours({"TERM": "xterm-256color", "NO_COLOR": "1"}) == "none (NO_COLOR is set)"
    assert output.multiplexer({"TMUX": "/tmp/tmux-0/default,1,0"}) == "tmux"
    assert (output.multiplexer({"STY": "1.x"}), output.multiplexer({})) == ("screen", "")


def test_a_runs_directory_open_to_others_or_not_writable_is_flagged_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("FTMON_HOME", str(tmp_path))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(0o755)
    check = set_up.home_check()
    assert check.state == "warning"
    assert check.remedy == f"chmod 700 {tmp_path / 'runs'}"
    monkeypatch.setenv("FTMON_HOME", f"/proc/{os.getpid()}/ftmon")  # where even root cannot write
    assert not Path("/proc").is_dir() or set_up.home_check().state == "error"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    def install(name: str, version: str, requirements: tuple[str, ...] = ()) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
        (folder / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {one}" for one in requirements)]) + "\n")

    monkeypatch.syspath_prepend(tmp_path)
    return install


def test_extras_are_listed_with_what_is_missing_of_them(installed):
    png, old, partly = 'made-up-png<1,>=0.5; extra == "png"', "made-up-old>=2.10; extra == 'old'", "; extra == 'otel'"
    wanted = (
        png, old, f"made-up-png{partly}", f"made-up-otlp[http]>=1{partly}", "pytest; extra == 'test'", "msgspec>=1",
    )  # fmt: skip
    installed("ftmon", "9.0", wanted)
    installed("made-up-png", "0.5.2")
    installed("made-up-old", "2.9")
    assert {check.name: (check.state, check.text) for check in set_up.extra_checks()} == {
        "ftmon[png]": ("ok", "made-up-png 0.5.2"),
        "ftmon[old]": ("ok", "not installed (made-up-old>=2.10 missing): pip install 'ftmon[old]'"),
        "ftmon[otel]": ("ok", "not installed (made-up-otlp>=1 missing): pip install 'ftmon[otel]'"),
    }


def test_the_versions_of_somebodys_own_libraries_are_checked_without_the_training_side(installed, monkeypatch):
    monkeypatch.setattr(set_up, "missing_training_packages", lambda: ["datasets"])
    installed("torch", "1.13.1+cu117")
    installed("transformers", "99.0")
    found = {check.name: (check.state, check.text) for check in set_up.trainer_checks()}
    assert found["torch"][0] == found["transformers"][0] == "warning"
    assert found["torch"][1].startswith("1.13.1+cu117, older than the oldest tested version, ")
    assert found["transformers"][1].startswith("99.0, newer than the newest tested version, ")


def test_json_has_both_sides(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FTMON_HOME", str(tmp_path))
    monkeypatch.setattr("ftmon.tui.cli.set_up.find_spec", lambda name: None)
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {check["name"] for check in report["terminal"]} >= {"terminal", "characters", "run directory", "NVML"}
    assert report["training"][0]["remedy"] == 'pip install "ftmon[train]"'
