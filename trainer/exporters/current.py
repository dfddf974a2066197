"""The current figures of a run, from its messages: what a target without steps of its own shows."""

import threading
from collections import Counter
from typing import Any

from ...protocol.figures import FIGURES, Figure, Point, labels_of, points
from ...protocol.messages.control import Alert, RankState, RunState
from ...protocol.messages.hosts import Job
from ...protocol.messages.telemetry import Checkpoint, Evaluation, Hello, Plan, Step
from ...protocol.messages.wire import Frame, Message

_OF_A_JOB = (Step, Hello, RankState, Evaluation, Checkpoint, Plan)
_ENDED = ("gone", "finished")
_MOST_KEPT = 100_000  # Limit of kept messages: a script may give each evaluation another name

ALERTS = Figure("alerts", "Active alerts, 0 once all of them are resolved", lambda _: None)
DROPPED = Figure(
    "exporter_dropped_messages_total", "Messages of the hub that did not reach the exporter", lambda _: None,
    kind="total",
)  # fmt: skip


class RunFigures:
    """The current figures of a run. Any thread may ask for ``points``; one other thread applies messages.

    A figure of a message is the newest message's. Figures of a rank end with its process, and those of a job with the
    next job.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[tuple[type[Message], frozenset[tuple[str, str]]], Frame] = {}
        self._alerts: dict[int, Frame] = {}
        self._job, self._job_since = 1, 0  # Number of the newest job, and of the first known message of it
        self._ended: dict[int, int] = {}  # By rank whose process has ended: the number of the message that reports it
        self._events: Counter[tuple[Figure, frozenset[tuple[str, str]]]] = Counter()
        self.dropped = 0

    def apply(self, frame: Frame, live: bool) -> None:
        """Apply a message; not ``live``: it may be older than others that were applied."""
        message = frame.message
        with self._lock:
            if isinstance(message, Alert):
                _keep(self._alerts, message.id, frame)
            elif isinstance(message, Job):
                self._apply_job(message, frame.seq)
            elif type(message) in FIGURES and self._counts(frame):
                # A rank has one Hello, whatever its labels.
                labels = {"rank": str(message.rank)} if isinstance(message, Hello) else labels_of(message)
                _keep(self._newest, (type(message), frozenset(labels.items())), frame)
                if isinstance(message, RankState) and message.state in _ENDED:
                    self._ended[message.rank] = frame.seq
                    self._check_all()
                for figure, found, value in points(message, "events") if live else ():
                    self._events[figure, frozenset(found.items())] += int(value)

    def end(self) -> None:
        """Keep only the figures that are true after the run's end: its state, results and alerts."""
        with self._lock:
            for key in [key for key in self._newest if key[0] not in (RunState, Evaluation, Checkpoint, Plan)]:
                del self._newest[key]

    def points(self) -> list[Point]:
        """Return the current values."""
        with self._lock:
            messages = [frame.message for frame in self._newest.values()]
            alerts = [frame.message for frame in self._alerts.values()]
            events = dict(self._events)
            dropped = self.dropped
        found = [point for message in messages for point in points(message) if point.figure.kind != "events"]
        found += [Point(figure, dict(labels), count) for (figure, labels), count in events.items()]
        active: Counter[tuple[str, str, str, str]] = Counter()
        for alert in alerts:
            if isinstance(alert, Alert):
                rank = "" if alert.rank is None else str(alert.rank)
                key = (alert.kind, alert.severity, str(alert.evidence.get("finding", "")), rank)
                active[key] += alert.resolved is None
        names = ("kind", "severity", "finding", "rank")
        found += [Point(ALERTS, dict(zip(names, key, strict=True)), count) for key, count in active.items()]
        return [*found, Point(DROPPED, {}, dropped)]

    def _apply_job(self, job: Job, seq: int) -> None:
        if job.shown and not job.is_over and job.number >= self._job:
            newer = job.number > self._job
            self._job, self._job_since = job.number, seq if newer else min(self._job_since, seq)
            self._check_all()

    def _counts(self, frame: Frame) -> bool:
        """Return whether a message is of the newest job and, if it is one of a living rank only, of such a rank."""
        kind = type(frame.message)
        if kind in _OF_A_JOB and frame.seq < self._job_since:
            return False
        return not (isinstance(frame.message, Step | Hello) and frame.seq < self._ended.get(frame.message.rank, 0))

    def _check_all(self) -> None:
        for key in [key for key, frame in self._newest.items() if not self._counts(frame)]:
            del self._newest[key]


def _keep(known: dict[Any, Frame], key: object, frame: Frame) -> None:
    if known[key].seq <= frame.seq if key in known else len(known) < _MOST_KEPT:
        known[key] = frame
