"""Looking at ranks without their help, where the machine has no more threads to give."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ftmon.trainer.hub.reach import Reach, Seen


def test_a_look_that_cannot_begin_ends_with_nothing_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    posted: list[Any] = []
    tracker: Any = SimpleNamespace(ranks={})
    book: Any = SimpleNamespace(targets=list)
    agents: Any = SimpleNamespace(reachable=list)
    link: Any = None
    reach = Reach(tracker, book, link, agents, posted.append)
    found: list[Seen] = []
    monkeypatch.setattr(threading.Thread, "start", refused)
    reach.look({0}, found.append)
    assert found == []
    (call,) = posted
    call()
    assert found == [Seen({}, {}, {})]
