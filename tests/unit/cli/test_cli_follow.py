"""A run that is over before its hub has told of it: for how long its stream is waited for."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from ftmon.protocol.process import ProcessId, this_process
from ftmon.protocol.rundir import ExitFile
from ftmon.tui.cli import follow


class LateSource:
    """A source whose hub tells the end of the run some time after it."""

    def __init__(self, seconds: float) -> None:
        self.model = SimpleNamespace(ended=False)
        self.connection = SimpleNamespace(state="connecting", text="")
        self._at = time.monotonic() + seconds

    def pump(self, _seconds: float) -> None:
        self.model.ended = time.monotonic() >= self._at


def ended(source: LateSource, launcher: ProcessId | None, monkeypatch: pytest.MonkeyPatch, late: float = 1.0) -> bool:
    """Follow a run that has ended; tell whether the hub's word of it was waited for."""
    monkeypatch.setattr(follow, "_DRAIN_SECONDS", 0.2)
    monkeypatch.setattr(follow, "_LATE_SECONDS", late)
    run: Any = SimpleNamespace(
        read_exit=lambda: ExitFile(1, 1.0, "failed", "exit code 1"),
        read_run=lambda: SimpleNamespace(launcher=launcher),
    )
    narrator: Any = SimpleNamespace(tell=lambda _model: [])
    given: Any = source
    with follow.counted_interrupts() as interrupts:
        end = follow._until_the_end(given, run, narrator, interrupts, owned=True)
    assert end is not None
    return source.model.ended


def test_a_hub_that_comes_up_after_the_end_is_waited_for_while_the_launcher_lives(monkeypatch: pytest.MonkeyPatch):
    assert ended(LateSource(0.7), this_process(), monkeypatch)


def test_a_hub_that_never_tells_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch):
    began = time.monotonic()
    assert not ended(LateSource(600), this_process(), monkeypatch)
    assert not ended(LateSource(600), None, monkeypatch, late=300.0), "nobody is left whom the launcher could wait for"
    assert time.monotonic() - began < 100
