"""Reads a recording: whole states by time, stretches of the stream, pooled curves. Works while it is being written."""

import json
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from ..control import Alert, RunState
from ..errors import RecordingError
from ..phasepeaks import PeakMark
from ..process import ProcessId, is_alive
from ..wire import Frame, Message
from .marks import explained_seqs, has_marks, read_marks
from .opening import Opened, is_damage, open_damaged, open_recording
from .peaks import peak_seq
from .pooling import Window
from .results import MemoryColumn, RecordingInfo, StepPoint
from .rows import BODY_COLUMN, Row, log_from_row, sample_from_row, unpack_body
from .schema import ROLLUP_SIZES, STREAM_TABLES
from .steprow import step_from_row

T = TypeVar("T")

_VARIABLES = 500
"""Numbers that one statement asks for; older builds of SQLite take no more than 999."""

_LAST_OF_EACH = """
    WITH RECURSIVE keys(key) AS (
        SELECT min({key}) FROM {table} {where}
        UNION ALL
        SELECT (SELECT min({key}) FROM {table} {where} {also} {key} > keys.key) FROM keys WHERE keys.key IS NOT NULL)
    SELECT (SELECT max(seq) FROM {table} {where} {also} {key} = keys.key AND seq <= :seq) FROM keys
    WHERE keys.key IS NOT NULL"""
"""For each value of an indexed column its last row up to :seq, by hopping through the index (a loose index scan)."""


