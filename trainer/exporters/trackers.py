"""What W&B, trackio, TensorBoard and MLflow have in common: rows of values by step, made from a run's messages.

``Tracker`` is the target of ``--report-to`` for each of them: it passes rows and alerts on to a client
(``tracker_clients``).
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from ...protocol.figures import ELAPSED, TIME, Figure, points, tracker_name
from ...protocol.messages.control import Alert, RankState, RunState
from ...protocol.messages.hosts import Job
from ...protocol.messages.telemetry import DeviceSample, Evaluation, Hello, Step
from ...protocol.messages.wire import Frame
from ...protocol.recording.curves import mean_loss
from ...protocol.recording.reader import Reader
from ...protocol.run.rundir import RunFile
from ...protocol.text import counted, sanitize
from .report import Sent

_LATE_SECONDS = 10.0  # After this time a step's row is made without the ranks that have not reported the step
_DEVICES_SECONDS = 10.0  # Time between two rows of the devices
_GIB = 2**30
_TITLE = 63
_TEXT = 2_000
_MESSAGES = 1_000
Value = float | int | str


class Row(NamedTuple):
    """Values of one step, or of the time after it."""

    step: int
    time: float  # When the last of them was recorded, seconds since the epoch
    values: dict[str, float]  # By their names in trackers; times of the row included


class Note(NamedTuple):
    """An alert as text for a tracker."""

    step: int
    time: float
    severity: str
    title: str  # At most 63 characters
    text: str
    number: int


class About(NamedTuple):
    """The run that a tracker receives."""

    run: str
    started: float
    replayed: bool  # It is not live: a run of its own in the tracker, even if there is one of this name


class Client(Protocol):
    """The API of one tracker. Every method may block, and may raise anything."""

    where: str  # Address or path of the run in the tracker, for words
    float32: bool  # Values lose digits beyond the seventh: bytes are given in GiB, and no times since the epoch

    def open(self, about: About) -> None:
        """Create the run, or continue it if it is live and exists."""
        ...

    def configure(self, facts: Mapping[str, Value]) -> None:
        """Set facts about the run; called before the first row, and again when they change."""
        ...

    def log(self, rows: Sequence[Row]) -> None:
        """Write rows, some of which may have a smaller step than the row before."""
        ...

    def alert(self, note: Note) -> None:
        """Write an alert."""
        ...

    def close(self, state: str, ended: float) -> None:
        """Write what is left and end the run, which ended in a ``RunState``; empty: unknown."""
        ...


def _highest(values: Sequence[tuple[float, int]]) -> float:
    numbers = [value for value, _ in values]
    return math.nan if any(math.isnan(value) for value in numbers) else max(numbers)


_JOIN: Mapping[str, Callable[[Sequence[tuple[float, int]]], float]] = {
    "max": _highest,
    "min": lambda values: min(value for value, _ in values),
    "sum": lambda values: sum(value for value, _ in values),
    "mean": lambda values: mean_loss(values) or 0.0,
}
"""How the ranks' values, with their label tokens, become one."""


class _Pending:
    def __init__(self, since: float) -> None:
        self.since = since
        self.time = since
        self.ranks: dict[int, Step] = {}


class Rows:
    """Makes rows of a run's messages, in their order. One row has a step of all ranks, another an evaluation."""

    def __init__(self, host: str, started: float, float32: bool) -> None:
        self._host = host
        self._started = started
        self._float32 = float32
        self._world = 1
        self._ended: set[int] = set()
        self._job = 0
        self._pending: dict[int, _Pending] = {}
        self._devices: dict[tuple[str, str, int], DeviceSample] = {}
        self._devices_due = 0.0
        self.step = 0  # The last step of a row

    def apply(self, frame: Frame) -> list[Row]:
        """Apply a message; return the rows that it completes, usually none."""
        message, t = frame.message, frame.t
        rows: list[Row] = []
        if isinstance(message, Step):
            rows += self._apply_step(message, t)
        elif isinstance(message, Evaluation):
            rows.append(self._row(message.step, t, self._values([message])))
        elif isinstance(message, DeviceSample):
            self._devices[message.host, message.kind, message.index] = message
        elif isinstance(message, Hello):
            self._world = max(1, message.world_size)
            self._ended.discard(message.rank)
        elif isinstance(message, RankState) and message.state in ("gone", "finished"):
            self._ended.add(message.rank)
        elif isinstance(message, Job) and message.shown and message.number > self._job:
            rows += self.end_steps()
            self._job = message.number
            self._ended.clear()
        if t >= self._devices_due and self._devices:
            self._devices_due = t + _DEVICES_SECONDS
            rows += self._end_devices(t)
        late = [step for step, pending in self._pending.items() if t - pending.since > _LATE_SECONDS]
        return rows + (self.end_steps(max(late)) if late else [])

    def end(self, t: float) -> list[Row]:
        """Return the rows of all that is left."""
        return [*self.end_steps(), *self._end_devices(t)]

    def end_steps(self, last: int | None = None) -> list[Row]:
        """Return the rows of the steps up to ``last`` that not all ranks have reported; None: of all."""
        ended = sorted(step for step in self._pending if last is None or step <= last)
        return [self._end_step(step) for step in ended]

    def _apply_step(self, step: Step, t: float) -> list[Row]:
        pending = self._pending.get(step.step)
        # A rank that reports a step again has gone back: what it reported before is of another attempt.
        rows = self.end_steps() if pending is not None and step.rank in pending.ranks else []
        pending = self._pending.setdefault(step.step, _Pending(t))
        pending.ranks[step.rank], pending.time = step, t
        complete = len(pending.ranks) >= self._world - len(self._ended)
        return rows + (self.end_steps(step.step) if complete else [])

    def _end_step(self, step: int) -> Row:
        pending = self._pending.pop(step)
        return self._row(step, pending.time, self._values(pending.ranks.values()))

    def _end_devices(self, t: float) -> list[Row]:
        samples, self._devices = list(self._devices.values()), {}
        return [self._row(self.step, t, self._values(samples))] if samples else []

    def _row(self, step: int, t: float, values: dict[str, float]) -> Row:
        self.step = step
        named = {ELAPSED: t - self._started} if self._float32 else {ELAPSED: t - self._started, TIME: t}
        return Row(step, t, values | {figure.tracker: value for figure, value in named.items()})

    def _values(self, messages: "Iterable[Step | Evaluation | DeviceSample]") -> dict[str, float]:
        found: dict[str, tuple[Figure, list[tuple[float, int]]]] = {}
        for message in messages:
            weight = message.label_tokens if isinstance(message, Step) else 1
            for figure, labels, value in points(message):
                name = tracker_name(figure, labels, self._host)
                if name:
                    found.setdefault(name, (figure, []))[1].append((value, weight))
        return dict(self._value(name, figure, values) for name, (figure, values) in found.items())

    def _value(self, name: str, figure: Figure, values: list[tuple[float, int]]) -> tuple[str, float]:
        value = _JOIN[figure.ranks](values)
        in_gib = self._float32 and figure.unit == "bytes"
        return (name.replace("_bytes", "_gib", 1), value / _GIB) if in_gib else (name, value)


