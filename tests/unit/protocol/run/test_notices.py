"""Which messages of a run a person who is away is notified of, and how a terminal is told."""

from typing import Any

import pytest
from ftmon.protocol.errors import UsageError
from ftmon.protocol.messages.control import Alert, RunState
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.run.notices import (
    EVENTS,
    Notice,
    Notices,
    Notify,
    check_target,
    read_notify,
    shown,
    terminal_sequence,
    write_notify,
)
from ftmon.tui.cli.arguments import build_parser
from ftmon.tui.model.run import RunModel, TerminalNotices


def alert(number: int, kind: Any, **more: Any) -> Alert:
    return Alert(number, kind, more.pop("severity", "error"), more.pop("time", 100.0), f"{kind} {number}", **more)


def notices(*events: Any) -> Notices:
    return Notices("train-1", "node", list(events or EVENTS), 50.0)


def test_each_event_of_a_run_is_told_once_with_its_title_and_a_failure_with_what_failed():
    of = notices()
    told = [
        (alert(1, "hang", text="rank 1 is not in it"), ("hang", "hang 1", "rank 1 is not in it")),
        (alert(1, "hang", count=2), None),
        (alert(2, "oom"), ("oom", "oom 2", "")),
        (alert(3, "health", evidence={"finding": "nan_loss"}), ("nan", "health 3", "")),
        (alert(4, "health", evidence={"finding": "loss_plateau"}), None),
        (RunState("failed", 101.0, "exit code 3", 3), ("failure", "train-1 failed: oom 2", "exit code 3")),
        (RunState("failed", 102.0), None),
    ]
    for message, expected in told:
        found = of.of(message)
        assert (found and (found.event, found.title, found.text)) == expected
    of = notices()
    of.of(alert(1, "died", text="earlier job"))
    of.of(alert(1, "died", text="earlier job", resolved=101.0))
    of.of(alert(2, "failure", text="ValueError: no data", time=102.0))
    of.of(alert(3, "exit", time=103.0))
    end = of.of(RunState("failed", 104.0, "exit code 1", 1))
    assert end == Notice(
        "failure", "train-1", "node", 104.0, "train-1 failed: failure 2", "exit code 1; ValueError: no data"
    )


@pytest.mark.parametrize(
    "message",
    [alert(1, "spike"), alert(1, "hang", severity="info"), alert(1, "hang", resolved=101.0),
     alert(1, "hang", time=10.0), RunState("training", 100.0)],
    ids=["another kind", "information", "over already", "before this hub", "no end"],
)  # fmt: skip
def test_nothing_else_is_told(message: Any):
    assert notices().of(message) is None


def test_only_the_chosen_events_are_told_and_the_help_names_every_one(capsys):
    of = notices("finish")
    assert of.of(alert(1, "hang")) is None
    assert of.of(RunState("finished", 100.0)) is not None
    with pytest.raises(SystemExit):
        build_parser().parse_args(["run", "--help"])
    assert ",".join(EVENTS) in capsys.readouterr().out


def test_targets_are_kept_for_their_owner_alone_and_the_terminal_tells_what_is_new(run):
    assert read_notify(run) is None
    write_notify(run, Notify(["https://hooks.example/secret"], ["finish"]))
    assert read_notify(run) == Notify(["https://hooks.example/secret"], ["finish"])
    assert (run.path / "notify.json").stat().st_mode & 0o077 == 0
    assert "secret" not in (run.path / "run.json").read_text()
    write_notify(run, Notify(["terminal"], ["hang", "failure"]))
    watch, model = TerminalNotices(run), RunModel()
    model.apply(Frame(1, 1.0, alert(1, "hang", time=1.0)))
    assert list(watch.fresh(model)) == [], "it happened before"
    model.apply(Frame(2, 4e9, alert(2, "hang", time=4e9)))
    model.apply(Frame(3, 4e9, RunState("failed", 4e9)))
    assert [notice.event for notice in watch.fresh(model)] == ["hang", "failure"]
    assert list(watch.fresh(model)) == []


@pytest.mark.parametrize(
    "target",
    ["", "  ", "https://", "http:///path", "http://h/a b", "http://h:x/", "http://[::1/", "http://h/\u00e4",
     "http://h/\n", "https://alice:S3cretPw@h/hook", "https://alice@h/hook"],
)  # fmt: skip
def test_a_target_that_cannot_work_is_refused_before_the_run(target: str):
    with pytest.raises(UsageError) as refusal:
        check_target(target)
    assert "S3cretPw" not in str(refusal.value)


def test_what_may_be_secret_in_a_target_is_not_shown_and_a_terminals_sequence_holds_no_escape():
    assert shown("https://hooks.slack.com/services/T0/B0/SECRET?x=1") == "https://hooks.slack.com"
    assert shown("https://alice:S3cretPw@h/hook") == "https://h"
    assert shown("curl -H 'Authorization: Bearer SECRET' https://h") == "curl"
    assert shown("TOKEN=SECRET notify.sh") == "a command"
    assert shown("desktop") == "desktop"
    text = terminal_sequence(Notice("hang", "train-1", "node", 0.0, "rank 1\x1b]52;c;x\x07\n hangs"))
    assert text == "\x1b]9;train-1: rank 1� hangs\x1b\\\a"
