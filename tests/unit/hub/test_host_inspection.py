"""StallProbe at ranks without their help, where the machine has no more threads to give."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ftmon.trainer.host import loop
from ftmon.trainer.host.inspection.inspect import Inspection
from ftmon.trainer.hub.inspection import HostInspection


def test_a_look_that_cannot_begin_ends_with_nothing_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    posted: list[Any] = []
    tracker, rank_hosts = SimpleNamespace(ranks={}), SimpleNamespace(targets=list)
    access: Any = SimpleNamespace(tracker=tracker, rank_hosts=rank_hosts, post=posted.append)
    agents: Any = SimpleNamespace(reachable=list)
    inspection = HostInspection(access, agents)
    found: list[Inspection] = []
    monkeypatch.setattr(threading.Thread, "start", refused)

    async def look() -> None:
        found.append(await inspection.inspect({0}))

    loop.start(look())
    assert found == []
    (call,) = posted
    call()
    assert found == [Inspection({}, {}, {})]
