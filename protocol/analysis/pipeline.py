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

from ..messages.control import Alert, ExporterState, HubStats, RankState, Result
from ..messages.hosts import Job
from ..messages.memory import Cause, Composition, OomReport
from ..messages.telemetry import AllocatorEvents, DeviceSample, Failure, Heartbeat, Hello, LogLine, Oom, Plan, Step
from ..messages.wire import Frame, Message
from ..run.end import FATAL, standing
from . import kinds
from .deaths.detector import DeathDetector, is_lost_peer, is_nearer_cause
from .findings.alerts import Action, AlertStore, DiagnosticRequests
from .findings.finding import Finding, Handler
from .health.monitor import HealthDetector
from .hub_facts import NoStepFacts
from .kinds import FindingAlerts
from .memory.causes import KnownCauses
from .memory.leak import LeakDetector
from .memory.spike import GrowthDetector, SpikeDetector
from .oom.detector import OomDetector
from .oom_report import LatestByRank
from .stalls.hang_detector import HangDetector
from .stalls.slow_ranks import SlowDetector, WaitDetector
from .stalls.tracker import RankTracker

_AS_RECEIVED = (Hello, Plan, LogLine)  # messages of the recording that are processed like received ones
_Check = Callable[[float, Step], Sequence[Finding] | None]  # checks a step, given the time at which it was received


