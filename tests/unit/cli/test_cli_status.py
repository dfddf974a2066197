"""The lines of ``ftmon status``."""

from argparse import Namespace
from pathlib import Path

import pytest
from ftmon.protocol.run import rundir
from ftmon.protocol.run.rundir import ExitFile
from ftmon.tui.cli.watch import show_status


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTMON_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("code", "state", "ending"),
    [
        (-1, "stopped", "stopped, killed by SIGHUP"),
        (-9, "failed", "failed, killed by SIGKILL"),
        (1, "failed", "failed, exit code 1"),
    ],
)
def test_a_run_that_a_signal_ended_is_shown_with_the_signals_name(
    code: int, state: str, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = rundir.create("done", ["train.py"], "run")
    run.write_exit(ExitFile(code, 1.0, state))
    show_status(Namespace(run=run.id, json=False))
    assert capsys.readouterr().out.splitlines()[0] == f"{run.id}  {ending}"
