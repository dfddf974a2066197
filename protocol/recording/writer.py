"""Writes the recording: appends are collected in memory and written to SQLite in one transaction per commit.

A failing disk neither blocks the hub nor makes it fail: the error is kept as text in ``error``, the rows are kept up to
a limit and counted beyond it, and writing is retried until it succeeds. Losses are recorded in the file itself, as rows
of ``gaps``.
"""

import contextlib
import errno
import json
import os
import sqlite3
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import astuple

from ..errors import RecordingError
from ..host.machine import peak_flops
from ..host.process import this_process
from ..messages.control import Alert, Answer, Query
from ..messages.hosts import Job
from ..messages.telemetry import Checkpoint, Closing, DeviceSample, Evaluation, Heartbeat, Hello, LogLine, Step
from ..messages.wire import RESTART_LEAP, VERSION, Message
from ..run.rundir import RunFile
from .curves import Curves, Rollups, figures_of, training_row
from .opening import is_cut_short, is_damage, read_header
from .results import Marks
from .rows import (
    NameNumbers,
    Row,
    alert_row,
    closing_rows,
    event_row,
    finite,
    hello_row,
    job_row,
    step_rows,
    update_rows,
)
from .schema import APPLICATION_ID, SCHEMA_VERSION, STATEMENTS, STREAM_TABLES, expected_tables

PENDING_LIMIT = 20_000
"""Messages kept while the disk cannot be written (some 40 MB); beyond, steps, samples and log lines are dropped."""
_EVENTS_KEPT = 5_000  # limit on the states and other events that are kept beyond `PENDING_LIMIT`
_BULKY = ("steps", "device_samples", "logs")
_NAMES = ("device_names", "process_names")
INSERTS = {
    table: f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(columns))})"
    for table, columns in expected_tables(SCHEMA_VERSION).items()
} | {"clock": "INSERT OR IGNORE INTO clock VALUES (?, ?)"}
_BATCH_UNFIT = (OverflowError, ValueError, sqlite3.ProgrammingError, sqlite3.InterfaceError)
"""SQLite's errors for a value that no column can hold."""


class Batch:
    """Rows by table, the number of their messages, and the number of messages that were lost before."""

    __slots__ = ("agent_numbers", "gap", "held", "last_seq", "received", "rows")

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = {table: [] for table in INSERTS}
        self.held = 0  # messages whose rows are here
        self.last_seq = 0  # highest message number in the stream when the batch was taken
        self.agent_numbers: dict[str, int] = {}
        """Highest sequence number recorded per agent; agents resend until it is confirmed."""
        self.received: dict[str, int] = {}
        """Highest sequence number received from each rank; empty: none since the last batch."""
        self.gap: tuple[float, float, int, str] | None = None
        """Messages lost: when the hub received the first and the last, their number, and the reason."""

    def __bool__(self) -> bool:
        return bool(self.held or self.gap or self.received)

    @property
    def lost(self) -> int:
        """Messages lost."""
        return self.gap[2] if self.gap is not None else 0

    def add(self, later: "Batch") -> None:
        """Append a later batch."""
        for table, rows in later.rows.items():
            if rows:
                self.rows[table] += rows
        self.held += later.held
        self.last_seq = max(self.last_seq, later.last_seq)
        self.agent_numbers |= later.agent_numbers
        self.received = later.received or self.received
        if later.gap is not None:
            first_t, last_t, count, reason = later.gap
            self.lose(count, first_t, last_t, reason)

    def lose(self, count: int, first_t: float, last_t: float, reason: str) -> None:
        """Record the loss of ``count`` messages that the hub received from ``first_t`` to ``last_t``."""
        if self.gap is not None:
            first_t, count = self.gap[0], count + self.gap[2]
        self.gap = (first_t, last_t, count, reason)

    def let_go(self, reason: str) -> None:
        """Drop the bulky rows if the batch exceeds ``PENDING_LIMIT`` messages; the rows that explain the run stay."""
        if self.held <= PENDING_LIMIT:
            return
        times: list[float] = []
        for table in _BULKY:
            times += (row[1] for row in self.rows[table])
            self.rows[table].clear()
        for table in ("extra_phases", "updates", "training_steps"):
            self.rows[table].clear()
        events = self.rows["events"]
        times += (row[1] for row in events[:-_EVENTS_KEPT])
        del events[:-_EVENTS_KEPT]
        if times:
            self.held -= len(times)
            self.lose(len(times), min(times), max(times), reason)

    def names(self) -> "Batch":
        """Return a batch of only the names, which later rows refer to."""
        found = Batch()
        found.last_seq = self.last_seq
        found.rows |= {table: self.rows[table] for table in _NAMES}
        return found

    def insert(self, connection: sqlite3.Connection) -> int:
        """Insert all rows; return the number of messages skipped because no column can hold their (invalid) values."""
        return sum(_insert(connection, table, rows) for table, rows in self.rows.items() if rows)


