"""Writes the recording: appends are collected in memory and go to SQLite in one transaction a commit.

The hub never waits for a broken disk and never fails by it: an error is kept in words in ``error``, the rows are held
back up to a limit and counted beyond it, and writing is tried again until it works. What was lost is written into the
recording itself, as a row of ``gaps``.
"""

import errno
import json
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import msgspec

from ..control import Alert, Answer, Query
from ..errors import RecordingError
from ..process import this_process
from ..rundir import RunFile
from ..telemetry import DeviceSample, Heartbeat, Hello, LogLine, Step
from ..wire import RESTART_LEAP, VERSION, Message
from .checkpoint import Checkpointer
from .marks import INSERT_EXPLAINED, INSERT_MARK, Marks
from .opening import check_continuable
from .rollup import INSERT_ROLLUP, Rollups
from .rows import INSERTS, Names, Row, alert_row, event_row, hello_row, log_row
from .schema import APPLICATION_ID, MARK_TABLES, SCHEMA_VERSION, STATEMENTS, STREAM_TABLES
from .steprow import INSERT_EXTRA, INSERT_STEP, step_rows

PENDING_LIMIT = 20_000
"""Rows held back while the disk refuses them (some 40 MB); beyond, steps, samples and log lines are let go."""

RETRY_S = 2.0
"""How long a refusing disk is left alone before the next try."""

_EVENTS_KEPT = 5_000
"""Of those, states and other events stay as long as they are no more than this."""

_BULKY = ("steps", "device_samples", "logs")
_INSERTS = {
    "steps": INSERT_STEP,
    "extra_phases": INSERT_EXTRA,
    "rollups": INSERT_ROLLUP,
    "marks": INSERT_MARK,
    "explained": INSERT_EXPLAINED,
    **INSERTS,
}
_UNFIT = (OverflowError, ValueError, sqlite3.ProgrammingError, sqlite3.InterfaceError)
"""What SQLite says to a value that no column can hold."""
_NOT_RECORDED = (Heartbeat, Query, Answer)


def _describe(run: RunFile | None) -> dict[str, Any]:
    """Give the rows of ``meta`` that say which run this is."""
    found: dict[str, Any] = {"protocol": f"{VERSION[0]}.{VERSION[1]}", "created": time.time()}
    if run is not None:
        found |= {"run_id": run.id, "name": run.name, "created": run.created, "host": run.host, "kind": run.kind}
        found |= {"cwd": run.cwd, "command": json.dumps(run.command)}
    return found


