"""How a sweep waits for a run."""

import os
import socket
import threading
from pathlib import Path

import msgspec
import pytest
from ftmon.protocol.run.rundir import ExitFile, RunDir
from ftmon.protocol.run.start import CommandEnd, LauncherMessage
from ftmon.trainer.sweep import run
from ftmon.trainer.sweep.run import Running


@pytest.mark.parametrize(("deadline", "why"), [(0.0, ""), (float("inf"), "hang")], ids=["deadline", "asked for"])
def test_a_run_that_ends_by_itself_while_it_is_waited_for_was_not_ended(
    deadline: float, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_POLL_SECONDS", 200.0)  # the wait ends with the run, however late that is
    line = CommandEnd()
    launcher = socket.socket(fileno=os.dup(line.launchers_end))
    line.handed_over()
    running = Running.__new__(Running)  # of a launcher that is this process
    running.run, running._line = RunDir(tmp_path), line
    end = ExitFile(0, 1.0, "finished")

    def launch() -> None:
        with launcher:
            launcher.send(msgspec.json.encode(LauncherMessage(end=end)) + b"\n")

    timer = threading.Timer(0.1, launch)
    timer.start()
    ending = running.wait(deadline, lambda: why)
    timer.join()
    assert (ending.ended_for, ending.exit) == ("", end)
