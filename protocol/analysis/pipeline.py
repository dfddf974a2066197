"""One interface to all detectors. Pure: times are passed in; no I/O, no threads.

How the hub uses it, with the rank tracker that it reads::

    tracker = RankTracker()
    store = AlertStore()
    detectors = Detectors(tracker, store)
    tracker.restore(frames)                       # after a hub restart: the recording's frames, oldest first
    detectors.restore(frames)
    for every message of the stream, the tracker first:
        send(tracker.feed(seq, t, message))
        send(detectors.feed(seq, t, message))     # or detectors.steps for several steps in a row
    for every process fact:  send(tracker.fact(fact))
    for what the hub finds:  send(detectors.put(now, finding))
    twice a second:          send(tracker.tick(now)); send(detectors.tick(now))
    when the job ended:      send(tracker.ended(now, state, exit_code, text)); send(detectors.tick(now))

The hub's own messages (states, alerts) may be fed too; they are ignored.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..messages.control import Alert, HubStats, RankState, Result
from ..messages.health import Compiles, DeviceHealth, DiskSpace, Xid
from ..messages.jobs import Job
from ..messages.memory import Cause, Composition
from ..messages.oom import OomReport
from ..messages.telemetry import (
    AllocatorEvents,
    Checkpoint,
    CheckpointFailed,
    DeviceSample,
    Failure,
    Heartbeat,
    Hello,
    LogLine,
    Oom,
    Plan,
    Step,
)
from ..messages.wire import Frame, Message
from ..run.failure import FATAL, standing
from .deaths.detector import DeathDetector, is_lost_peer, is_nearer_cause
from .finding_alerts import FindingAlerts
from .findings import Finding
from .findings.alert_store import AlertStore
from .findings.requests import Action, DiagnosticRequests
from .health.hub import HealthDetector
from .health.monitor import HealthMonitor
from .hub_facts import NoStepFacts
from .memory.growth import GrowthDetector
from .memory.known_causes import KnownCauses
from .memory.leak import LeakDetector
from .memory.spike import SpikeDetector
from .oom.detector import OomDetector
from .oom_report.rank_context import LatestByRank
from .stalls.hang_detector import HangDetector
from .stalls.rank_tracker import RankTracker
from .stalls.straggler_detector import SlowDetector


class Detectors:
    """All detectors, fed with one stream of messages.

    Args:
        tracker: The run's rank tracker; it must be fed and ticked first.
        store: The run's alerts.
        keep: Stores the report of an out-of-memory error in a file; returns the report with the file's path.
    """

    def __init__(
        self, tracker: RankTracker, store: AlertStore, keep: Callable[[OomReport], OomReport] | None = None
    ) -> None:
        self._keep = keep
        self._tracker = tracker
        self._store = store
        self._moments = LatestByRank()
        self._health = HealthDetector()
        self._monitor = HealthMonitor()
        """Resets itself if a rank is a new process; its checks of hosts continue."""
        self._findings = FindingAlerts(store)
        self._job = 0
        self._begin()

    def _begin(self) -> None:
        """Create the detectors for the ranks of one job; those for hosts and for the monitor are kept."""
        self._asks = DiagnosticRequests()
        self._causes = KnownCauses()
        self._spike = SpikeDetector(self._causes, self._asks)
        self._growth = GrowthDetector()
        self._leak = LeakDetector(self._asks)
        self._slow = SlowDetector(self._asks)
        self._oom = OomDetector()
        self._death = DeathDetector(self._oom, self._ended_without_error)
        self._hang = HangDetector()
        self._restorers: dict[str, Callable[[Finding], None]] = {
            "spike": self._spike.restore,
            "steady_transient": self._spike.restore,
            "state_growth": self._growth.restore,
            "leak": self._leak.restore,
            "straggler": self._slow.restore,
            "oom": self._oom.restore,
            "oom_failure": self._oom.restore,
            "hang": self._hang.restore,
            "stopped": self._hang.restore,
            "unreachable": self._hang.restore,
        }
        self._handlers: dict[type, Callable[[float, Any], Sequence[Message]]] = {
            Step: lambda t, step: self.steps([(t, step)], _reraise),
            Hello: self._hello,
            LogLine: self._log,
            Oom: self._out_of_memory,
            Failure: self._failure,
            AllocatorEvents: lambda t, found: self._put(t, self._spike.allocator(found)),
            Cause: self._cause,
            Plan: self._plan,
            HubStats: self._stats,
            Composition: lambda t, found: self._put(t, self._growth.composition(found)),
            Heartbeat: self._beat,
            DeviceSample: self._sample,
            Compiles: lambda t, found: self._put(t, self._monitor.compiles(found)),
            Checkpoint: lambda t, found: self._put(t, self._monitor.checkpoint(found)),
            CheckpointFailed: lambda t, found: self._put(t, self._monitor.checkpoint_failed(found)),
            DiskSpace: lambda t, found: self._put(t, self._monitor.disks(found)),
            DeviceHealth: lambda t, found: self._put(t, self._monitor.device(found)),
            Xid: lambda t, found: self._put(t, self._monitor.xid(found)),
        }

    def begin_job(self, now: float) -> list[Message]:
        """Reset the detectors for the next job of the run; return the resolved alerts of the previous job."""
        alerts = self._put(now, self._death.tick(now, over=True))
        alerts += self._store.begin_job(now)
        self._begin()
        return list(alerts)

    def feed(self, seq: int, t: float, message: Message) -> Sequence[Message]:
        """Process one message that the hub received at ``t`` (seconds since the epoch); return the alerts to send."""
        handler = self._handlers.get(type(message))
        return handler(t, message) if handler is not None else []

    def steps(self, steps: Sequence[tuple[float, Step]], failed: Callable[[], object]) -> list[Message]:
        """Process a batch of steps; return the alerts to send.

        Each detector processes the whole batch before the next detector does, so that its code and state stay in the
        processor's cache: a batch takes half the CPU time of the same steps one at a time.

        Args:
            steps: time of receipt and step, in the order of the stream.
            failed: called in the ``except`` block of an exception that a detector raised for one step; processing
                continues with the next step.
        """
        alerts: list[Message] = []
        if self._store.past:
            alerts += self._store.resolve_past(steps[0][0], "A later job of the run has made a step since.")
        for _, step in steps:
            self._moments.step(step)
        detect: tuple[Callable[[float, Step], list[Finding]], ...] = (
            self._spike.step,
            lambda _, step: self._growth.step(step),
            self._slow.step,
            lambda _, step: self._leak.step(step),
            lambda _, step: self._monitor.step(step),
            lambda _, step: self._oom.step(step),
        )
        for find in detect:
            for t, step in steps:
                try:
                    found = find(t, step)
                    if found:
                        alerts += self._findings.put(t, found)
                except Exception:
                    failed()
        return alerts

    def drain_actions(self) -> list[Action]:
        """Return the commands to ranks that detectors have requested since the last call."""
        return self._asks.drain()

    def tick(self, now: float) -> list[Message]:
        """Process changed states and elapsed time; return the alerts to send."""
        alerts: list[Message] = []
        for change in self._tracker.drain_changes():
            if isinstance(change, RankState):
                alerts += self._rank_state(now, change)
        run = self._tracker.run_state
        over = run is not None and run.is_over
        ending = over or (run is not None and run.state == "stopping")
        tracker = self._tracker
        stalls = self._hang.tick(now, tracker.verdict, ending, tracker.found(), tracker.launcher)
        alerts += self._put(now, stalls)
        alerts += self._put(now, self._death.tick(now, over, run is not None and run.state == "finished"))
        if not ending:
            self._slow.tick()
        alerts += self._findings.tick(now)
        alerts += self._store.tick(now, everything=over)
        return alerts

    def put(self, now: float, finding: Finding) -> list[Message]:
        """Process a finding of the hub itself (``hub_facts``); return the alerts to send.

        That a run ended without a step is no alert of its own if the alert of a failure or death gives the reason.
        """
        alerts: list[Message] = []
        if finding.kind == "no_step":
            alerts += self._put(now, self._death.tick(now, over=True, succeeded=finding.severity != "error"))
            if self._is_explained(finding.facts):
                return alerts
        return [*alerts, *self._put(now, [finding])]

    def _is_explained(self, facts: NoStepFacts) -> bool:
        """Return whether an active alert of a failure or death gives the reason for a run's end without a step."""
        for end in standing((alert for kind in FATAL for alert in self._store.standing(kind)), *FATAL):
            if end.kind == "died":
                explained = not facts.error or is_lost_peer(facts.error)
            else:
                explained = not is_nearer_cause(facts.error, str(end.evidence.get("error", "")))
            if explained:
                return True
        return False

    def job_ended_first(self, now: float, code: int | None, count: int, processes: list[str]) -> list[Message]:
        """Record that the job's command ended before its ranks; return the alerts to send."""
        return (
            []
            if self._tracker.kill_asked
            else list(self._put(now, self._death.job_ended_first(now, code, count, processes)))
        )

    def stacks(self, now: float, action: Action, answers: Mapping[int, Result]) -> list[Message]:
        """Process requested stacks; return the alerts to send."""
        return list(self._put(now, self._slow.stacks(action.ranks, answers)))

    def restore(self, frames: Iterable[Frame]) -> None:
        """Restore the run's history after a hub restart: alerts keep their ids, and nothing is sent twice."""
        for frame in frames:
            message = frame.message
            if isinstance(message, Alert):
                if not self._store.restore(message):
                    continue
                finding = self._findings.restore(message)
                if finding is not None and finding.kind in self._restorers:
                    self._restorers[finding.kind](finding)
                if finding is not None and message.kind in ("failure", "died", "oom"):
                    self._death.restore(message.time, finding)
            elif isinstance(message, Job):
                if message.shown and not message.is_over and message.number != self._job:
                    if self._job:
                        self.begin_job(frame.t)
                    self._job = message.number
            elif isinstance(message, Step):
                self._spike.observe(message)
                self._growth.observe(message)
                self._monitor.step(message)
            elif isinstance(message, Checkpoint):
                self._monitor.checkpoint(message)
            elif isinstance(message, CheckpointFailed):
                self._monitor.checkpoint_failed(message)
            elif isinstance(message, Hello):
                self._hello(frame.t, message)
            elif isinstance(message, Plan):
                self._leak.plan(message)
                self._monitor.plan(message)
            elif isinstance(message, Cause):
                self._spike.restore_cause(message)
            elif isinstance(message, RankState):
                if message.state in ("gone", "finished"):
                    self._slow.forget(message.rank)
                    self._monitor.drop(message.rank)
            elif isinstance(message, HubStats):
                self._health.observe(message)
            elif isinstance(message, LogLine):
                self._death.log(message)

    def _put(self, t: float, findings: Sequence[Finding]) -> list[Alert]:
        return self._findings.put(t, findings) if findings else []

    def _cause(self, t: float, cause: Cause) -> list[Alert]:
        return self._put(t, [*self._spike.cause(cause), *self._leak.cause(cause)])

    def _stats(self, t: float, stats: HubStats) -> list[Alert]:
        return self._put(t, self._health.stats(t, stats, bool(self._store.standing("disk"))))

    def _plan(self, t: float, plan: Plan) -> list[Alert]:
        self._leak.plan(plan)
        self._monitor.plan(plan)
        return []

    def _hello(self, t: float, hello: Hello) -> list[Alert]:
        self._asks.hello(hello)
        self._causes.hello(hello)
        self._spike.hello(hello)
        self._growth.hello(hello)
        self._leak.hello(hello)
        self._moments.hello(hello)
        return self._put(t, [*self._slow.hello(hello), *self._monitor.hello(hello)])

    def _log(self, _t: float, line: LogLine) -> list[Alert]:
        self._death.log(line)
        return []

    def _beat(self, _t: float, beat: Heartbeat) -> list[Alert]:
        self._moments.beat(beat)
        return []

    def _sample(self, t: float, sample: DeviceSample) -> list[Alert]:
        self._moments.sample(sample)
        self._slow.sample(sample)
        found = self._monitor.sample(sample)
        return self._findings.put(t, found) if found else []

    def _out_of_memory(self, t: float, oom: Oom) -> list[Message]:
        states = {rank: tracked.state for rank, tracked in self._tracker.ranks.items() if tracked.state is not None}
        report = self._moments.report(t, oom, states)
        if self._keep is not None:
            report = self._keep(report)
        messages: list[Message] = [report, *self._put(t, self._oom.oom(report))]
        matter = self._oom.standing(oom.rank)
        if matter is not None:
            self._death.trouble(t, matter)
        return messages

    def _ended_without_error(self) -> dict[int, int]:
        return {
            rank: max(0, tracked.progress.step - 1)
            for rank, tracked in self._tracker.ranks.items()
            if tracked.succeeded
        }

    def _failure(self, t: float, failure: Failure) -> list[Alert]:
        return self._put(t, self._death.failure(t, failure, self._tracker.kill_asked))

    def _rank_state(self, now: float, state: RankState) -> list[Alert]:
        tracked = self._tracker.ranks.get(state.rank)
        fact = tracked.fact if tracked is not None else None
        alerts = self._put(now, self._hang.state(state, fact is not None and fact.is_traced))
        self._hang.held(state.rank, self._oom.standing(state.rank) if state.state == "held" else None)
        if state.state not in ("stopped", "unreachable"):  # a held rank may be stopped or become unreachable
            alerts += self._put(now, self._oom.held(state.rank, state.state == "held"))
        if state.state == "gone":
            kill = fact.kernel_kill if fact is not None else None
            pressure = self._moments.pressure(now, state.rank)
            alone = tracked is not None and tracked.hello is not None and tracked.hello.world_size == 1
            phase = tracked.progress.phase if tracked is not None else ""
            asked = self._tracker.kill_asked
            alerts += self._put(now, self._death.process_gone(now, state, asked, kill, pressure, alone, phase))
        if state.state in ("gone", "finished"):
            alerts += self._put(now, [*self._slow.drop(state.rank), *self._leak.drop(state.rank)])
            alerts += self._findings.put(now, self._monitor.drop(state.rank))
        return alerts


def _reraise() -> None:
    raise