class Reader:
    """A recording, open for reading from any thread; the file is never changed.

    Args:
        path: the recording.

    Raises:
        RecordingError: it is missing, not a recording, of a newer schema, or nothing of it can be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = threading.RLock()
        self._devices: dict[int, Row] = {}
        self._alert_frames: dict[int, Frame] = {}
        self._processes: dict[int, Row] = {}
        self._opened: Opened = open_recording(self.path)

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

    def info(self) -> RecordingInfo:
        """Say what the recording holds, and what is missing of it."""
        return self._ask(self._info)

    def frames(self, after_seq: int = 0, limit: int = 1000, until_t: float | None = None) -> list[Frame]:
        """Give at most ``limit`` messages of the stream numbered above ``after_seq``, up to ``until_t``, in order."""
        return self._ask(lambda: self._frames(after_seq, limit, until_t))

    def state_at(self, t: float) -> list[Frame]:
        """Give the fewest messages that, folded in order, make the run's state at ``t``.

        The last of each kind and rank, of each device and of each alert, the step of each rank's highest memory peak so
        far, its composition with the highest peak, the last cause for each phase; log lines are left to ``logs``.
        """
        return self._ask(lambda: self._state_at(t))

    def memory(self, t0: float, t1: float, columns: int) -> list[MemoryColumn]:
        """Give the memory peaks of every rank between two times in ``columns`` equal spans, pooled by maximum."""
        return self._ask(lambda: self._memory(t0, t1, columns))

    def series(self, rank: int, t0: float, t1: float, limit: int = 500) -> list[StepPoint]:
        """Give a rank's steps that ended between two times; pooled where they are more than ``limit``."""
        return self._ask(lambda: Window(self._connection, *self._span(t0, t1)).points(rank, max(1, limit)))

    def alerts(self, t0: float | None = None, t1: float | None = None) -> list[Alert]:
        """Give the alerts raised between two times, as they stood at ``t1``, by the time they were raised."""
        return self._ask(lambda: self._alerts(t0, t1))

    def logs(
        self, before_seq: int | None = None, rank: int | None = None, text: str = "", limit: int = 500
    ) -> list[Frame]:
        """Give the last ``limit`` log lines numbered below ``before_seq``, oldest first.

        Args:
            before_seq: None for the end of the recording.
            rank: only this rank's; -1 is the launcher.
            text: only lines that contain it (the case of ASCII letters does not matter).
            limit: how many at most.
        """
        return self._ask(lambda: self._logs(before_seq, rank, text, limit))

    def marks(self) -> list[PeakMark]:
        """Give the steps in which a phase came higher than before, by rank and step; none of an older recording."""
        return self._ask(lambda: read_marks(self._connection) if has_marks(self._connection) else [])

    def sampled(self, kind: str, rank: int, limit: int = 240) -> list[Frame]:
        """Give at most ``limit`` messages of one type (its tag) of a rank, spread evenly over the recording.

        Only types without a table of their own: ``events``, ``composition``, ``cause``, ``oom`` ... The last is one.
        """
        return self._ask(lambda: self._sampled(kind, rank, max(1, limit)))

    def step_time(self, step: int) -> float | None:
        """Tell when the last of the ranks that took this step had reported it; None when none did."""
        return self._ask(lambda: self._step_time(step))

    def seq_at(self, t: float) -> int:
        """Give the number of the last message there was at ``t``; 0 before the first."""
        return self._ask(lambda: self._seq_at(t))

    @property
    def _connection(self) -> sqlite3.Connection:
        return self._opened.connection

    def _ask(self, question: Callable[[], T]) -> T:
        """Answer under the lock; where the file turns out damaged, read what is left of it and answer from that."""
        with self._lock:
            try:
                return question()
            except sqlite3.Error as error:
                if self._opened.salvaged or not is_damage(error):
                    raise RecordingError(f"{self.path}: cannot be read: {error}") from None
                self._opened.close()
                self._opened = open_damaged(self.path)
            try:
                return question()
            except sqlite3.Error as error:
                raise RecordingError(f"{self.path}: is damaged: {error}") from None

    def _all(self, query: str, bind: Any = ()) -> list[Row]:
        return self._connection.execute(query, bind).fetchall()

    def _one(self, query: str, bind: Any = ()) -> Any:
        row = self._connection.execute(query, bind).fetchone()
        return None if row is None else row[0]

    def _seq_at(self, t: float) -> int:
        if not math.isfinite(t):
            return self._last_seq() if t > 0 else 0
        first = self._one("SELECT seq FROM clock WHERE second <= ? ORDER BY second DESC LIMIT 1", (math.floor(t),))
        if first is None:
            return 0
        query = "SELECT seq FROM clock WHERE second > ? ORDER BY second LIMIT 1"
        beyond = self._one(query, (math.floor(t),)) or 1 << 62
        found = first - 1
        for table in STREAM_TABLES:
            query = f"SELECT seq FROM {table} WHERE seq >= ? AND seq < ? AND t <= ? ORDER BY seq DESC LIMIT 1"
            found = max(found, self._one(query, (first, beyond, t)) or 0)
        return found

    def _last_seq(self) -> int:
        return max(self._one(f"SELECT max(seq) FROM {table}") or 0 for table in STREAM_TABLES)

    def _span(self, t0: float, t1: float) -> tuple[int, int]:
        return self._seq_at(math.nextafter(t0, -math.inf)) + 1, self._seq_at(t1)

    def _frames(self, after_seq: int, limit: int, until_t: float | None) -> list[Frame]:
        last = (1 << 62) if until_t is None else self._seq_at(until_t)
        found: list[tuple[int, str, Row]] = []
        for table in STREAM_TABLES:
            query = f"SELECT * FROM {table} WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?"
            rows = self._all(query, (after_seq, last, limit))
            found += ((row[0], table, row) for row in rows)
            if len(rows) == limit:
                last = rows[-1][0]
        found.sort(key=lambda entry: entry[0])
        return [frame for _, table, row in found[:limit] if (frame := self._frame(table, row))]

    def _frame(self, table: str, row: Row) -> Frame | None:
        """Make a row a frame again; None for what is damaged, or of a type that a newer version added."""
        try:
            message = self._message(table, row)
        except (RecordingError, msgspec.MsgspecError, ArithmeticError, LookupError, TypeError, ValueError):
            return None
        return None if message is None else Frame(row[0], row[1], message)

    def _message(self, table: str, row: Row) -> Message | None:
        message: Message | None
        if table == "steps":
            message = step_from_row(row)
        elif table == "device_samples":
            message = self._sample(row)
        elif table == "logs":
            message = log_from_row(row)
        else:
            message = unpack_body(row[BODY_COLUMN[table]])
        return message

    def _sample(self, row: Row) -> Message | None:
        if row[2] not in self._devices:
            self._devices = {number: tuple(rest) for number, *rest in self._all("SELECT * FROM device_names")}
        if row[2] not in self._devices:
            return None
        try:
            return sample_from_row(row, self._devices[row[2]], self._processes)
        except KeyError:
            self._processes = {number: tuple(rest) for number, *rest in self._all("SELECT * FROM process_names")}
            return sample_from_row(row, self._devices[row[2]], self._processes)

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

    def _state_at(self, t: float) -> list[Frame]:
        seq = self._seq_at(t)
        rows: list[tuple[str, Row]] = []
        for table, key in (("ranks", "rank"), ("steps", "rank"), ("device_samples", "device")):
            seqs = self._last_of_each(table, key, seq)
            if table == "steps":
                seqs = sorted({*seqs, *self._peak_steps(seq)})
            rows += self._rows_of(table, seqs)
        events = set(explained_seqs(self._connection, seq)) if has_marks(self._connection) else set[int]()
        for kind in self._types():
            events.update(self._last_of_each("events", "rank", seq, kind))
        rows += self._rows_of("events", sorted(events))
        frames = [frame for table, row in rows if (frame := self._frame(table, row))]
        return sorted(frames + self._alerts_at(seq), key=lambda frame: frame.seq)

    def _sampled(self, kind: str, rank: int, limit: int) -> list[Frame]:
        query = "SELECT seq FROM events WHERE type = ? AND rank = ? ORDER BY seq DESC"
        seqs = [seq for (seq,) in self._all(query, (kind, rank))]
        stride = -(-len(seqs) // limit) if seqs else 1
        rows = self._rows_of("events", seqs[::stride])
        frames = [frame for table, row in rows if (frame := self._frame(table, row))]
        return sorted(frames, key=lambda frame: frame.seq)

    def _alerts_at(self, seq: int) -> list[Frame]:
        """Give the last message of each alert up to ``seq``; a long run has thousands, and every seek wants them."""
        query = "SELECT max(seq) FROM alerts WHERE seq <= ? GROUP BY id"
        seqs = [found for (found,) in self._all(query, (seq,))]
        for table, row in self._rows_of("alerts", [found for found in seqs if found not in self._alert_frames]):
            frame = self._frame(table, row)
            if frame is not None:
                self._alert_frames[frame.seq] = frame
        return [self._alert_frames[found] for found in seqs if found in self._alert_frames]

    def _peak_steps(self, seq: int) -> list[int]:
        found = [peak_seq(self._connection, rank, seq) for rank in self._ranks()]
        return [number for number in found if number is not None]

    def _types(self) -> list[str]:
        """List the types in ``events``, by hopping through its index."""
        found: list[str] = []
        kind = self._one("SELECT min(type) FROM events")
        while kind is not None:
            found.append(kind)
            kind = self._one("SELECT min(type) FROM events WHERE type > ?", (kind,))
        return found

    def _ranks(self) -> list[int]:
        found: list[int] = []
        for table in ("steps", "ranks"):
            rank = self._one(f"SELECT min(rank) FROM {table}")
            while rank is not None:
                found.append(rank)
                rank = self._one(f"SELECT min(rank) FROM {table} WHERE rank > ?", (rank,))
        return sorted(set(found))

    def _memory(self, t0: float, t1: float, columns: int) -> list[MemoryColumn]:
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

    def _alerts(self, t0: float | None, t1: float | None) -> list[Alert]:
        seq = (1 << 62) if t1 is None else self._seq_at(t1)
        alerts = [frame.message for frame in self._alerts_at(seq) if isinstance(frame.message, Alert)]
        return sorted((alert for alert in alerts if t0 is None or alert.time >= t0), key=lambda alert: alert.time)

    def _logs(self, before_seq: int | None, rank: int | None, text: str, limit: int) -> list[Frame]:
        query, bind = "SELECT * FROM logs WHERE seq < ?", [(1 << 62) if before_seq is None else before_seq]
        values: list[Any] = list(bind)
        if rank is not None:
            query += " AND rank = ?"
            values.append(rank)
        if text:
            query += " AND text LIKE ? ESCAPE '\\'"
            escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
            values.append(f"%{escaped}%")
        rows = self._all(f"{query} ORDER BY seq DESC LIMIT ?", (*values, limit))
        return [Frame(row[0], row[1], log_from_row(row)) for row in reversed(rows)]

    def _step_time(self, step: int) -> float | None:
        times = [self._rank_step_time(rank, step) for rank in self._ranks()]
        return max((t for t in times if t is not None), default=None)

    def _rank_step_time(self, rank: int, step: int) -> float | None:
        first, last = 0, 1 << 62
        for level in reversed(range(len(ROLLUP_SIZES))):
            query = """SELECT first_seq, last_seq FROM rollups WHERE level = ? AND rank = ? AND last_seq BETWEEN ? AND ?
                AND min_step <= ? AND max_step >= ? ORDER BY last_seq DESC LIMIT 1"""
            found = self._all(query, (level, rank, first, last, step, step))
            if found:
                first, last = found[0]
        if last == 1 << 62:
            # Not in any pooled row: only the newest steps, which none pools yet, are left.
            first = self._one("SELECT max(last_seq) FROM rollups WHERE level = 0 AND rank = ?", (rank,)) or 0
        query = "SELECT t FROM steps WHERE rank = ? AND seq BETWEEN ? AND ? AND step = ? ORDER BY seq DESC LIMIT 1"
        return self._one(query, (rank, first, last, step))

    def _info(self) -> RecordingInfo:
        meta: dict[str, str] = dict(self._all("SELECT key, value FROM meta"))
        firsts: list[tuple[int, float]] = []
        lasts: list[tuple[int, float]] = []
        for table in STREAM_TABLES:
            firsts += self._all(f"SELECT seq, t FROM {table} ORDER BY seq LIMIT 1")
            lasts += self._all(f"SELECT seq, t FROM {table} ORDER BY seq DESC LIMIT 1")
        first, last = min(firsts, default=(0, 0.0)), max(lasts, default=(0, 0.0))
        process = ProcessId(int(meta.get("writer_pid") or 0), int(meta.get("writer_start_ticks") or 0))
        closed = bool(meta.get("closed"))
        live = not closed and not self._opened.missing and is_alive(process)
        missing = self._missing(closed, live, last[1])
        state = self._run_state()
        return RecordingInfo(
            run_id=meta.get("run_id", ""),
            name=meta.get("name", self.path.parent.name),
            command=json.loads(meta.get("command", "[]")),
            started=float(meta.get("created") or first[1]),
            first_t=first[1],
            last_t=last[1],
            first_seq=first[0],
            last_seq=last[0],
            steps=self._one("SELECT count(*) FROM steps"),
            ranks=self._ranks(),
            schema=self._one("PRAGMA user_version"),
            complete=closed and not missing,
            missing=missing,
            state=state.state if state else "",
            exit_code=state.exit_code if state else None,
            last_step=self._one("SELECT max(step) FROM (SELECT step FROM steps ORDER BY seq DESC LIMIT 4096)") or 0,
            host=meta.get("host", ""),
            kind=meta.get("kind", ""),
            live=live,
        )

    def _run_state(self) -> RunState | None:
        body = self._one("SELECT body FROM events WHERE type = 'run_state' ORDER BY seq DESC LIMIT 1")
        message = unpack_body(body) if body else None
        return message if isinstance(message, RunState) else None

    def _missing(self, closed: bool, live: bool, last_t: float) -> str:
        until = f"; it ends at {_clock(last_t)}" if last_t else ""
        found = [f"{self._opened.missing}{until}"] if self._opened.missing else []
        if not closed and not live and not found:
            found.append(f"it was not closed in order: the last second, or more, may be missing{until}")
        for first_t, gap_t, messages, reason in self._all("SELECT first_t, last_t, messages, reason FROM gaps"):
            found.append(f"{messages} messages between {_clock(first_t)} and {_clock(gap_t)}: {reason}")
        return "; ".join(found)


def _clock(t: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))
