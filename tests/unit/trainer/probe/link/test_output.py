"""This host's files of a run, and the agent that looks after them."""

import tempfile
from pathlib import Path

import pytest
from ftmon.protocol.run.environment import PLACE_ENV
from ftmon.trainer.probe.link import output


def test_an_agent_that_cannot_be_started_is_logged_once_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # a short path: sockets are in the folder itself
        for name in ("logs", "agent.lock"):
            (Path(place) / name).mkdir()
        monkeypatch.setenv(PLACE_ENV, place)
        monkeypatch.setattr(output, "_failed", False)
        with pytest.raises(IsADirectoryError):
            output.start_agent()
        for _ in range(3):
            output.tend()
        (line,) = (Path(place) / "logs" / "probe.log").read_text().splitlines()
    assert "agent cannot be started: IsADirectoryError" in line
