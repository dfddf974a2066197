"""A run made of messages: ranks, steps and heartbeats as probes send them, through the tracker and all detectors."""

from collections.abc import Callable
from typing import Any

from ftmon.protocol.analysis.findings.alerts import AlertStore
from ftmon.protocol.analysis.pipeline import Detectors
from ftmon.protocol.analysis.stalls.tracker import ProcessFact, RankTracker
from ftmon.protocol.messages.control import Alert, RankState, RunState
from ftmon.protocol.messages.telemetry import DeviceInfo, Heartbeat, Hello, PhaseRecord, Span, Step
from ftmon.protocol.messages.wire import Frame

MIB = 2**20
GIB = 2**30
H200 = 143_771 * MIB
START = 1_000_000.0


class Sim:
    """One simulated run. ``now`` is its clock; everything sent is kept."""

    def __init__(self, ranks: int = 1, *, cuda: bool = True, capacity: int = 0) -> None:
        self.count = ranks
        self.cuda = cuda
        self.capacity = capacity or (H200 if cuda else 24 * GIB)
        self.now = START
        self.seq = 0
        self.sent: list[Any] = []
        self.frames: list[Frame] = []
        self.store = AlertStore()
        self.tracker = RankTracker()
        self.detectors = Detectors(self.tracker, self.store)
        self.progress = dict.fromkeys(range(ranks), 0)

    # Feeding.

    def feed(self, *messages: Any) -> list[Any]:
        out: list[Any] = []
        for message in messages:
            self.seq += 1
            self.frames.append(Frame(self.seq, self.now, message))
            out += self._publish(self.tracker.feed(self.seq, self.now, message))
            out += self._publish(self.detectors.feed(self.seq, self.now, message))
        self.sent += out
        return out

    def fact(self, rank: int, **fields: Any) -> list[Any]:
        given = {"alive": True, "proc_state": "S", **fields}
        out = self._publish(self.tracker.fact(ProcessFact(rank, 100 + rank, 7, **given)))
        self.sent += out
        return out

    def tick(self, seconds: float = 0.5) -> list[Any]:
        self.now += seconds
        out = self._publish(self.tracker.tick(self.now)) + self._publish(self.detectors.tick(self.now))
        self.sent += out
        return out

    def wait(self, seconds: float, each: Callable[[], object] = lambda: None) -> list[Any]:
        """Let time pass in ticks of half a second; ``each`` runs before every tick."""
        out: list[Any] = []
        end = self.now + seconds
        while self.now < end:
            each()
            out += self.tick()
        return out

    def _publish(self, messages: list[Any]) -> list[Any]:
        for message in messages:
            self.seq += 1
            self.frames.append(Frame(self.seq, self.now, message))
        return messages

    # Messages.

    def hello(self, rank: int, **fields: Any) -> Hello:
        device = DeviceInfo("cuda" if self.cuda else "cpu", rank, "H200" if self.cuda else "host", self.capacity)
        measure = "cuda" if self.cuda else "glibc"
        given = {"backend": "nccl" if self.cuda else "gloo", "zero_stage": 2, **fields}
        pid = given.pop("pid", 100 + rank)
        return Hello(rank, rank, self.count, "host", pid, 7, device, measure, self.now, **given)

    def begin(self) -> None:
        for rank in range(self.count):
            self.feed(self.hello(rank))
            self.fact(rank)

    def phase(self, name: str, transient: int = 0, *, base: int = 6 * GIB, ms: float = 10.0, **fields: Any):
        span = Span(base, base, base + transient)
        given = {"device_us": int(ms * 1000) if self.cuda else None, **fields}
        if not self.cuda:
            given["resident"] = span
            span = Span(base, base, base)
        return PhaseRecord(name, 0, int(ms * 1000), span, span, **given)

    def step(self, rank: int, step: int, phases: list[PhaseRecord] | None = None, **fields: Any) -> Step:
        if phases is None:
            names = ("data", "forward", "backward", "optimizer")
            phases = [self.phase(name, collectives=3 if name == "backward" else 0) for name in names]
        host_us = sum(phase.host_us for phase in phases) + 500
        self.progress[rank] += 10
        return Step(rank, step, self.now - host_us * 1e-6, host_us, phases, **fields)

    def beat(self, rank: int, step: int, phase: str = "forward", *, moved: bool = False, **fields: Any) -> Heartbeat:
        if moved:
            self.progress[rank] += 1
        given = {"phase_started": START, "progress": self.progress[rank], **fields}
        return Heartbeat(rank, step, phase, time=self.now, **given)

    def train(self, first: int, last: int, make: Callable[[int, int], list[PhaseRecord] | None] | None = None) -> None:
        """Feed steps ``first`` to ``last`` of all ranks, half a second each."""
        for step in range(first, last + 1):
            for rank in range(self.count):
                phases = make(rank, step) if make is not None else None
                self.feed(self.step(rank, step, phases), self.beat(rank, step + 1, "data", moved=True))
            self.tick()

    # Asking.

    def alerts(self, kind: str) -> list[Alert]:
        """The alerts of a kind, each as it was sent last."""
        last = {alert.id: alert for alert in self.sent if isinstance(alert, Alert) and alert.kind == kind}
        return list(last.values())

    def sends(self, kind: str) -> int:
        return sum(isinstance(alert, Alert) and alert.kind == kind for alert in self.sent)

    def states(self, rank: int) -> list[str]:
        return [state.state for state in self.sent if isinstance(state, RankState) and state.rank == rank]

    def state(self, rank: int) -> RankState:
        return [state for state in self.sent if isinstance(state, RankState) and state.rank == rank][-1]

    def run_states(self) -> list[str]:
        return [state.state for state in self.sent if isinstance(state, RunState)]
