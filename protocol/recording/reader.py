"""Reads a recording: whole states by time, ranges of the stream, pooled curves. Works while it is being written."""

import contextlib
import gc
import inspect
import math
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import wraps
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import msgspec

from ..errors import RecordingError
from ..host.process import ProcessId, is_alive
from ..messages.control import Alert, RunState
from ..messages.hosts import Job
from ..messages.telemetry import LAST_TIME, MAX_RANKS, DeviceSample, Evaluation, Failure, Hello, Oom, Step
from ..messages.wire import UNREADABLE, Frame
from ..run.end import first_failure
from ..text import sanitize
from .curves import Window, mean_loss, peak_seq, read_points
from .opening import OpenedRecording, is_damage
from .results import (
    MemoryColumn,
    PeakMark,
    RecordingInfo,
    StepPoint,
    TrainingPoint,
    explained_seqs,
    held_to_type,
    read_marks,
)
from .rows import Row, RowDecoder, job_seqs, shown_since, training_since
from .salvage import open_damaged, open_recording
from .schema import ROLLUP_SIZES, STREAM_TABLES
from .series import Part, read_part

_LAST_STEP = "SELECT max(step) FROM (SELECT step FROM steps WHERE seq >= ? ORDER BY seq DESC LIMIT 4096)"
_LOSSES = """
    SELECT step, loss, label_tokens FROM steps LEFT JOIN training_steps USING(seq)
    WHERE seq IN (SELECT seq FROM steps ORDER BY seq DESC LIMIT ?)"""
_EVALUATION_LOSS = """
    SELECT loss FROM evaluations WHERE loss IS NOT NULL
    AND name = (SELECT name FROM evaluations WHERE loss IS NOT NULL ORDER BY step, seq LIMIT 1)
    ORDER BY step DESC, seq DESC LIMIT 1"""


def _last_loss(rows: list[Row], ranks: int) -> float | None:
    """Return the loss of the last step that all ranks recorded, mean over ranks; of the last step if there is none.

    ``rows`` has step, loss and label tokens of the latest rank-steps.
    """
    steps: dict[int, list[tuple[float, int]]] = {}
    recorded: dict[int, int] = {}
    for step, loss, tokens in rows:
        if isinstance(step, int):
            recorded[step] = recorded.get(step, 0) + 1
            if isinstance(loss, float) and isfinite(loss):
                steps.setdefault(step, []).append((loss, tokens if isinstance(tokens, int) else 0))
    common = max((step for step in steps if recorded[step] >= ranks), default=max(steps, default=0))
    return mean_loss(steps.get(common, []))


def _missing(opened: OpenedRecording, closed: bool, live: bool, last_t: float, gaps: list[Row]) -> str:
    until = f"; it ends at {_clock(last_t)}" if last_t else ""
    found = [f"{opened.missing}{until}"] if opened.missing else []
    if not closed and not live and not found:
        found.append(f"it was not closed properly: the last second, or more, may be missing{until}")
    for first_t, gap_t, messages, reason in gaps:
        count = messages if isinstance(messages, int) else "some"
        words = sanitize(reason, 300) if isinstance(reason, str) and reason else "the reason is not known"
        found.append(
            f"{count} message{'' if count == 1 else 's'} between {_clock(first_t)} and {_clock(gap_t)}: {words}"
        )
    return "; ".join(found)


def _clock(t: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))
    except (OSError, OverflowError, TypeError, ValueError):
        return "a time that is none"


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 18 else 0


def _time(text: str | None) -> float:
    try:
        t = float(text or 0)
    except ValueError:
        return 0.0
    return _moment((0, t))[1]


def _moment(row: tuple[int, float]) -> tuple[int, float]:
    """Return the number and time; the time is 0 if it is out of range."""
    return (row[0], row[1]) if 0 <= row[1] < LAST_TIME else (row[0], 0.0)


def _command(text: str) -> list[str]:
    try:
        return msgspec.json.decode(text, type=list[str])
    except UNREADABLE:
        return []


