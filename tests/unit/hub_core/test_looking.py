"""What is kept of a rank's answers from one look to the next."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from ftmon.protocol.control import Result
from ftmon.protocol.rundir import RunDir
from ftmon.trainer.hub.detectors.tracked import TrackedRank
from ftmon.trainer.hub.looking import Looking
from ftmon.trainer.hub.reach import Seen

STACKS = 'Thread 0x00007f0000000000 (most recent call first):\n  File "train.py", line 7 in main\n'
RECORDED = {"source": "recorder", "recent": [["0", 9, "all_reduce", 64, False]], "counted": {"0": 9}, "ranks": {}}
COUNTED = {"source": "calls", "recent": [["0", 9, "all_reduce", 64, None]], "counted": {"0": 9}, "ranks": {}}


class Bench:
    """A rank that stands still, and what it answers at each look."""

    def __init__(self, run: RunDir) -> None:
        self.rank = TrackedRank(0, time.time() - 5.0)
        self.tracker: Any = SimpleNamespace(ranks={0: self.rank}, suspected=True, verdict=None, launcher="")
        self.says: dict[str, Any] = {}
        parts: Any = SimpleNamespace(any_elsewhere=False, ask=self._ask, look=lambda _, found: found(Seen({}, {}, {})))
        self.looking = Looking(run, self.tracker, parts, parts, parts, lambda _: None, lambda call: call())

    def _ask(self, _verb: str, _ranks: list[int], _seconds: float, done: Any, _args: Any) -> None:
        done({0: Result("1", True, data={"text": STACKS, "calls": self.says})})

    def look(self, says: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str:
        self.says = says
        monkeypatch.setattr(self.looking, "_next", 0.0)
        self.looking.tick()
        assert self.rank.evidence is not None
        return self.rank.evidence.calls.source


def test_what_the_flight_recorder_said_stays_while_the_rank_stands_and_says_less(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(run)
    assert bench.look(RECORDED, monkeypatch) == "recorder"
    assert bench.look(COUNTED, monkeypatch) == "recorder"
    assert bench.look({}, monkeypatch) == "recorder"


def test_what_it_said_before_its_last_progress_does_not_stay(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(run)
    assert bench.look(RECORDED, monkeypatch) == "recorder"
    bench.rank.progress.moved(time.time() + 1.0)
    assert bench.look(COUNTED, monkeypatch) == "calls"
