"""The queue in front of a target: it is bounded, what it drops is counted, and nothing that a target does delays it."""

import threading
from collections.abc import Callable, Sequence

import pytest
from eventually import eventually
from ftmon.protocol.errors import TargetError
from ftmon.protocol.figures import points
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.messages.telemetry import LogLine, Step
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.run.rundir import RunFile
from ftmon.trainer.exporters import report
from ftmon.trainer.exporters.report import Feed, Sent

RUN = RunFile("the-run", "the run", 1.0, ["python"], "/", "here", "run")


def step(number: int) -> Frame:
    return Frame(number, 1.0, Step(0, number, 1.0, 1000, []))


POINTS = len(list(points(step(1).message)))


class Kept:
    """A target that keeps what it got; ``called`` is called first, and may block or raise."""

    seconds = 0.01
    end_seconds = 60.0

    def __init__(self, called: Callable[[str], object] = lambda _: None) -> None:
        self.called = called
        self.steps: list[int] = []
        self.alerts: list[tuple[int, bool]] = []
        self.closed = False

    def open(self, run: RunFile) -> None:
        assert run is RUN
        self.called("open")

    def points(self, batch: Sequence[Sent]) -> None:
        self.called("points")
        self.steps += [sent.frame.message.step for sent in batch if isinstance(sent.frame.message, Step)]

    def alert(self, alert: Alert) -> None:
        self.called("alert")
        self.alerts.append((alert.id, alert.resolved is not None))

    def close(self) -> None:
        self.called("close")
        self.closed = True


def test_messages_with_figures_arrive_in_order_and_each_state_of_an_alert_once():
    target = Kept()
    feed = Feed(target, RUN)
    feed.start()
    raised = Alert(3, "slow", "warning", 1.0, "rank 1 is slow")
    resolved = Alert(3, "slow", "warning", 1.0, "rank 1 is slow", resolved=2.0)
    for number in range(1, 2001):
        feed.put(step(number), True)
    for alert in (raised, raised, resolved, raised):
        feed.put(Frame(2001, 1.0, alert), False)
    feed.put(Frame(2002, 1.0, LogLine(0, "err", "a line", 1.0)), True)
    assert feed.end(60.0)
    assert target.steps == list(range(1, 2001))
    assert target.alerts == [(3, False), (3, True)]
    assert target.closed
    assert (feed.dropped, feed.error) == (0, "")


@pytest.mark.parametrize("silent_in", ["open", "points", "close"])
def test_a_target_that_never_returns_is_reported_and_what_does_not_fit_is_dropped_and_counted(silent_in, monkeypatch):
    monkeypatch.setattr(report, "QUEUED", 100)
    monkeypatch.setattr(report, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(report, "OPEN_SECONDS", 0.0)
    reached, release = threading.Event(), threading.Event()

    def block(method: str) -> None:
        if method == silent_in:
            reached.set()
            release.wait()

    target = Kept(block)
    feed = Feed(target, RUN)
    feed.start()
    if silent_in != "close":
        reached.wait()
        for number in range(1000):
            feed.put(step(number), True)
        eventually(lambda: feed.error == "no answer yet", "the report")
        assert feed.dropped == 900 * POINTS
    assert not feed.end(0.2), "the deadline holds whatever the target does"
    assert feed.dropped == (0 if silent_in == "close" else 1000 * POINTS)
    assert target.steps == []
    release.set()


def test_a_target_that_raises_loses_what_it_was_given_and_gets_the_rest_once_it_works():
    failing = [TargetError("http://there: HTTP status 503"), ValueError("key=SECRET")]
    said: list[str] = []
    gate = threading.Semaphore(0)

    def fail(method: str) -> None:
        if method == "points":
            said.append(feed.error)
            gate.acquire()
            if failing:
                raise failing.pop(0)

    target = Kept(fail)
    feed = Feed(target, RUN)
    feed.start()
    for number in (1, 2, 3):
        eventually(lambda number=number: len(said) == number, "a call")
        feed.put(step(number), True)
        gate.release()
    eventually(lambda: len(said) == 4, "a call that works")
    gate.release(100)
    assert feed.end(60.0)
    assert said[:4] == ["", "http://there: HTTP status 503", "its client raised ValueError", ""]
    assert target.steps == [2, 3], "the first call had nothing, the second one step 1"
    assert (feed.dropped, feed.error) == (POINTS, "")


def test_a_target_that_cannot_be_opened_is_tried_again(monkeypatch):
    monkeypatch.setattr(report, "_FIRST_RETRY_SECONDS", 0.01)
    tries = iter((True, True, False))

    def fail(method: str) -> None:
        if method == "open" and next(tries):
            raise OSError

    target = Kept(fail)
    feed = Feed(target, RUN)
    feed.put(step(1), True)
    feed.start()
    eventually(lambda: target.steps == [1], "the step")
    assert feed.end(60.0)
    assert feed.error == ""


def test_a_target_of_long_intervals_is_called_early_if_messages_wait_and_at_the_end(monkeypatch):
    monkeypatch.setattr(report, "QUEUED", 100)
    target = Kept()
    target.seconds = 3600.0
    feed = Feed(target, RUN)
    feed.start()
    for number in range(1, 1001):
        feed.put(step(number), True)
        if number % 60 == 0:
            eventually(lambda: len(feed._waiting) <= 50, "a queue that is not half full")
    feed.put(step(1001), True)
    assert feed.end(60.0)
    assert target.steps == list(range(1, 1002))
    assert feed.dropped == 0


def test_a_target_that_accepts_nothing_gets_no_more_than_some_seconds_at_the_end(monkeypatch):
    monkeypatch.setattr(report, "SILENT_SECONDS", 0.0)
    blocked, release, calls = threading.Event(), threading.Event(), iter(range(100))

    def fail(method: str) -> None:
        if method == "points" and next(calls) == 0:
            raise TargetError("http://there: HTTP status 503")
        if method == "points":
            blocked.set()
            release.wait()

    feed = Feed(Kept(fail), RUN)
    feed.start()
    blocked.wait()
    assert feed.error.startswith("http://there")
    assert not feed.end(3600.0)
    release.set()