T = TypeVar("T")
P = ParamSpec("P")
_DAMAGE = (msgspec.MsgspecError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError)
"""Errors raised for values in the file that no writer writes."""
_PART = 256  # rows fetched at once; the bytes of the answer are counted after each part
_END = 1 << 62  # above all numbers of the stream
_LAST_OF_EACH = """
    WITH RECURSIVE keys(key) AS (
        SELECT min({key}) FROM {table} {where}
        UNION ALL
        SELECT (SELECT min({key}) FROM {table} {where} {also} {key} > keys.key) FROM keys WHERE keys.key IS NOT NULL)
    SELECT (SELECT max(seq) FROM {table} {where} {also} {key} = keys.key AND seq <= :seq) FROM keys
    WHERE keys.key IS NOT NULL"""
"""The last row up to :seq for each value of an indexed column, by a loose index scan."""


def _whole(value: Any) -> int:
    """Return an argument as an integer that fits SQLite's 64 bits."""
    return int(min(max(value, -_END), _END))


_CONVERT: dict[Any, Callable[[Any], Any]] = {
    int: _whole,
    float: float,
    str: str,
    int | None: lambda value: None if value is None else _whole(value),
    float | None: lambda value: None if value is None else float(value),
}


def _query(method: Callable[Concatenate["Reader", P], T]) -> Callable[Concatenate["Reader", P], T]:
    """Convert a query's arguments to their types before the file is read, and answer it under the reader's lock."""
    signature = inspect.signature(method)

    @wraps(method)
    def ask(reader: "Reader", *args: P.args, **named: P.kwargs) -> T:
        bound = signature.bind(reader, *args, **named)
        for name, value in list(bound.arguments.items())[1:]:
            bound.arguments[name] = _CONVERT[signature.parameters[name].annotation](value)
        return reader._ask(method.__name__, lambda: method(*bound.args, **bound.kwargs))

    return ask


