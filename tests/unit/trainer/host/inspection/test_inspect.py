"""StallProbe at ranks without their help, where the machine has no more threads to give."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ftmon.protocol.messages.telemetry import SelfDump
from ftmon.trainer.host import loop
from ftmon.trainer.host.inspection import inspect
from ftmon.trainer.host.inspection.inspect import DumpTarget, Inspection, Sample, is_held_by_native_code
from ftmon.trainer.hub.inspection import HostInspection

WAITS = (100, 110, 120)
"""Wakeups of a thread that waits for the GIL, at each sample."""
TIMES = (1.0, 1.03, 1.06)
ASLEEP = {7: ("S", 10)}


@pytest.mark.parametrize(
    ("wakeups", "first", "last", "held"),
    [
        (WAITS, ASLEEP, ASLEEP, True),
        (WAITS, {7: ("R", 10)}, {7: ("R", 20)}, True),
        (WAITS, {7: ("R", 10)}, {7: ("R", 11)}, False),
        (WAITS, {7: ("D", 10)}, ASLEEP, False),
        (WAITS, {7: ("S", 10), 8: ("S", 3)}, {7: ("S", 10), 8: ("R", 3)}, False),
        (WAITS, ASLEEP, {**ASLEEP, 9: ("R", 50)}, False),
        (WAITS, {**ASLEEP, 9: ("R", 50)}, ASLEEP, False),
        ((100, 110, 111), ASLEEP, ASLEEP, False),
        ((0, 0, 0), ASLEEP, ASLEEP, False),
    ],
)
def test_only_threads_that_sleep_or_have_computed_for_long_leave_the_gil_with_native_code(wakeups, first, last, held):
    samples = [Sample(at, at, *each) for at, *each in zip(TIMES, wakeups, (first, last, last), strict=True)]
    assert is_held_by_native_code(samples) is held


def test_samples_that_are_further_apart_than_half_a_poll_prove_nothing():
    samples = [Sample(at, at + 0.001, wakeups, ASLEEP) for at, wakeups in zip((1.0, 1.03, 1.06), WAITS, strict=True)]
    assert is_held_by_native_code(samples)
    # Before the middle one it may have slept for a tenth of a second, and had the GIL.
    samples[1] = samples[1]._replace(ended=1.05)
    assert not is_held_by_native_code(samples)


def test_a_handler_that_pauses_between_two_lines_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank-0.stacks"
    path.write_text("earlier stacks\n")
    writes = iter(["Thread 1\n", "", "", "", "  File a.py\n"])

    def sleep(_: float) -> None:
        with path.open("a") as file:
            file.write(next(writes, ""))

    monkeypatch.setattr(inspect, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0))
    monkeypatch.setattr(inspect, "may_signal", lambda _: True)
    monkeypatch.setattr(inspect, "_tgkill", lambda *_: True)
    pid = os.getpid()
    target = DumpTarget(3, pid, 1, SelfDump(10, pid, 5, str(path), "0x1", pid))
    assert inspect.by_signal([target]) == {3: "Thread 1\n  File a.py\n"}


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