class Detectors:
    """All detectors, fed with one stream of messages.

    ``tracker`` must be fed and ticked first. ``keep`` stores the report of an out-of-memory error in a file; it returns
    the report with the file's path.
    """

    def __init__(
        self, tracker: RankTracker, store: AlertStore, keep: Callable[[OomReport], OomReport] | None = None
    ) -> None:
        self._keep = keep
        self._tracker = tracker
        self._store = store
        self._latest = LatestByRank()
        self._health = HealthDetector()
        self._independent = [make() for make in kinds.DETECTORS]
        self._findings = FindingAlerts(store)
        self._job = 0
        self._now = 0.0  # time of receipt of the current message
        self._begin()

    def _begin(self) -> None:
        """Create the detectors for the ranks of one job; the independent ones are kept."""
        self._asks = DiagnosticRequests()
        self._causes = KnownCauses()
        self._spike = SpikeDetector(self._causes, self._asks)
        self._growth = GrowthDetector()
        self._leak = LeakDetector(self._asks)
        self._slow = SlowDetector(self._asks)
        self._oom = OomDetector()
        self._death = DeathDetector(self._oom, self._ended_without_error)
        self._hang = HangDetector()
        self._waits = WaitDetector()
        self._register()

    def _register(self) -> None:
        """Set the methods that process each type of message, received or recorded, and restore each kind of finding."""
        spike, growth, leak, slow, oom, hang = self._spike, self._growth, self._leak, self._slow, self._oom, self._hang
        latest, asks = self._latest, self._asks
        self._handlers: dict[type, list[Handler]] = {
            Hello: [asks.hello, self._causes.hello, *(one.hello for one in (spike, growth, leak, latest, slow))],
            Plan: [leak.plan],
            LogLine: [self._death.log],
            Heartbeat: [latest.beat],
            DeviceSample: [latest.sample, slow.sample],
            AllocatorEvents: [spike.allocator],
            Cause: [spike.cause, leak.cause],
            Composition: [growth.composition],
            OomReport: [self._out_of_memory],
            Failure: [lambda failure: self._death.failure(self._now, failure, self._tracker.kill_asked)],
            HubStats: [lambda stats: self._health.stats(self._now, stats, bool(self._store.standing("disk")))],
            ExporterState: [self._health.exporter],
        }
        self._recorded: dict[type, list[Handler]] = {
            Step: [spike.observe, growth.observe],
            Cause: [spike.restore_cause],
            HubStats: [self._health.observe],
        }
        checks: list[_Check] = [spike.step, _untimed(growth.step), slow.step, _untimed(leak.step), _untimed(oom.step)]
        for detector in self._independent:
            for kind, handle in detector.handlers().items():
                if kind is Step:
                    checks.append(_untimed(handle))
                else:
                    self._handlers.setdefault(kind, []).append(handle)
                if kind in detector.replays and kind not in _AS_RECEIVED:
                    self._recorded.setdefault(kind, []).append(handle)
        self._checks = checks
        self._restorers: dict[str, Callable[[Finding], None]] = {
            **dict.fromkeys(("spike", "steady_transient"), spike.restore),
            **dict.fromkeys(("oom", "oom_failure"), oom.restore),
            **dict.fromkeys(("hang", "stopped", "unreachable"), hang.restore),
            "state_growth": growth.restore,
            "leak": leak.restore,
            "straggler": slow.restore,
        }

    def begin_job(self, now: float) -> list[Message]:
        """Reset the detectors for the next job of the run; return the resolved alerts of the previous job."""
        alerts = [*self._put(now, self._death.tick(now, over=True)), *self._store.begin_job(now)]
        self._begin()
        return alerts

    def feed(self, seq: int, t: float, message: Message) -> Sequence[Message]:
        """Process one message that the hub received at ``t`` (seconds since the epoch); return the alerts to send."""
        self._now = t
        if isinstance(message, Step):
            return self.steps([(t, message)], _reraise)
        sent: list[Message] = []
        if isinstance(message, Oom):
            message = self._report(t, message)
            sent.append(message)
        for handle in self._handlers.get(type(message), ()):
            found = handle(message)
            if found:
                sent += self._findings.put(t, found)
        return sent

    def steps(self, steps: Sequence[tuple[float, Step]], failed: Callable[[], object]) -> list[Message]:
        """Process a batch of steps; return the alerts to send.

        Each detector processes the whole batch before the next detector does, so that its code and state stay in the
        processor's cache: a batch takes half the CPU time of the same steps one at a time. ``failed`` is called in the
        ``except`` block of a detector's exception; processing continues with the next step.
        """
        past = self._store.resolve_past(steps[0][0])
        alerts: list[Message] = [*past]
        for _, step in steps:
            self._latest.step(step)
        for check in self._checks:
            for t, step in steps:
                try:
                    found = check(t, step)
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
        tracker, run = self._tracker, self._tracker.run_state
        changes = [change for change in tracker.drain_changes() if isinstance(change, RankState)]
        alerts = [alert for change in changes for alert in self._rank_state(now, change)]
        over = run is not None and run.is_over
        ending = over or (run is not None and run.state == "stopping")
        alerts += self._put(now, self._hang.tick(now, tracker.verdict, ending, tracker.found(), tracker.launcher))
        alerts += self._put(now, self._waits.tick(now, [] if ending else tracker.views, tracker.verdict is not None))
        alerts += self._put(now, self._death.tick(now, over, run is not None and run.state == "finished"))
        for detector in self._independent:
            alerts += self._put(now, detector.tick(now))
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
        ends = standing((alert for kind in FATAL for alert in self._store.standing(kind)), *FATAL)
        return any(
            not facts.error or is_lost_peer(facts.error)
            if end.kind == "died"
            else not is_nearer_cause(facts.error, str(end.evidence.get("error", "")))
            for end in ends
        )

    def job_ended_first(self, now: float, code: int | None, count: int, processes: list[str]) -> list[Message]:
        """Record that the job's command left processes; return the alerts to send.

        After the end of every rank's script they are helpers that outlive it, such as compilers of PyTorch 2.6.
        """
        ranks = self._tracker.ranks.values()
        world = max((each.hello.world_size for each in ranks if each.hello is not None), default=0)
        all_ended = code == 0 and sum(each.succeeded for each in ranks) >= world > 0
        if self._tracker.kill_asked or all_ended:
            return []
        return self._put(now, self._death.job_ended_first(now, code, count, processes))

    def stacks(self, now: float, action: Action, answers: Mapping[int, Result]) -> list[Message]:
        """Process requested stacks; return the alerts to send."""
        return self._put(now, self._slow.stacks(action.ranks, answers))

    def restore(self, frames: Iterable[Frame]) -> None:
        """Restore the run's history after a hub restart: alerts keep their ids, and nothing is sent twice."""
        for frame in frames:
            message = frame.message
            if isinstance(message, Alert):
                self._restore_alert(message)
            elif isinstance(message, Job):
                if message.shown and not message.is_over and message.number != self._job:
                    if self._job:
                        self.begin_job(frame.t)
                    self._job = message.number
            elif isinstance(message, RankState):
                if message.state in ("gone", "finished"):
                    self._slow.drop(message.rank)
                    for detector in self._independent:
                        detector.rank_ended(message.rank)
            elif isinstance(message, _AS_RECEIVED):
                self.feed(frame.seq, frame.t, message)
            else:
                for restore in self._recorded.get(type(message), ()):
                    restore(message)

    def _restore_alert(self, alert: Alert) -> None:
        finding = self._findings.restore(alert) if self._store.restore(alert) else None
        if finding is None:
            return
        if finding.kind in self._restorers:
            self._restorers[finding.kind](finding)
        if alert.kind in ("failure", "died", "oom"):
            self._death.restore(alert.time, finding)

    def _put(self, t: float, findings: Sequence[Finding]) -> list[Message]:
        return [*self._findings.put(t, findings)] if findings else []

    def _report(self, t: float, oom: Oom) -> OomReport:
        states = {rank: tracked.state for rank, tracked in self._tracker.ranks.items() if tracked.state is not None}
        report = self._latest.report(t, oom, states)
        return self._keep(report) if self._keep is not None else report

    def _out_of_memory(self, report: OomReport) -> list[Finding]:
        found = self._oom.oom(report)
        condition = self._oom.standing(report.rank)
        if condition is not None:
            self._death.trouble(self._now, condition)
        return found

    def _ended_without_error(self) -> dict[int, int]:
        ranks = self._tracker.ranks.items()
        return {rank: max(0, tracked.progress.step - 1) for rank, tracked in ranks if tracked.succeeded}

    def _rank_state(self, now: float, state: RankState) -> list[Message]:
        tracked = self._tracker.ranks.get(state.rank)
        fact = tracked.fact if tracked is not None else None
        alerts = self._put(now, self._hang.state(state, fact is not None and fact.is_traced))
        self._hang.held(state.rank, self._oom.standing(state.rank) if state.state == "held" else None)
        if state.state not in ("stopped", "unreachable"):  # a held rank may be stopped or become unreachable
            alerts += self._put(now, self._oom.held(state.rank, state.state == "held"))
        if state.state == "gone":
            gone = self._death.process_gone(
                now,
                state,
                self._tracker.kill_asked,
                kill=fact.kernel_kill if fact is not None else None,
                pressure=self._latest.pressure(now, state.rank),
                alone=tracked is not None and tracked.hello is not None and tracked.hello.world_size == 1,
                phase=tracked.progress.phase if tracked is not None else "",
            )
            alerts += self._put(now, gone)
        if state.state in ("gone", "finished"):
            alerts += self._put(now, [*self._slow.drop(state.rank), *self._leak.drop(state.rank)])
            for detector in self._independent:
                alerts += self._put(now, detector.rank_ended(state.rank))
        return alerts


def _untimed(handle: Handler) -> _Check:
    return lambda _, step: handle(step)


def _reraise() -> None:
    raise
