"""A run that is over before its hub has told of it: for how long its stream is waited for."""

import math
import signal
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ftmon.protocol.host.process import ProcessId, this_process
from ftmon.protocol.run.rundir import ExitFile, RunFile, RunOptions
from ftmon.protocol.run.start import CommandEnd
from ftmon.tui.cli import follow
from ftmon.tui.cli.follow import Standing


class LateSource:
    """A source whose hub tells the end of the run when it has been asked so often."""

    def __init__(self, asked: float) -> None:
        self.model = SimpleNamespace(ended=False)
        self.connection = SimpleNamespace(state="connecting", text="")
        self._left = asked

    def pump(self, _seconds: float) -> None:
        self._left -= 1
        self.model.ended = self._left <= 0


def ended(source: LateSource, launcher: ProcessId | None, monkeypatch: pytest.MonkeyPatch, late: float) -> bool:
    """Follow a run that has ended; tell whether the hub's word of it was waited for."""
    monkeypatch.setattr(follow, "DRAIN_SECONDS", 0.2)
    monkeypatch.setattr(follow, "_LATE_SECONDS", late)
    run: Any = SimpleNamespace(
        read_exit=lambda: ExitFile(1, 1.0, "failed", "exit code 1"),
        read_run=lambda: SimpleNamespace(launcher=launcher, created=0.0, kind="run"),
        path=Path("/"),
    )
    narrator: Any = SimpleNamespace(new_lines=lambda _model: [])
    given: Any = source
    lines = follow.Lines(forgiving=True)
    following = follow._Following(given, run, narrator, Standing(run), lines, deque(), owned=True)
    assert following.until_the_end() is not None
    return source.model.ended


def test_a_hub_that_comes_up_after_the_end_is_waited_for_while_the_launcher_lives_but_not_without_end(monkeypatch):
    assert ended(LateSource(8), this_process(), monkeypatch, late=200.0)
    assert not ended(LateSource(math.inf), this_process(), monkeypatch, late=0.5)
    assert not ended(LateSource(math.inf), None, monkeypatch, late=1000.0), "no launcher could wait for a hub"


@pytest.mark.parametrize("how", ["a signal", "the end of the launcher", "the time", "no target"])
def test_exporters_that_send_the_rest_are_waited_for_and_said(how, monkeypatch, tmp_path):
    monkeypatch.setattr(follow, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(follow, "EXPORTERS_END_SECONDS", 0.0 if how == "the time" else 3600.0)
    options = RunOptions(report_to=[] if how == "no target" else ["otel", "wandb"])
    content = RunFile("a", "a", 1.0, [], "/", "here", "run", options=options)
    end = CommandEnd()
    run: Any = SimpleNamespace(read_run=lambda: content, logs=tmp_path)
    (tmp_path / "wandb-exporter.log").write_text("the run is there: wandb/a\nno answer yet; 9 points were dropped\n")
    standing = Standing(run, end)
    signals: deque[signal.Signals] = deque()
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        signals.extend([signal.SIGINT] if how == "a signal" else [])
        if how == "the end of the launcher":
            end.other.close()

    follow.await_exporters(standing, say, signals)
    wait = [text for text in said if "otel, wandb" in text]
    assert len(wait) == (how in ("a signal", "the end of the launcher"))
    lost = [] if how in ("a signal", "no target") else ["wandb: no answer yet; 9 points were dropped"]
    assert said == wait + lost