class Writer:
    """Appends the hub's stream to one recording file; a new one is made, an ftmon recording is continued.

    Args:
        path: the file.
        run: what was started; kept in ``meta`` so that the file explains itself.

    Raises:
        RecordingError: the file is there and is not a recording this version can continue.
    """

    def __init__(self, path: str | os.PathLike[str], run: RunFile | None = None) -> None:
        self.path = Path(path)
        self.error = ""
        """Why nothing can be written at the moment, in one line; empty while all is well."""
        self.recorded = 0
        """Messages taken to disk by this writer."""
        self.lost = 0
        """Messages let go since this writer began, because they could not be written."""
        self.last_seq = 0
        """The highest number in the recording, or seen since."""
        self.next_seq = 1
        """Where a hub that opens this recording goes on numbering."""
        self._run = run
        self._connection: sqlite3.Connection | None = None
        self._checkpointer: Checkpointer | None = None
        self._pending: dict[str, list[Row]] = {table: [] for table in _INSERTS}
        self._held = 0
        self._names = Names()
        self._rollups = Rollups(self._pending["rollups"].append)
        self._marks = Marks(lambda table, row: self._pending[table].append(row))
        self._second = 0
        self._retry_at = 0.0
        self._taken_up = False
        self._gap: tuple[float, float, int, str] | None = None
        there = self.path.is_file() and self.path.stat().st_size > 0
        if there:
            check_continuable(self.path)
        if not self._try_open() and there:
            # Unknown what is in the file: number from where no earlier hub can have come.
            self.next_seq = int(time.time()) << 20
            self._names = Names(first=int(time.time()))

    def append(self, seq: int, t: float, message: Message) -> None:
        """Take one message of the stream; it is on disk after the next ``commit``.

        Args:
            seq: the hub's number of it, higher than all before.
            t: when the hub received it, seconds since the epoch.
            message: heartbeats, queries and answers are numbered but not recorded.
        """
        self.last_seq = seq
        if isinstance(message, _NOT_RECORDED):
            return
        if t >= self._second + 1:
            self._second = int(t)
            self._pending["clock"].append((self._second, seq))
        self._held += 1
        try:
            self._take(seq, t, message)
        except (OverflowError, TypeError, ValueError, msgspec.MsgspecError):
            self._lose(1, t, t, "figures that fit no column")

    def commit(self) -> None:
        """Write what was appended, in one transaction. Never raises; see ``error`` and ``lost``."""
        if not self._held and self._gap is None:
            return
        now = time.monotonic()
        if now < self._retry_at or not self._try_open():
            self._let_go()
            return
        try:
            self._write()
        except (sqlite3.Error, OSError) as error:
            self._fail(error)
            self._let_go()

    def close(self) -> None:
        """Write the rest and leave one self-contained file behind, where the disk allows it."""
        self._retry_at = 0.0
        self.commit()
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self._end_checkpointer()
        try:
            if not self.error:
                self._put(connection, closed=time.time())
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            # Without a write-ahead log the file can be copied alone and read from a read-only disk. Refused while
            # somebody reads; the next one to close it loses nothing by that.
            connection.execute("PRAGMA journal_mode=DELETE")
        except sqlite3.Error as error:
            self.error = self.error or str(error)
        finally:
            connection.close()

    @property
    def bytes(self) -> int:
        """Size of the recording on disk, its write-ahead log included."""
        total = 0
        for suffix in ("", "-wal"):
            try:
                total += os.stat(f"{self.path}{suffix}").st_size
            except OSError:
                continue
        return total

    def _try_open(self) -> bool:
        """Open, or make, the recording unless it is open; tell whether it is."""
        if self._connection is not None:
            return True
        connection = None
        try:
            connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=1.0)
            self._prepare(connection)
        except (sqlite3.Error, OSError, RecordingError) as error:
            if connection is not None:
                connection.close()
            self._fail(error)
            return False
        self._connection = connection
        self._checkpointer = Checkpointer(self.path)
        self._checkpointer.start()
        return True

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA page_size=8192")
        known = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] > 0
        if not known:
            # Before there is a write-ahead log: the file alone says what it is, whatever becomes of the log.
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            connection.execute("BEGIN IMMEDIATE")
            for statement in STATEMENTS:
                connection.execute(statement)
            self._put(connection, **_describe(self._run))
            connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode=WAL")
        # In WAL mode NORMAL keeps the file whole through a crash of the machine; the checkpointer makes it durable.
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint=0")
        if known and not self._taken_up:
            for statement in MARK_TABLES:
                connection.execute(statement)
            self._take_up(connection)
        self._taken_up = True
        process = this_process()
        self._put(connection, writer_pid=process.pid, writer_start_ticks=process.start_ticks, closed="")

    def _take_up(self, connection: sqlite3.Connection) -> None:
        """Go on where an earlier writer of this file left off."""
        if self.last_seq:
            # The file could not be opened at first: rows of this writer are waiting, numbered far beyond its own.
            earlier = Rollups(self._pending["rollups"].append)
            earlier.load(connection)
            earlier.flush()
            return
        meta = dict(connection.execute("SELECT key, value FROM meta"))
        highest = [connection.execute(f"SELECT max(seq) FROM {table}").fetchone()[0] or 0 for table in STREAM_TABLES]
        self.last_seq = max(*highest, int(meta.get("last_seq") or 0))
        # Heartbeats are numbered and not recorded: the last number that was given is unknown, so leave it far behind.
        self.next_seq = self.last_seq + RESTART_LEAP
        self._second = connection.execute("SELECT max(second) FROM clock").fetchone()[0] or 0
        self._names.load(connection)
        self._rollups.load(connection)
        self._marks.load(connection)

    def _take(self, seq: int, t: float, message: Message) -> None:
        pending = self._pending
        if isinstance(message, Step):
            row, extra = step_rows(seq, t, message)
            pending["steps"].append(row)
            if extra:
                pending["extra_phases"] += extra
            self._rollups.add(row)
            self._marks.step(seq, message)
        elif isinstance(message, DeviceSample):
            row = self._names.sample_row(seq, t, message, lambda table, row: pending[table].append(row))
            pending["device_samples"].append(row)
        elif isinstance(message, LogLine):
            pending["logs"].append(log_row(seq, t, message))
        elif isinstance(message, Alert):
            pending["alerts"].append(alert_row(seq, t, message))
        elif isinstance(message, Hello):
            pending["ranks"].append(hello_row(seq, t, message))
        else:
            pending["events"].append(event_row(seq, t, message))
            self._marks.message(seq, message)

    def _write(self) -> None:
        connection = self._connection
        assert connection is not None
        connection.execute("BEGIN IMMEDIATE")
        lost = 0
        for table, rows in self._pending.items():
            if rows:
                lost += self._insert(connection, table, rows)
        if self._gap is not None:
            connection.execute("INSERT INTO gaps(first_t, last_t, messages, reason) VALUES (?, ?, ?, ?)", self._gap)
        self._put(connection, last_seq=self.last_seq)
        connection.execute("COMMIT")
        self.recorded += self._held - lost
        self.lost += lost
        self._held = 0
        self._gap = None
        self.error = ""
        for rows in self._pending.values():
            rows.clear()
        if self._checkpointer is not None:
            self._checkpointer.poke()

    def _insert(self, connection: sqlite3.Connection, table: str, rows: list[Row]) -> int:
        """Insert rows; return how many messages no column could hold (a peer's nonsense) and were passed over."""
        connection.execute("SAVEPOINT rows")
        try:
            connection.executemany(_INSERTS[table], rows)
        except _UNFIT:
            connection.execute("ROLLBACK TO rows")
        else:
            connection.execute("RELEASE rows")
            return 0
        connection.execute("RELEASE rows")
        lost = 0
        for row in rows:
            try:
                connection.execute(_INSERTS[table], row)
            except _UNFIT:
                lost += table in STREAM_TABLES
        return lost

    def _put(self, connection: sqlite3.Connection, **values: Any) -> None:
        connection.executemany(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)", [(key, str(value)) for key, value in values.items()]
        )

    def _fail(self, error: Exception) -> None:
        full = (
            getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL or getattr(error, "errno", 0) == errno.ENOSPC
        )
        reason = "the disk is full; free space there and" if full else f"{error};"
        self.error = f"{self.path}: not recording: {reason} recording goes on by itself"
        self._retry_at = time.monotonic() + RETRY_S
        if self._connection is not None:
            try:
                self._connection.rollback()
            except sqlite3.Error:
                self._end_checkpointer()
                self._connection.close()
                self._connection = None

    def _end_checkpointer(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.stop()
            self._checkpointer = None

    def _let_go(self) -> None:
        """Hold rows back while they are few; beyond that let the bulky ones go, and keep what explains the run."""
        if self._held <= PENDING_LIMIT:
            return
        times: list[float] = []
        for table in _BULKY:
            times += (row[1] for row in self._pending[table])
            self._pending[table].clear()
        self._pending["extra_phases"].clear()
        events = self._pending["events"]
        times += (row[1] for row in events[:-_EVENTS_KEPT])
        del events[:-_EVENTS_KEPT]
        if times:
            self._lose(len(times), min(times), max(times), self.error)

    def _lose(self, count: int, first_t: float, last_t: float, reason: str) -> None:
        self.lost += count
        self._held -= count
        if self._gap is not None:
            first_t, count = self._gap[0], count + self._gap[2]
        self._gap = (first_t, last_t, count, reason)