class Reader:
    """A recording, open for reading from any thread; the file is never changed.

    ``once`` is for one command: the cost of all queries together is bounded, not only of each. Beyond the limit
    messages are left out of the answers (``left_out``), or the query is refused. Raises ``RecordingError`` if the file
    is missing, not a recording, of a newer schema, or nothing of it can be read.
    """

    def __init__(self, path: str | os.PathLike[str], *, once: bool = False) -> None:
        self.path = Path(path)
        self._lock = threading.RLock()
        self._open(open_recording(self.path, once=once))
        self._opened.guard.end()

    def _open(self, opened: OpenedRecording) -> None:
        self._opened = opened
        self._alert_frames: dict[int, Frame] = {}
        self._decoder = RowDecoder(opened.schema, lambda table: self._all(f"SELECT * FROM {table}"), opened.guard)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def left_out(self) -> str:
        """What was left out of the answers so far because of its cost, as text; empty: nothing."""
        count = self._opened.guard.left_out
        if not count:
            return ""
        messages = "a message was" if count == 1 else f"{count:,} messages were"
        return f"{messages} left out: reading them costs more than the file's size justifies; it is damaged, or made so"

    @_query
    def info(self) -> RecordingInfo:
        """Return a summary of the recording, and what is missing of it."""
        opened, ranks, state, alerts = self._opened, self._ranks(), self._run_state(), self._alerts(None, None)
        rows = self._all("SELECT key, value FROM meta")
        meta = {key: value for key, value in rows if isinstance(key, str) and isinstance(value, str)}
        first, last = _moment(min(self._outer_rows("ASC"))), _moment(max(self._outer_rows("DESC")))
        # If the clock was set back, the last message has an earlier time, which occurs elsewhere in the stream as well.
        newest = _moment((0, self._one("SELECT max(second) FROM clock") or 0))[1] if last[1] else 0.0
        process = ProcessId(_number(meta.get("writer_pid")), _number(meta.get("writer_start_ticks")))
        closed = bool(meta.get("closed"))
        live = not closed and not opened.missing and is_alive(process)
        gaps = self._all("SELECT first_t, last_t, messages, reason FROM gaps")
        missing = "; ".join(filter(None, (_missing(opened, closed, live, last[1], gaps), self.left_out)))
        failure = first_failure(alerts)
        model = self._one("SELECT model FROM ranks WHERE model != '' ORDER BY seq DESC LIMIT 1")
        evaluation = self._one(_EVALUATION_LOSS)
        return RecordingInfo(
            run_id=meta.get("run_id", ""),
            name=meta.get("name", self.path.parent.name),
            command=_command(meta.get("command", "[]")),
            started=_time(meta.get("created")) or first[1],
            first_t=first[1],
            last_t=max(last[1], float(newest)),
            first_seq=first[0],
            last_seq=last[0],
            steps=self._one("SELECT count(seq) FROM steps"),
            ranks=ranks,
            schema=opened.schema,
            complete=closed and not missing,
            missing=missing,
            state=state.state if state else "",
            exit_code=state.exit_code if state else None,
            last_step=self._one(_LAST_STEP, (training_since(self._connection),)) or 0,
            host=meta.get("host", ""),
            kind=meta.get("kind", ""),
            live=live,
            open_errors=sorted({each.kind for each in alerts if each.severity == "error" and each.resolved is None}),
            model=model if isinstance(model, str) else "",
            loss=_last_loss(self._all(_LOSSES, (min(4096, 8 * len(ranks)),)), len(ranks)),
            evaluation_loss=evaluation if isinstance(evaluation, float) and isfinite(evaluation) else None,
            state_text=state.text if state else "",
            failure="" if failure is None else failure.title,
        )

    @_query
    def frames(self, after_seq: int = 0, limit: int = 1000, until_t: float | None = None) -> list[Frame]:
        """Return at most ``limit`` messages of the stream numbered above ``after_seq``, up to ``until_t``, in order."""
        last = _END if until_t is None else self._seq_at(until_t)
        found: list[tuple[int, str, Row]] = []
        for table in STREAM_TABLES:
            query = f"SELECT * FROM {table} WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?"
            rows = self._all(query, (after_seq, last, limit))
            found += ((row[0], table, row) for row in rows)
            if len(rows) == limit:
                last = rows[-1][0]
        found.sort(key=lambda entry: entry[0])
        # A page that is in the file twice gives its rows twice.
        frames = {frame.seq: frame for frame in self._decoded((table, row) for _, table, row in found[:limit])}
        return list(frames.values())

    @_query
    def state_at(self, t: float) -> list[Frame]:
        """Return the smallest set of messages that, applied in order, give the run's state at ``t``.

        These are the last message of each kind and rank and of each device, alert and job; each rank's step with the
        highest memory peak of the job so far, its composition with the highest peak and the last cause of each phase;
        and each job's first message in the stream. Log lines are excluded (``logs``).
        """
        seq = self._seq_at(t)
        since = shown_since(self._connection, seq)
        rows = self._rows_of("jobs", job_seqs(self._connection, seq))
        for table, key in (("ranks", "rank"), ("steps", "rank"), ("device_samples", "device")):
            seqs = set(self._last_of_each(table, key, seq))
            if table == "steps":
                peaks = [peak_seq(self._connection, rank, seq, since) for rank in self._ranks()]
                seqs.update(peak for peak in peaks if peak is not None)
            rows += self._rows_of(table, sorted(seqs))
        events = set(explained_seqs(self._connection, seq, since))
        for kind in self._values("events", "type", str):
            events.update(self._last_of_each("events", "rank", seq, kind))
        rows += self._rows_of("events", sorted(events))
        return sorted(self._decoded(rows) + self._alerts_at(seq), key=lambda frame: frame.seq)

    @_query
    def memory(self, t0: float, t1: float, columns: int) -> list[MemoryColumn]:
        """Return the memory peaks of every rank between two times in ``columns`` equal spans, pooled by maximum."""
        if columns < 1 or not t1 > t0:
            return []
        width = (t1 - t0) / columns
        first, last = self._span(t0, t1)
        found = Window(self._connection, first, last).memory(self._ranks(), t0, width, columns)
        spikes = "SELECT rank, t FROM alerts WHERE kind = 'spike' AND seq BETWEEN ? AND ?"
        for rank, t in self._all(spikes, (first, last)):
            key = (rank, min(max(int((t - t0) / width), 0), columns - 1))
            if key in found:
                found[key] = msgspec.structs.replace(found[key], spike=True)
        return [found[key] for key in sorted(found)]

    @_query
    def series(self, rank: int, t0: float, t1: float, limit: int = 500) -> list[StepPoint]:
        """Return a rank's steps that ended between two times; pooled if there are more than ``limit``."""
        return Window(self._connection, *self._span(t0, t1)).points(rank, max(1, limit))

    @_query
    def training(self, rank: int, t0: float, t1: float, limit: int = 500) -> list[TrainingPoint]:
        """Return a rank's training figures between two times; pooled if there are more than ``limit`` steps."""
        return read_points(self._connection, rank, *self._span(t0, t1), max(1, limit))

    @_query
    def alerts(self, t0: float | None = None, t1: float | None = None) -> list[Alert]:
        """Return the alerts raised between two times, in their state at ``t1``, by the time they were raised."""
        return self._alerts(t0, t1)

    @_query
    def logs(
        self, before_seq: int | None = None, rank: int | None = None, text: str = "", limit: int = 500
    ) -> list[Frame]:
        """Return the last ``limit`` log lines numbered below ``before_seq`` (None: the last ones), oldest first.

        Only those of ``rank`` (-1: the launcher) and with ``text`` in them (ASCII case-insensitive), if given.
        """
        query = "SELECT * FROM logs WHERE seq < ?"
        values: list[Any] = [_END if before_seq is None else before_seq]
        if rank is not None:
            query += " AND rank = ?"
            values.append(rank)
        if text:
            query += " AND text LIKE ? ESCAPE '\\'"
            escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
            values.append(f"%{escaped}%")
        rows = self._all(f"{query} ORDER BY seq DESC LIMIT ?", (*values, limit))
        return self._decoded(("logs", row) for row in reversed(rows))

    @_query
    def marks(self) -> list[PeakMark]:
        """Return the steps in which a phase reached a new highest peak, by rank and step; none in older recordings.

        With several jobs, only those of the last one in the stream.
        """
        return read_marks(self._connection, shown_since(self._connection, _END))

    @_query
    def jobs(self) -> list[Frame]:
        """Return the last ``job`` message of each job, by number; none in older recordings."""
        seqs = [seq for (seq,) in self._all("SELECT max(seq) FROM jobs GROUP BY number ORDER BY number")]
        frames = self._decoded(self._rows_of("jobs", seqs))
        return sorted(frames, key=lambda frame: frame.message.number if isinstance(frame.message, Job) else 0)

    @_query
    def sampled(self, kind: str, rank: int, limit: int = 240) -> list[Frame]:
        """Return at most ``limit`` messages of one type (its tag) of a rank, spread evenly over the recording.

        Only types without a table of their own: ``events``, ``composition``, ``cause``, ``oom`` ... The last message
        is always included.
        """
        query = "SELECT seq FROM events WHERE type = ? AND rank = ? ORDER BY seq DESC"
        seqs = [seq for (seq,) in self._all(query, (kind, rank))]
        stride = -(-len(seqs) // max(1, limit)) or 1
        return sorted(self._decoded(self._rows_of("events", seqs[::stride])), key=lambda frame: frame.seq)

    @_query
    def step_time(self, step: int) -> float | None:
        """Return when the last rank reported this step; None if none did."""
        times = [self._rank_step_time(rank, step) for rank in self._ranks()]
        return max((t for t in times if t is not None), default=None)

    @_query
    def seq_at(self, t: float) -> int:
        """Return the number of the last message at ``t``; 0 before the first."""
        return self._seq_at(t)

    @_query
    def part(self, series: str, after_seq: int, limit: int) -> Part | None:
        """Return the next rows of a series, of at most ``limit`` rows of its table; None: there are no more."""
        return read_part(self._all, self._decoder.frame, self._opened.schema, series, (after_seq, limit))

    @property
    def _connection(self) -> sqlite3.Connection:
        return self._opened.connection

    def _ask(self, name: str, question: Callable[[], T]) -> T:
        """Answer a query under the lock; if the file proves damaged, salvage it and answer from the rest."""
        with self._lock:
            try:
                return self._answer(name, question)
            except (sqlite3.Error, *_DAMAGE) as error:
                if self._opened.salvaged or (isinstance(error, sqlite3.Error) and not is_damage(error)):
                    raise RecordingError(f"{self.path}: cannot be read: {_one_line(error)}") from None
                self._opened.close()
                self._open(open_damaged(self.path, self._opened.guard))
            try:
                return self._answer(name, question)
            except (sqlite3.Error, *_DAMAGE) as error:
                raise RecordingError(f"{self.path}: is damaged: {_one_line(error)}") from None

    def _answer(self, name: str, question: Callable[[], T]) -> T:
        """Answer from one snapshot of the file: a commit between two reads of an answer would leave a gap in it."""
        guard = self._opened.guard
        guard.begin()
        try:
            self._connection.execute("BEGIN")
            return held_to_type(name, question())
        except sqlite3.Error as error:
            guard.raise_limit(error)
            raise
        except MemoryError:
            raise RecordingError(f"{self.path}: an answer from it does not fit into memory") from None
        finally:
            with contextlib.suppress(sqlite3.Error):
                self._connection.rollback()
            guard.end()

    def _all(self, query: str, bind: Any = ()) -> list[Row]:
        cursor = self._connection.execute(query, bind)
        guard, rows = self._opened.guard, list[Row]()
        while part := cursor.fetchmany(_PART):
            guard.charge(sum(map(_text_bytes, zip(*part, strict=True))))
            rows += part
        return rows

    def _one(self, query: str, bind: Any = ()) -> Any:
        row = self._connection.execute(query, bind).fetchone()
        return None if row is None else row[0]

    def _seq_at(self, t: float) -> int:
        if not math.isfinite(t):
            last = max(self._one(f"SELECT max(seq) FROM {table}") or 0 for table in STREAM_TABLES)
            return last if t > 0 else 0
        first = self._one("SELECT seq FROM clock WHERE second <= ? ORDER BY second DESC LIMIT 1", (math.floor(t),))
        if first is None:
            return 0
        query = "SELECT seq FROM clock WHERE second > ? ORDER BY second LIMIT 1"
        beyond = self._one(query, (math.floor(t),)) or _END
        found = first - 1
        for table in STREAM_TABLES:
            query = f"SELECT seq FROM {table} WHERE seq >= ? AND seq < ? AND t <= ? ORDER BY seq DESC LIMIT 1"
            found = max(found, self._one(query, (first, beyond, t)) or 0)
        return found

    def _span(self, t0: float, t1: float) -> tuple[int, int]:
        return self._seq_at(math.nextafter(t0, -math.inf)) + 1, self._seq_at(t1)

    def _decoded(self, rows: Iterable[tuple[str, Row]]) -> list[Frame]:
        return [frame for table, row in rows if (frame := self._decoder.frame(table, row))]

    def _outer_rows(self, order: str) -> list[Row]:
        """Return number and time of each table's first (``ASC``) or last message; zeros if there are none."""
        queries = (f"SELECT seq, t FROM {table} ORDER BY seq {order} LIMIT 1" for table in STREAM_TABLES)
        return [row for query in queries for row in self._all(query)] or [(0, 0.0)]

    def _rows_of(self, table: str, seqs: Sequence[int]) -> list[tuple[str, Row]]:
        rows: list[tuple[str, Row]] = []
        for at in range(0, len(seqs), 500):  # few statements: a long run has thousands of alerts
            some = seqs[at : at + 500]
            places = ", ".join("?" * len(some))
            rows += ((table, row) for row in self._all(f"SELECT * FROM {table} WHERE seq IN ({places})", some))
        return rows

    def _last_of_each(self, table: str, key: str, seq: int, kind: str | None = None) -> list[int]:
        where, also = ("WHERE type = :type", "AND") if kind is not None else ("", "WHERE")
        query = _LAST_OF_EACH.format(table=table, key=key, where=where, also=also)
        return [found for (found,) in self._all(query, {"seq": seq, "type": kind}) if found is not None]

    def _alerts_at(self, seq: int) -> list[Frame]:
        """Return the last message of each alert up to ``seq``; cached, as a long run has thousands of alerts."""
        query = "SELECT max(seq) FROM alerts WHERE seq <= ? GROUP BY id"
        seqs = [found for (found,) in self._all(query, (seq,))]
        rows = self._rows_of("alerts", [found for found in seqs if found not in self._alert_frames])
        self._alert_frames |= {frame.seq: frame for frame in self._decoded(rows)}
        return [self._alert_frames[found] for found in seqs if found in self._alert_frames]

    def _ranks(self) -> list[int]:
        found: set[int] = set()
        for table in ("steps", "ranks"):
            found.update(rank for rank in self._values(table, "rank", int) if 0 <= rank < MAX_RANKS)
        return sorted(found)

    def _values(self, table: str, column: str, kind: type) -> list[Any]:
        """Return the distinct values of an indexed column, by a loose index scan."""
        found: list[Any] = []
        value = self._one(f"SELECT min({column}) FROM {table}")
        while value is not None:
            if value.__class__ is not kind or (found and value <= found[-1]) or len(found) > MAX_RANKS:
                raise ValueError(f"{table}.{column} is not in order")
            found.append(value)
            value = self._one(f"SELECT min({column}) FROM {table} WHERE {column} > ?", (value,))
        return found

    def _alerts(self, t0: float | None, t1: float | None) -> list[Alert]:
        seq = _END if t1 is None else self._seq_at(t1)
        alerts = [frame.message for frame in self._alerts_at(seq) if isinstance(frame.message, Alert)]
        return sorted((alert for alert in alerts if t0 is None or alert.time >= t0), key=lambda alert: alert.time)

    def _rank_step_time(self, rank: int, step: int) -> float | None:
        first, last = 0, _END
        for level in reversed(range(len(ROLLUP_SIZES))):
            query = """SELECT first_seq, last_seq FROM rollups WHERE level = ? AND rank = ? AND last_seq BETWEEN ? AND ?
                AND min_step <= ? AND max_step >= ? ORDER BY last_seq DESC LIMIT 1"""
            found = self._all(query, (level, rank, first, last, step, step))
            if found:
                first, last = found[0]
        if last == _END:
            # Not in any pooled row: only the newest steps, which are not pooled yet, remain.
            first = self._one("SELECT max(last_seq) FROM rollups WHERE level = 0 AND rank = ?", (rank,)) or 0
        query = "SELECT t FROM steps WHERE rank = ? AND seq BETWEEN ? AND ? AND step = ? ORDER BY seq DESC LIMIT 1"
        return self._one(query, (rank, first, last, step))

    def _run_state(self) -> RunState | None:
        rows = self._all("SELECT * FROM events WHERE type = 'run_state' ORDER BY seq DESC LIMIT 1")
        frame = self._decoder.frame("events", rows[0]) if rows else None
        return frame.message if frame is not None and isinstance(frame.message, RunState) else None


def _text_bytes(column: Row) -> int:
    """Return the length of the texts and blobs in a column, most of which have none."""
    kinds = {*map(type, column)}
    if str not in kinds and bytes not in kinds:
        return 0
    return sum(len(value) for value in column if value.__class__ is str or value.__class__ is bytes)


def _one_line(error: Exception) -> str:
    return sanitize(f"{error}" if isinstance(error, sqlite3.Error) else f"{type(error).__name__}: {error}", 300)


@contextlib.contextmanager
def without_collections() -> Generator[None]:
    """Pause the garbage collector while a recording is read.

    A read creates tens of thousands of objects, none of them in circles. Traversing these and all others repeatedly
    takes as long as a whole load, and a tenth of an export.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_PAGE = 2000


class RecordedRun:
    """Contents of one recording; raises ``RecordingError`` if it cannot be read.

    The first ``skip`` steps of each rank are left out; the last ``most`` are kept, None: all. The recording is not read
    beyond the step ``until``; None: it is read to its end. ``last``: of several trainings only the last one's steps,
    evaluations and ranks count.
    """

    def __init__(
        self, path: Path, skip: int = 0, most: int | None = None, until: int | None = None, *, last: bool = False
    ) -> None:
        self._skip, self._most, self._until = skip, most, until
        self.trainings = 0
        """Number of trainings (jobs without their restarts) so far; of recordings before there were jobs 0."""
        self.began: float | None = None  # when the last of several trainings began
        self._last = last
        self._job = 0
        self.ooms: list[Oom] = []
        self.failures: list[Failure] = []
        self._begin()
        with Reader(path) as reader:
            self.info: RecordingInfo = reader.info()
            after = 0
            while frames := reader.frames(after, _PAGE):
                after = frames[-1].seq
                for frame in frames:
                    self._apply(frame)
            self.alerts: list[Alert] = reader.alerts(None, self._later)

    def _begin(self) -> None:
        self._later: float | None = None  # when the first rank had passed the step `until`
        self._seen: dict[int, int] = {}
        self._first: dict[int, int] = {}  # the lowest step of each rank
        self._steps: dict[int, deque[Step]] = {}
        self.batches: dict[int, dict[int, int]] = {}
        """Fingerprints of the data of each rank's steps, by step, the first ones included."""
        self.hellos: dict[int, Hello] = {}
        self.evaluations: list[Evaluation] = []
        self.not_finite: set[int] = set()
        """Steps in which the loss of a rank was NaN or infinite, skipped ones included."""
        self.nvml: dict[int, int] = {}  # highest memory use of each rank by NVML, bytes
        self.devices: set[int] = set()  # GPUs on which NVML saw a rank
        self.peak_reserved: dict[int, int] = {}
        """Highest reserved memory of each rank over all steps, skipped ones included, bytes."""

    @property
    def ranks(self) -> list[int]:
        """All ranks."""
        return sorted({*self.hellos, *self._seen})

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [hello.pid for hello in self.hellos.values()]

    def steps(self, rank: int) -> Sequence[Step]:
        """Return the kept steps of a rank, in order."""
        return list(self._steps.get(rank, ()))

    def steps_seen(self, rank: int) -> int:
        """Return the number of steps a rank recorded, kept or not."""
        return self._seen.get(rank, 0)

    def drop_before(self, step: int) -> None:
        """Drop the kept steps before a step."""
        for rank, steps in self._steps.items():
            self._steps[rank] = deque((each for each in steps if each.step >= step), maxlen=self._most)

    def _apply(self, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, Job) and message.shown and message.number > self._job and not message.restart:
            self._job, self.trainings = message.number, self.trainings + 1
            if self._last and self.trainings > 1:
                self.began = frame.t
                self._begin()
        if self._until is not None and isinstance(message, Step) and message.step > self._until:
            self._later = frame.t if self._later is None else self._later
            return
        match message:
            case Step():
                self._step(message)
            case Evaluation() if self._until is None or message.step <= self._until:
                self.evaluations.append(message)
            case Hello():
                self.hellos[message.rank] = message
            case Oom():
                self.ooms.append(message)
            case Failure():
                self.failures.append(message)
            case DeviceSample(kind="gpu") if self._later is None:
                for process in message.processes:
                    if process.rank is not None:
                        self.nvml[process.rank] = max(self.nvml.get(process.rank, 0), process.used_bytes)
                        self.devices.add(message.index)
            case _:
                pass

    def _step(self, step: Step) -> None:
        self._seen[step.rank] = self._seen.get(step.rank, 0) + 1
        reserved = max((record.reserved.peak for record in step.phases), default=0)
        self.peak_reserved[step.rank] = max(self.peak_reserved.get(step.rank, 0), reserved)
        if step.loss is not None and not isfinite(step.loss):
            self.not_finite.add(step.step)
        if step.batch_id:
            batches = self.batches.setdefault(step.rank, {})
            batches[step.step] = step.batch_id
            if self._most is not None and len(batches) > self._most + self._skip:
                del batches[next(iter(batches))]
        first = self._first[step.rank] = min(step.step, self._first.get(step.rank, step.step))
        if step.step - first >= self._skip:  # by number: an imported log may have one step in ten
            self._steps.setdefault(step.rank, deque(maxlen=self._most)).append(step)
