"""The hub's loop serves its sources in order, survives a failing handler, and gives up on one that fails for ever."""

import contextlib
import itertools
import os
import time
from types import SimpleNamespace

import pytest
from ftmon.trainer.host import loop
from ftmon.trainer.host.loop import TICK_SECONDS
from ftmon.trainer.hub.sockets import PollLoop


class Sources:
    """Two pipes that are always readable, and a loop that ends after a number of ticks."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.ticks = 2
        self._pipes = [os.pipe(), os.pipe()]
        for _, end in self._pipes:
            os.write(end, b"x")
        self.loop = PollLoop(self._tick, lambda: self.seen.append("wait"), lambda: self.seen.append("read"))

    def add(self, first, second) -> None:
        for (end, _), handler in zip(self._pipes, (first, second), strict=True):
            self.loop.add(end, handler)

    def _tick(self, _now: float) -> None:
        self.seen.append("tick")
        if self.seen.count("tick") == self.ticks:
            self.loop.stop()

    def close(self) -> None:
        for pipe in self._pipes:
            for end in pipe:
                os.close(end)


@pytest.fixture
def sources():
    made = Sources()
    yield made
    made.close()


def test_the_first_source_is_served_before_the_second_in_each_round(sources):
    sources.add(lambda: sources.seen.append("control"), lambda: sources.seen.append("data"))
    sources.loop.run()
    seen = [one for one in sources.seen if one != "tick"]
    rounds = len(seen) // 4
    assert rounds >= 2
    assert seen == ["wait", "control", "data", "read"] * rounds


def test_one_failure_costs_its_round_and_no_more(sources, capsys):
    def fails_once() -> None:
        if "failed" not in sources.seen:
            sources.seen.append("failed")
            raise ValueError("a bad message")

    sources.add(fails_once, lambda: sources.seen.append("data"))
    sources.loop.run()
    assert sources.seen[:3] == ["wait", "failed", "wait"]
    assert "data" in sources.seen
    assert capsys.readouterr().err.count("ValueError: a bad message") == 1


def test_what_fails_without_end_ends_the_loop(sources, capsys):
    sources.ticks = 1_000_000
    sources.add(lambda: 1 / 0, lambda: None)
    with pytest.raises(ZeroDivisionError):
        sources.loop.run()
    assert capsys.readouterr().err.count("ZeroDivisionError") == 101


@pytest.mark.parametrize(("every_seconds", "ends"), [(TICK_SECONDS, True), (1.0, False)])
def test_a_tick_that_always_fails_ends_the_loop_and_a_rare_failure_never_does(every_seconds, ends, monkeypatch):
    clock = itertools.count(1000.0, every_seconds / 2)  # read twice a turn
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with pytest.raises(ZeroDivisionError) if ends else contextlib.nullcontext():
        loop.serve(lambda _: 1 // 0, lambda _: None, lambda: next(clock) > 1500.0)


def test_what_arrived_while_the_loop_was_held_up_is_read_before_the_tick(sources):
    def held_up_once() -> None:
        sources.seen.append("data")
        if sources.seen.count("data") == 2:
            time.sleep(TICK_SECONDS + 0.1)

    sources.add(held_up_once, lambda: None)
    sources.loop.run()
    seen = [one for one in sources.seen if one in ("data", "tick")]
    assert seen[:5] == ["data", "tick", "data", "data", "tick"]
