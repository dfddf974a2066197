"""A hub's probe of stalls with one rank, in a test's own process."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from ftmon.protocol.analysis.stalls.tracker import TrackedRank
from ftmon.protocol.messages.control import Result, Verb
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.host.inspection.inspect import Inspection
from ftmon.trainer.host.loop import Reply
from ftmon.trainer.hub.inspection import StallProbe
from ftmon.trainer.hub.ranks import Answers

STACKS = 'Thread 0x00007f0000000000 (most recent call first):\n  File "train.py", line 7 in main\n'


class Bench:
    """A rank that stands still, and what it answers at each look."""

    def __init__(self, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.rank = TrackedRank(0, time.time() - 5.0)
        self.tracker: Any = SimpleNamespace(ranks={0: self.rank}, suspected=True, verdict=None, launcher="")
        self.says: dict[str, Any] | None = {}  # its answer about its collectives; None: it does not answer
        self.inspected = Inspection({}, {}, {})
        seams = {"any_elsewhere": False, "foreign": None, "nccl": ""}
        self.parts: Any = SimpleNamespace(ask=self._ask, inspect=self._see, **seams)
        parts, self.emitted = self.parts, list[Any]()
        access: Any = SimpleNamespace(
            run=run,
            tracker=self.tracker,
            rank_hosts=parts,
            link=parts,
            emit=self.emitted.append,
            post=lambda call: call(),
        )
        self.stall_probe = StallProbe(access, parts)

    def _ask(self, _verb: Verb, _ranks: list[int], _seconds: float) -> Reply[Answers]:
        reply: Reply[Answers] = Reply()
        said = self.says
        reply.arrive({} if said is None else {0: Result("1", True, data={"text": STACKS, "calls": said})})
        return reply

    async def _see(self, _silent: set[int], _nccl_address: str) -> Inspection:
        return self.inspected

    def patch(self, name: str, value: object) -> None:
        self._monkeypatch.setattr(f"ftmon.trainer.hub.inspection.{name}", value)

    def look(self, says: dict[str, Any] | None) -> str:
        self.says = says
        self._monkeypatch.setattr(self.stall_probe, "_next", 0.0)
        self.stall_probe.tick()
        return self.rank.evidence.calls.source
