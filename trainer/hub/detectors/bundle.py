"""All detectors behind one door. Pure: every time is passed in, nothing is read or written, no thread.

How the hub uses it, with the rank tracker that it reads::

    tracker = RankTracker()
    book = AlertBook()                            # the hub may raise alerts of its own in it
    detectors = Detectors(tracker, book)
    tracker.restore(frames)                       # after a hub restart: the recording's frames, oldest first
    detectors.restore(frames)
    for every message of the stream, the tracker first:
        send(tracker.feed(seq, t, message))
        send(detectors.feed(seq, t, message))
    for every process fact:  send(tracker.fact(fact))
    twice a second:          send(tracker.tick(now)); send(detectors.tick(now))
    when the job ended:      send(tracker.ended(now, state, exit_code, text)); send(detectors.tick(now))

The hub's own messages (states, alerts) may be fed too; they are passed over.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ....protocol.control import Alert, HubStats, RankState, RunState
from ....protocol.memory import Cause
from ....protocol.oom import OomReport
from ....protocol.telemetry import AllocatorEvents, DeviceSample, Failure, Heartbeat, Hello, LogLine, Oom, Plan, Step
from ....protocol.wire import Frame, Message
from ..states import RankTracker
from .asks import Action, Asks
from .book import AlertBook
from .death import DeathDetector
from .explained import Explained
from .growth import GrowthDetector
from .hang import HangDetector
from .health import HealthDetector
from .leak import LeakDetector
from .moments import Moments
from .oom import OomDetector
from .slow import SlowDetector
from .spike import SpikeDetector

_OVER = ("finished", "failed", "stopped")


class Detectors:
    """Everything that finds something worth an alert, fed with one stream.

    Args:
        tracker: The run's rank tracker; it must be fed and ticked first.
        book: The run's alerts.
        keep: Keeps the report of an out-of-memory error beside the stream, and says where.
    """

    def __init__(
        self, tracker: RankTracker, book: AlertBook, keep: Callable[[OomReport], OomReport] | None = None
    ) -> None:
        self._keep = keep
        self._tracker = tracker
        self._book = book
        self._asks = Asks()
        self._explained = Explained(book)
        self._spike = SpikeDetector(book, self._explained, self._asks)
        self._growth = GrowthDetector(book)
        self._leak = LeakDetector(book, self._asks)
        self._slow = SlowDetector(book)
        self._oom = OomDetector(book)
        self._moments = Moments()
        self._death = DeathDetector(book, self._oom)
        self._hang = HangDetector(book)
        self._health = HealthDetector(book)
        self._handlers: dict[type, Callable[[float, Any], Sequence[Message]]] = {
            Step: self._step,
            Hello: self._hello,
            LogLine: self._log,
            Oom: self._out_of_memory,
            Failure: self._failure,
            AllocatorEvents: self._spike.allocator,
            Cause: self._cause,
            Plan: self._plan,
            HubStats: self._health.stats,
            Heartbeat: self._beat,
            DeviceSample: self._sample,
        }

    def feed(self, seq: int, t: float, message: Message) -> list[Message]:
        """Look at one message that the hub received at ``t`` (seconds since the epoch); return the alerts to send."""
        handler = self._handlers.get(type(message))
        if handler is None:
            return []
        return list(handler(t, message))

    def take_actions(self) -> list[Action]:
        """Return what detectors have asked ranks to do since the last call."""
        return self._asks.take()

    def tick(self, now: float) -> list[Message]:
        """Look at states and at what time alone changes; return the alerts to send."""
        alerts: list[Message] = []
        for change in self._tracker.take_changes():
            alerts += self._rank_state(now, change) if isinstance(change, RankState) else self._run_state(now, change)
        run = self._tracker.run_state
        over = run is not None and run.state in _OVER
        ending = over or (run is not None and run.state == "stopping")
        alerts += self._hang.tick(now, self._tracker.verdict, ending, self._tracker.found(), self._tracker.launcher)
        alerts += self._death.tick(now)
        alerts += self._book.tick(now, everything=over)
        return alerts

    def restore(self, frames: Iterable[Frame]) -> None:
        """Take in the run's history after a hub restart: alerts go on under their ids, and nothing is sent twice."""
        for frame in frames:
            message = frame.message
            if isinstance(message, Alert):
                self._book.restore(message)
                for part in (self._spike, self._slow, self._oom, self._hang, self._leak):
                    part.restore(message)
                if message.kind in ("failure", "died", "oom"):
                    self._death.restore(message)
            elif isinstance(message, Step):
                self._spike.observe(message)
                self._growth.observe(message)
            elif isinstance(message, Hello):
                self._hello(frame.t, message)
            elif isinstance(message, Plan):
                self._leak.plan(message)
            elif isinstance(message, Cause):
                self._explained.restore(message)
            elif isinstance(message, RankState):
                if message.state in ("gone", "finished"):
                    self._slow.forget(message.rank)
            elif isinstance(message, HubStats):
                self._health.observe(message)
            elif isinstance(message, LogLine):
                self._death.log(message)

    def _step(self, t: float, step: Step) -> list[Alert]:
        self._moments.step(step)
        # Five looks at each of up to 20,000 steps a second: lists are joined only where one is not empty.
        alerts = self._spike.step(t, step)
        for found in (
            self._growth.step(t, step),
            self._slow.step(t, step),
            self._oom.step(t, step),
            self._leak.step(t, step),
        ):
            if found:
                alerts += found
        return alerts

    def _cause(self, t: float, cause: Cause) -> list[Alert]:
        return [*self._explained.cause(t, cause), *self._leak.cause(t, cause)]

    def _plan(self, t: float, plan: Plan) -> list[Alert]:
        self._leak.plan(plan)
        return []

    def _hello(self, t: float, hello: Hello) -> list[Alert]:
        self._asks.hello(hello)
        self._explained.hello(hello)
        self._spike.hello(hello)
        self._growth.hello(hello)
        self._leak.hello(hello)
        self._slow.hello(hello)
        self._moments.hello(hello)
        return []

    def _log(self, t: float, line: LogLine) -> list[Alert]:
        self._death.log(line)
        return [] if self._tracker.kill_asked else self._death.launcher_ended(t, line)

    def _beat(self, _t: float, beat: Heartbeat) -> list[Alert]:
        self._moments.beat(beat)
        return []

    def _sample(self, _t: float, sample: DeviceSample) -> list[Alert]:
        self._moments.sample(sample)
        self._slow.sample(sample)
        return []

    def _out_of_memory(self, t: float, oom: Oom) -> list[Message]:
        states = {rank: tracked.state for rank, tracked in self._tracker.ranks.items() if tracked.state is not None}
        report = self._moments.report(t, oom, states)
        if self._keep is not None:
            report = self._keep(report)
        messages: list[Message] = [report, *self._oom.oom(t, report)]
        key = self._oom.standing(oom.rank)
        if key is not None:
            self._death.trouble(t, key)
        return messages

    def _failure(self, t: float, failure: Failure) -> list[Alert]:
        return self._death.failure(t, failure, self._tracker.kill_asked)

    def _rank_state(self, now: float, state: RankState) -> list[Alert]:
        alerts = self._hang.state(now, state)
        self._hang.held(state.rank, self._oom.standing(state.rank) if state.state == "held" else None)
        alerts += self._oom.held(now, state.rank, state.state == "held")
        if state.state == "gone":
            tracked = self._tracker.ranks.get(state.rank)
            kill = tracked.fact.kernel_kill if tracked is not None and tracked.fact is not None else None
            pressure = self._moments.pressure(now, state.rank)
            alerts += self._death.gone(now, state, self._tracker.kill_asked, kill, pressure)
        if state.state in ("gone", "finished"):
            alerts += self._slow.drop(now, state.rank)
            alerts += self._leak.drop(now, state.rank)
        return alerts

    def _run_state(self, now: float, state: RunState) -> list[Alert]:
        if state.state not in _OVER:
            return []
        return self._health.ended(now, state, self._tracker.stepped, len(self._tracker.ranks))
