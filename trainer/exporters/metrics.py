"""``python -m ftmon.trainer.exporters.metrics RUNDIR``: a run's figures for Prometheus (``--metrics``).

They are served over HTTP, or written to a file for node_exporter's textfile collector. The process ends with the run.
"""

import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...protocol.errors import FtmonError, UsageError
from ...protocol.figures import FIGURES, PREFIX, Figure, Point, labels_of, points
from ...protocol.host.process import never_fail
from ...protocol.messages.control import Alert, RankState, RunState
from ...protocol.messages.hosts import Job
from ...protocol.messages.telemetry import Checkpoint, Evaluation, Hello, Plan, Step
from ...protocol.messages.wire import Frame, Message
from ...protocol.run.rundir import RunDir
from ..host.sockets import Listen, parse_metrics
from .stream import RunStream

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry, Metric

_WAIT_SECONDS = 0.5
FILE_SECONDS = 5.0
"""Time between two writes of the textfile."""
_OF_A_JOB = (Step, Hello, RankState, Evaluation, Checkpoint, Plan)
_ENDED = ("gone", "finished")
_MOST_KEPT = 100_000
"""Limit of kept messages: a script that gives each evaluation another name must not fill the memory."""
_SILENT_SECONDS = 30.0

_ALERTS = Figure("alerts", "Active alerts, 0 once all of them are resolved", lambda _: None)
_DROPPED = Figure(
    "exporter_dropped_messages_total", "Messages of the hub that did not reach the exporter", lambda _: None,
    kind="total",
)  # fmt: skip


class RunFigures:
    """The current figures of a run. Any thread may ``collect``; one other thread applies messages.

    A figure of a message is the newest message's. Figures of a rank end with its process, and those of a job with the
    next job.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._newest: dict[tuple[type[Message], frozenset[tuple[str, str]]], Frame] = {}
        self._alerts: dict[int, Frame] = {}
        self._job, self._job_since = 1, 0
        """Number of the newest job, and the number of the first message of it that is known."""
        self._ended: dict[int, int] = {}
        """By rank whose process has ended: the number of the message that reports it."""
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
                for figure, found, value in points(message) if live else ():
                    if figure.kind == "events":
                        self._events[figure, frozenset(found.items())] += int(value)

    def end(self) -> None:
        """Keep only the figures that are true after the run's end: its state, results and alerts."""
        with self._lock:
            for key in [key for key in self._newest if key[0] not in (RunState, Evaluation, Checkpoint, Plan)]:
                del self._newest[key]

    def collect(self) -> "Iterator[Metric]":
        """Yield the metrics: the interface of ``prometheus_client``'s collectors."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for figure, labels, value in self._points():
            names = sorted(labels)
            if figure.name not in families:
                kind = GaugeMetricFamily if figure.kind == "gauge" else CounterMetricFamily
                families[figure.name] = kind(
                    PREFIX + figure.name, f"{figure.help}.", labels=["run", *names], unit=figure.unit
                )
            families[figure.name].add_metric([self._run, *(labels[name] for name in names)], value)
        yield from families.values()

    def _points(self) -> list[Point]:
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
        found += [Point(_ALERTS, dict(zip(names, key, strict=True)), count) for key, count in active.items()]
        return [*found, Point(_DROPPED, {}, dropped)]

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


def _serve(listen: Listen, registry: "CollectorRegistry") -> "WSGIServer":
    from prometheus_client import start_http_server

    server, _ = start_http_server(listen.port, addr=listen.host, registry=registry)
    # Otherwise each connection that sends nothing keeps a thread, and each that breaks writes a traceback.
    handler: Any = server.RequestHandlerClass
    handler.timeout = _SILENT_SECONDS
    server.handle_error = lambda request, client_address: None
    return server


def _write(path: Path, registry: "CollectorRegistry") -> None:
    from prometheus_client import write_to_textfile

    try:
        write_to_textfile(str(path), registry)
    except OSError as error:  # a full disk: the next one may succeed
        print(f"{path}: cannot be written: {error.strerror}", file=sys.stderr)


def export(run: RunDir) -> int:
    """Export the figures of a run until it is over; return the exit status.

    Raises:
        UsageError: ``prometheus_client`` is not installed, or the port cannot be used.
        RunDirError: the run directory cannot be read.
    """
    file = run.read_run()
    target = parse_metrics(file.options.metrics)
    from prometheus_client import CollectorRegistry

    figures = RunFigures(run.id)
    registry = CollectorRegistry()
    registry.register(figures)
    stream = RunStream(run)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    server = None
    try:
        if isinstance(target, Listen):
            server = _serve(target, registry)
        path = Path(file.cwd, target) if isinstance(target, Path) else None
        next_write = 0.0
        while not stream.over and not stopped.is_set():
            for frame, live in stream.read(_WAIT_SECONDS):
                figures.apply(frame, live)
            figures.dropped = stream.dropped
            if path is not None and time.monotonic() >= next_write:
                next_write = time.monotonic() + FILE_SECONDS
                _write(path, registry)
        if path is not None:
            figures.end()
            _write(path, registry)
    except OSError as error:
        raise UsageError(f"--metrics {file.options.metrics}: {error.strerror or error}") from None
    finally:
        stream.close()
        if server is not None:
            server.shutdown()
    return 0


def main(argv: list[str]) -> int:
    """Export the run of the directory named in ``argv``; return the exit status."""
    if len(argv) != 1:
        print("usage: python -m ftmon.trainer.exporters.metrics RUNDIR", file=sys.stderr)
        return 2
    never_fail()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a ctrl-c meant for the job
    try:
        return export(RunDir(argv[0]))
    except FtmonError as error:
        print(error, file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