def _insert(connection: sqlite3.Connection, table: str, rows: list[Row]) -> int:
    lost = 0
    connection.execute("SAVEPOINT rows")
    try:
        connection.executemany(INSERTS[table], rows)
    except _BATCH_UNFIT:
        connection.execute("ROLLBACK TO rows")
        for row in rows:
            try:
                connection.execute(INSERTS[table], row)
            except _BATCH_UNFIT:
                lost += table in STREAM_TABLES
    connection.execute("RELEASE rows")
    return lost


PERIOD_S = 1.0


class Checkpointer(threading.Thread):
    """Moves the log of ``path`` into the file after each ``poke``, at most once in ``PERIOD_S``, until ``stop``.

    A commit only appends to the log, and waits for the disk only when it restarts the log. This thread makes the log
    durable: a crash of the machine loses at most a second.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(name="checkpointer", daemon=True)
        self._path = path
        self._work = threading.Event()
        self._ending = threading.Event()

    def poke(self) -> None:
        """Signal that something was committed."""
        self._work.set()

    def stop(self) -> None:
        """End the thread; wait for it at most a minute."""
        self._ending.set()
        self._work.set()
        self.join(timeout=60)

    def run(self) -> None:
        """Checkpoint until stopped. Errors are ignored: the writer gets those of the same disk."""
        connection: sqlite3.Connection | None = None
        while not self._ending.wait(PERIOD_S if connection is not None else 0):
            self._work.wait()
            self._work.clear()
            if self._ending.is_set():
                break
            with contextlib.suppress(sqlite3.Error):
                if connection is None:
                    # mode=rw never creates the file: the run's directory may be being removed.
                    there = f"{self._path.absolute().as_uri()}?mode=rw"
                    connection = sqlite3.connect(there, isolation_level=None, timeout=0, uri=True)
                # PASSIVE takes no lock that a commit or a reader would wait for.
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        if connection is not None:
            connection.close()


SETTLE_S = 1.0
"""A file must be missing for this long before a new one is made: a run's directory may be removed file by file."""
_WHOLE = ("ranks", "alerts", "device_names", "process_names")
_LATEST_EVENTS = "SELECT * FROM events WHERE seq IN (SELECT max(seq) FROM events GROUP BY type, rank)"


