"""How a rank says that it has ended."""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial

import pytest
from ftmon.protocol.messages.telemetry import Goodbye, StopAsked
from ftmon.protocol.run.rundir import RunOptions
from ftmon.trainer.probe.link.publisher import Publisher
from ftmon.trainer.probe.loop.training import Training
from ftmon.trainer.probe.memory.snapshots import PhaseMarks
from ftmon.trainer.probe.oom.console import Hold
from ftmon.trainer.probe.oom.report import OomHistory
from ftmon.trainer.probe.phases.tracker import Pace, StopRequest
from ftmon.trainer.probe.start.ending import _Ending, _report_sigterm

Told = Callable[[], tuple[str, str]]


@pytest.fixture
def leaves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Statuses that ``os._exit`` was given, which does not end this process."""
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    return statuses


@pytest.fixture
def told(training: Training, leaves: list[int], monkeypatch: pytest.MonkeyPatch) -> Told:
    """End the rank, whose exceptions and exits are hooked; return the reason and the text that it gives."""
    for owner, name in ((sys, "exit"), (sys, "excepthook")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.delattr(sys, "last_value", raising=False)
    monkeypatch.delattr(sys, "ps1", raising=False)
    stop, outbox = StopRequest(), training.outbox
    publisher = Publisher(training, Pace(), stop, Hold(RunOptions()), OomHistory(), PhaseMarks())
    ending = _Ending(training, stop, publisher)
    ending.hook_exceptions()
    monkeypatch.setattr(publisher, "finish", lambda: None)  # its thread does not run

    def end() -> tuple[str, str]:
        ending.finish()
        (goodbye,) = [item for item in outbox.items if isinstance(item, Goodbye)]
        return goodbye.reason, goodbye.text

    return end


def caught_exit(status: int) -> None:
    with pytest.raises(SystemExit):
        sys.exit(status)


@pytest.mark.parametrize(("statuses", "end"), [((2, None), ("finished", "")), ((0, 2), ("failed", "sys.exit(2)"))])
def test_an_exit_that_the_script_has_caught_counts_unless_a_step_follows(training, told, statuses, end):
    for status in statuses:
        training.tracker.end_step()
        if status is not None:
            caught_exit(status)
    assert told() == end


@pytest.mark.parametrize(
    ("ways", "end"),
    [
        ("sys.exit", ("failed", "KeyError: 'labels'")),
        ("os._exit", ("failed", "KeyError: 'labels'")),
        ("sys.exit, then sys.exit(0)", ("finished", "")),
        ("os._exit(3) alone", ("failed", "os._exit(3)")),
    ],
)
def test_an_exit_for_an_exception_is_told_as_the_exception(told, leaves, ways, end):
    try:
        if "alone" not in ways:
            raise KeyError("labels")
        os._exit(3)
    except KeyError:
        if ways == "os._exit":
            os._exit(4)
        else:
            caught_exit(4)
    if "then" in ways:
        caught_exit(0)
    assert told() == end
    assert leaves == {"os._exit": [4], "os._exit(3) alone": [3]}.get(ways, [])


@pytest.mark.parametrize("interactive", [True, False])
def test_an_error_ends_a_script_and_no_notebook(told, monkeypatch, interactive):
    if interactive:
        monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    error = NameError("a cell before")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    sys.excepthook(type(error), error, None)
    assert told()[0] == ("finished" if interactive else "failed")


def test_a_sigterm_that_the_script_handles_is_reported_once_and_its_handlers_stay_its_own(training, monkeypatch):
    calls: list[str] = []

    def before(*_: object) -> None:
        calls.append("before")

    def later(*_: object) -> None:
        calls.append("later")

    monkeypatch.setattr(signal, "signal", signal.signal)
    monkeypatch.setattr(signal, "getsignal", signal.getsignal)
    restored = signal.signal(signal.SIGTERM, before)
    try:
        _report_sigterm(training.asked_to_stop)
        training.tracker.enter("eval")
        signal.raise_signal(signal.SIGTERM)
        assert signal.signal(signal.SIGTERM, later) is before
        assert signal.getsignal(signal.SIGTERM) is later
        signal.raise_signal(signal.SIGTERM)
        assert signal.signal(signal.SIGTERM, signal.SIG_IGN) is later
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, restored)
    assert calls == ["before", "later"]
    (asked,) = [item for item in training.outbox.items if isinstance(item, StopAsked)]
    assert (asked.phase, asked.by, asked.grace_s) == ("eval", "SIGTERM", training.rank.options.stop_grace)


def test_a_request_by_ftmon_stop_is_reported_without_a_grace(training):
    stop = StopRequest()
    stop.asked = partial(training.asked_to_stop, "ftmon stop")
    stop.ask(7)
    assert stop.is_due(7)
    (asked,) = [item for item in training.outbox.items if isinstance(item, StopAsked)]
    assert (asked.by, asked.grace_s, asked.phase) == ("ftmon stop", 0.0, "init")