def facts_of(hello: Hello) -> dict[str, Value]:
    """Return the facts about a run that its tracker shows as its configuration; none of the command line."""
    named: dict[str, Value | None] = {
        "model": hello.model, "framework": hello.framework, "precision": hello.precision, "ranks": hello.world_size,
        "parameters": hello.parameters, "trainable_parameters": hello.trainable_parameters,
        "zero_stage": hello.zero_stage, "micro_batch": hello.micro_batch,
        "grad_accumulation": hello.grad_accumulation, "device": hello.device.name, "backend": hello.backend,
    }  # fmt: skip
    versions = {f"version_{name}": version for name, version in hello.versions.items()}
    return {name: value for name, value in {**named, **versions}.items() if value not in (None, "", 0)}


class Tracker:
    """A target of ``--report-to`` that passes one run on to a client, as rows and alerts."""

    seconds = 10.0
    end_seconds = 30.0

    def __init__(self, client: Client) -> None:
        self.client = client
        self.replayed = False  # The run is not live: all of its messages are passed on, to a new run in the tracker
        self.written = 0  # Rows and alerts
        self._since = time.time()
        self._rows = Rows("", 0.0, False)
        self._state, self._time = "", 0.0
        self._facts: dict[str, Value] = {}
        self._alerts: set[int] = set()

    def open(self, run: RunFile) -> None:
        """Open the run in the tracker."""
        self._rows = Rows(run.host, run.created, self.client.float32)
        self.client.open(About(run.id, run.created, self.replayed))
        if not self.replayed:
            print(f"the run is there: {self.client.where}", file=sys.stderr)  # in the exporter's log

    def points(self, batch: Sequence[Sent]) -> None:
        """Write the rows of messages; of those that are not live, only what is true of the whole run."""
        rows = [row for sent in batch for row in self._apply(sent.frame, sent.live)]
        if rows:
            self.client.log(rows)
            self.written += len(rows)

    def alert(self, alert: Alert) -> None:
        """Write an alert, unless it is resolved, or was raised before this process, which continues another's work."""
        known = alert.id in self._alerts or not (self.replayed or alert.time >= self._since)
        if alert.resolved is None and not known:
            self._alerts.add(alert.id)
            step = self._rows.step if alert.step is None else alert.step
            title, text = sanitize(alert.title, _TITLE), sanitize(alert.text.replace("\n", " "), _TEXT)
            self.client.alert(Note(step, alert.time, alert.severity, title, text or title, alert.id))
            self.written += 1

    def close(self) -> None:
        """Write what is left and end the run in the tracker."""
        rows = self._rows.end(self._time)
        try:
            if rows:
                self.client.log(rows)
                self.written += len(rows)
        finally:
            self.client.close(self._state, self._time)

    def replay(self, recording: Path) -> str:
        """Write a recording to a new run in the tracker; return in words what was written, and where.

        Raises ``RecordingError`` if the recording cannot be read, ``FtmonError`` if the tracker does not take it.
        """
        self.replayed = True
        with Reader(recording, once=True) as reader:
            info = reader.info()
            self.open(RunFile(info.run_id or info.name, info.name, info.started, [], "", info.host, info.kind))
            after = 0
            while frames := reader.frames(after, _MESSAGES):
                after = frames[-1].seq
                self.points([Sent(frame, True) for frame in frames])
                for frame in frames:
                    if isinstance(frame.message, Alert):
                        self.alert(frame.message)
            self.close()
        return f"{counted(self.written, 'row')}: {self.client.where}"

    def _apply(self, frame: Frame, live: bool) -> list[Row]:
        message = frame.message
        if isinstance(message, RunState):
            self._state = message.state if message.is_over else ""
        elif isinstance(message, Hello) and message.rank == 0:
            facts = self._facts | facts_of(message)
            if facts != self._facts:
                self._facts = facts
                self.client.configure(facts)
        self._time = max(self._time, frame.t)
        return self._rows.apply(frame) if live or isinstance(message, Hello | Job) else []