class RemovalWatch:
    """Detects that the opened file is no longer the one at its path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity = _identity(path)
        self._beside = path.with_name("run.json")
        self._has_run = self._beside.exists()
        self._missed_at: float | None = None

    def removed(self, now: float) -> bool:
        """Return whether the file is gone or replaced while its directory stays; ``now`` is monotonic."""
        directory_stays = self._beside.exists() if self._has_run else self._path.parent.is_dir()
        if _identity(self._path) == self._identity or not directory_stays:
            self._missed_at = None
            return False
        self._missed_at = now if self._missed_at is None else self._missed_at
        return now - self._missed_at >= SETTLE_S


@dataclass
class CarriedOver:
    """Rows copied out of a removed recording, which stays readable for the writer that has it open.

    Steps, samples and log lines, which are most of it, are left out and counted; ranks, alerts, names and the latest
    event of each kind and rank are copied, so that the new file alone gives the run's current state.
    """

    rows: dict[str, list[Row]] = field(default_factory=dict[str, list[Row]])
    meta: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    left: int = 0
    first_t: float = 0.0  # when the hub received the first message that was recorded, seconds since the epoch

    def insert(self, connection: sqlite3.Connection) -> None:
        """Insert the rows into a new recording, with a row of ``gaps`` for the messages left out."""
        connection.execute("BEGIN IMMEDIATE")
        for table, rows in self.rows.items():
            connection.executemany(INSERTS[table], rows)
        connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", self.meta)
        now = time.time()
        gap = (self.first_t or now, now, self.left, "the recording was removed; a new one was begun")
        connection.execute("INSERT INTO gaps(first_t, last_t, messages, reason) VALUES (?, ?, ?, ?)", gap)
        connection.execute("COMMIT")


def carry_over(connection: sqlite3.Connection) -> CarriedOver:
    """Return the rows a new recording begins with; fewer if the old one is no longer readable."""
    found = CarriedOver()
    with contextlib.suppress(sqlite3.Error):
        connection.execute("BEGIN")
        for table in _WHOLE:
            found.rows[table] = connection.execute(f"SELECT * FROM {table}").fetchall()
        found.rows["events"] = connection.execute(_LATEST_EVENTS).fetchall()
        found.meta = connection.execute("SELECT key, value FROM meta").fetchall()
        for table in STREAM_TABLES:
            count, first = connection.execute(f"SELECT count(*), min(t) FROM {table}").fetchone()
            found.left += count - len(found.rows.get(table, ()))
            found.first_t = min(first or found.first_t, found.first_t or first or 0.0)
    with contextlib.suppress(sqlite3.Error):
        connection.rollback()
    return found


def remove_logs(path: Path) -> None:
    """Remove the write-ahead log of a removed file: SQLite would replay it into the next one."""
    for suffix in ("-wal", "-shm"):
        with contextlib.suppress(OSError):
            os.unlink(f"{path}{suffix}")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino


RETRY_S = 2.0  # seconds between a failed write and the next attempt
_RECEIVED = "heard"  # key of `meta` with the numbers of `note_received`, as a JSON object
_AGENT = "taken:"  # prefix of the keys of `meta` with the numbers of `note_agent_numbers`
_UNFIT = (OverflowError, TypeError, ValueError, msgspec.MsgspecError)
_NOT_RECORDED = frozenset((Heartbeat, Query, Answer))


def _describe(run: RunFile | None) -> dict[str, Any]:
    found: dict[str, Any] = {"protocol": f"{VERSION[0]}.{VERSION[1]}", "created": time.time(), _RECEIVED: "{}"}
    if run is not None:
        found |= {"run_id": run.id, "name": run.name, "created": run.created, "host": run.host, "kind": run.kind}
        found |= {"cwd": run.cwd, "command": json.dumps(run.command)}
    return found


def _check_continuable(path: Path) -> None:
    """Raise ``RecordingError`` if an existing file is no recording of this schema, or is truncated."""
    header = read_header(path)
    if header.schema != SCHEMA_VERSION:
        there = f"has recording schema {header.schema}, this ftmon writes {SCHEMA_VERSION}"
        raise RecordingError(f"{path}: {there}; move it out of the way")
    if is_cut_short(path, header):
        raise RecordingError(f"{path}: is cut short and cannot be continued; move it out of the way")


class Writer:
    """Appends the hub's stream to a recording file, which is created, or continued if it exists.

    The run's description is kept in ``meta``, so that the file is self-contained. Raises ``RecordingError`` if the file
    exists and is damaged, or is not a recording this version can continue.
    """

    def __init__(self, path: str | os.PathLike[str], run: RunFile | None = None) -> None:
        self.path = Path(path)
        self.error = ""  # why nothing can be written at the moment, in one line; empty: no error
        self.notice = ""  # text to show about the file, such as its replacement after a removal; empty: none
        self.recorded = 0
        self.last_seq = 0  # highest stream number recorded or appended
        self.next_seq = 1  # sequence number with which a hub that opens this recording continues
        self.agent_numbers: dict[str, int] = {}
        """The numbers that an earlier writer of this file recorded by ``note_agent_numbers``."""
        self.received: dict[str, int] | None = None
        """The numbers that an earlier writer of this file recorded by ``note_received``; None: no earlier writer."""
        self._run = run
        self._connection: sqlite3.Connection | None = None
        self._watch: RemovalWatch | None = None
        self._checkpointer: Checkpointer | None = None
        self._carried: CarriedOver | None = None  # rows of a removed file for the new one, until that is made
        self._pending = Batch()
        self._writing = Batch()
        self._lost = 0  # number of lost messages that are already recorded
        self._names = NameNumbers()
        self._rollups = Rollups(lambda row: self._put_row("rollups", row))
        self._curves = Curves(lambda row: self._put_row("curves", row))
        self._peaks: dict[int, float | None] = {}  # data-sheet peak of each rank's device, FLOP/s; None: unknown
        self._marks = Marks(self._put_row)
        self._received: dict[str, int] = {}  # the last argument of `note_received`
        self._second = 0
        self._retry_at = 0.0
        self._resumed = False
        there = self.path.is_file() and self.path.stat().st_size > 0
        if there:
            _check_continuable(self.path)
        try:
            self._open()
        except (sqlite3.Error, OSError, *_UNFIT) as error:
            if there and (isinstance(error, _UNFIT) or (isinstance(error, sqlite3.Error) and is_damage(error))):
                raise RecordingError(f"{self.path}: is damaged and cannot be continued: {error}") from None
            self._fail(error)
            if there:
                # The file's content is unknown: start above any number of an earlier hub.
                self.next_seq = int(time.time()) << 20
                self._names = NameNumbers(first=int(time.time()))

    def append(self, seq: int, t: float, message: Message) -> None:
        """Add one message of the stream, received by the hub at ``t``; it is on disk after the next ``commit``.

        Its number is higher than all before. Heartbeats, queries and answers are numbered but not recorded.
        """
        self.last_seq = seq
        if type(message) in _NOT_RECORDED:
            return
        if t >= self._second + 1:
            self._second = int(t)
            self._put_row("clock", (self._second, seq))
        try:
            self._add(seq, t, message)
        except _UNFIT:
            self._pending.lose(1, t, t, "figures that fit no column")
        else:
            self._pending.held += 1

    def note_agent_numbers(self, numbers: dict[str, int]) -> None:
        """Record the agents' sequence numbers of the appended messages, in the same transaction as those."""
        self._pending.agent_numbers |= numbers

    def note_received(self, numbers: dict[str, int]) -> None:
        """Record the highest sequence number received from each sender, in the same transaction as the messages.

        A later hub counts from these: messages that its predecessor received and did not record are counted as lost.
        """
        if numbers != self._received:
            self._received = self._pending.received = dict(numbers)

    def lose(self, count: int, first_t: float, last_t: float, reason: str) -> None:
        """Record that messages were lost before they were appended; the arguments are those of ``Batch.lose``."""
        self._pending.lose(count, first_t, last_t, reason)

    @property
    def lost(self) -> int:
        """Messages lost since this writer began."""
        return self._lost + self._writing.lost + self._pending.lost

    def commit(self) -> None:
        """Write the appended messages, as ``write`` does; see ``error`` and ``lost``."""
        self.write(self.drain())

    def drain(self) -> Batch:
        """Return the appended messages, for ``write``, which may run in another thread while more are appended."""
        batch, self._pending = self._pending, Batch()
        batch.last_seq = self.last_seq
        return batch

    def write(self, batch: Batch) -> None:
        """Write a batch of ``drain`` and earlier unwritten ones in one transaction; disk errors only set ``error``."""
        waiting = self._writing
        waiting.add(batch)
        if not waiting:
            return
        now = time.monotonic()
        if self._connection is not None and self._watch is not None and self._watch.removed(now):
            self._begin_anew(self._connection)
        if now < self._retry_at or not self._try_open():
            waiting.let_go(self.error)
            return
        try:
            self._write()
        except (sqlite3.Error, OSError) as error:
            self._fail(error)
            waiting.let_go(self.error)
        except Exception as error:
            self._fail(error)
            self._writing = waiting.names() if waiting.held else Batch()
            self._writing.lose(waiting.held + waiting.lost, time.time(), time.time(), self.error)
            raise

    def close(self) -> None:
        """Write the rest and leave one self-contained file, if the disk allows it."""
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
            # Without a write-ahead log the file can be copied alone and read from a read-only disk. SQLite refuses this
            # while the file is being read; nothing is lost by that.
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
            with contextlib.suppress(OSError):
                total += os.stat(f"{self.path}{suffix}").st_size
        return total

    def _try_open(self) -> bool:
        if self._connection is not None:
            return True
        try:
            self._open()
        except (sqlite3.Error, OSError, RecordingError) as error:
            self._fail(error)
            return False
        return True

    def _open(self) -> None:
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=1.0)
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        self._watch = RemovalWatch(self.path)
        self._checkpointer = Checkpointer(self.path)
        self._checkpointer.start()

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA page_size=8192")
        known = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] > 0
        if not known:
            # Nothing can be lost yet, and a busy disk would delay the hub's start: the first checkpoint follows soon.
            connection.execute("PRAGMA synchronous=OFF")
            # Set before there is a write-ahead log: the file must identify itself even if the log is lost.
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            connection.execute("BEGIN IMMEDIATE")
            for statement in STATEMENTS:
                connection.execute(statement)
            self._put(connection, **_describe(self._run))
            connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA wal_autocheckpoint=0")
        if known and not self._resumed:
            self._resume(connection)
        self._resumed = True
        if self._carried is not None:
            self._carried.insert(connection)
            self.notice = f"{self.path} was removed; a new one was begun, without {self._carried.left} earlier messages"
            self._carried = None
        process = this_process()
        self._put(connection, writer_pid=process.pid, writer_start_ticks=process.start_ticks, closed="")
        # In WAL mode NORMAL keeps the file consistent through a machine crash; the checkpointer makes it durable.
        connection.execute("PRAGMA synchronous=NORMAL")

    def _begin_anew(self, connection: sqlite3.Connection) -> None:
        if self._carried is None:
            self._carried = carry_over(connection)
        self._end_checkpointer()
        self._connection = None
        # Closed before the new file is made: the last connection to the old one removes a log by its name.
        connection.close()
        remove_logs(self.path)
        self._try_open()

    def _resume(self, connection: sqlite3.Connection) -> None:
        """Continue where an earlier writer of this file ended."""
        if self.last_seq:
            # The file could not be opened at first: rows of this writer are waiting, numbered far above the file's.
            earlier = Rollups(self._writing.rows["rollups"].append)
            earlier.load(connection)
            earlier.flush()
            Curves(self._writing.rows["curves"].append).load(connection)
            return
        meta = dict(connection.execute("SELECT key, value FROM meta"))
        highest = [connection.execute(f"SELECT max(seq) FROM {table}").fetchone()[0] or 0 for table in STREAM_TABLES]
        self.last_seq = max(*highest, int(meta.get("last_seq") or 0))
        # Heartbeats are numbered and not recorded: the last number assigned is unknown, so continue far above it.
        self.next_seq = self.last_seq + RESTART_LEAP
        self.agent_numbers = {
            key.removeprefix(_AGENT): int(value) for key, value in meta.items() if key.startswith(_AGENT)
        }
        with contextlib.suppress(KeyError, ValueError, AttributeError):
            self.received = {str(sender): int(number) for sender, number in json.loads(meta[_RECEIVED]).items()}
        self._second = connection.execute("SELECT max(second) FROM clock").fetchone()[0] or 0
        self._names.load(connection)
        self._rollups.load(connection)
        self._curves.load(connection)
        self._marks.load(connection)

    def _put_row(self, table: str, row: Row) -> None:
        self._pending.rows[table].append(row)

    def _add_step(self, seq: int, t: float, step: Step) -> None:
        rows = self._pending.rows
        row, extra = step_rows(seq, t, step)
        rows["steps"].append(row)
        if extra:
            rows["extra_phases"] += extra
        if step.updates:
            rows["updates"] += update_rows(seq, t, step)
        self._rollups.add(row)
        figures = figures_of(step, t)
        training = training_row(seq, step, figures[2], self._peaks.get(step.rank))
        if training is not None:
            self._put_row("training_steps", training)
        self._curves.add(seq, step.rank, figures)
        self._marks.step(seq, step)

    def _add(self, seq: int, t: float, message: Message) -> None:
        rows = self._pending.rows
        if isinstance(message, Step):
            self._add_step(seq, t, message)
        elif isinstance(message, DeviceSample):
            rows["device_samples"].append(self._names.sample_row(seq, t, message, self._put_row))
        elif isinstance(message, LogLine):
            rows["logs"].append((seq, t, message.rank, message.time, message.stream, message.text))
        elif isinstance(message, Alert):
            rows["alerts"].append(alert_row(seq, t, message))
        elif isinstance(message, Hello):
            rows["ranks"].append(hello_row(seq, t, message))
            self._peaks[message.rank] = peak_flops(message.device.name, message.matmul_precision)
        elif isinstance(message, Job):
            rows["jobs"].append(job_row(seq, t, message))
            self._marks.job(message)
        else:
            rows["events"].append(event_row(seq, t, message))
            if isinstance(message, Closing):
                rows["extra_phases"] += closing_rows(seq, t, message)
            elif isinstance(message, Evaluation):
                without_metrics = astuple(message)[:-1]
                rows["evaluations"].append((seq, t, *without_metrics, finite(message.loss)))
            elif isinstance(message, Checkpoint):
                rows["checkpoints"].append((seq, t, *astuple(message)))
            self._marks.message(seq, message)

    def _write(self) -> None:
        connection, batch = self._connection, self._writing
        assert connection is not None
        connection.execute("BEGIN IMMEDIATE")
        unfit = batch.insert(connection)
        if batch.gap is not None:
            connection.execute("INSERT INTO gaps(first_t, last_t, messages, reason) VALUES (?, ?, ?, ?)", batch.gap)
        numbers: dict[str, Any] = {f"{_AGENT}{sender}": number for sender, number in batch.agent_numbers.items()}
        if batch.received:
            numbers[_RECEIVED] = json.dumps(batch.received)
        self._put(connection, last_seq=batch.last_seq, **numbers)
        connection.execute("COMMIT")
        self.recorded += batch.held - unfit
        self._lost += batch.lost + unfit
        self.error = ""
        self._writing = Batch()
        if self._checkpointer is not None:
            self._checkpointer.poke()

    def _put(self, connection: sqlite3.Connection, **values: Any) -> None:
        connection.executemany(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)", [(key, str(value)) for key, value in values.items()]
        )

    def _fail(self, error: Exception) -> None:
        full = (
            getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL or getattr(error, "errno", 0) == errno.ENOSPC
        )
        reason = "the disk is full; free space there and" if full else f"{error};"
        self.error = f"{self.path}: {reason} recording resumes by itself"
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
