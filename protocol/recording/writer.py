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
import time
from pathlib import Path
from typing import Any

import msgspec

from ..errors import RecordingError
from ..host.process import this_process
from ..messages.control import Alert, Answer, Query
from ..messages.jobs import Job
from ..messages.telemetry import Checkpoint, Closing, DeviceSample, Evaluation, Heartbeat, Hello, LogLine, Step
from ..messages.throughput import peak_flops
from ..messages.wire import RESTART_LEAP, VERSION, Message
from ..run.rundir import RunFile
from .batch import Batch
from .checkpoint import Checkpointer
from .curves import Curves, checkpoint_row, evaluation_row, figures_of, training_row
from .jobs import job_row
from .marks import Marks
from .opening import is_cut_short, is_damage, read_header
from .removed import CarriedOver, RemovalWatch, carry_over, remove_logs
from .rollup import Rollups
from .rows import NameNumbers, Row, alert_row, event_row, hello_row, log_row
from .schema import APPLICATION_ID, SCHEMA_VERSION, STATEMENTS, STREAM_TABLES
from .steprow import closing_rows, step_rows, update_rows

RETRY_S = 2.0
"""Seconds between a failed write and the next attempt."""

_RECEIVED = "heard"
"""Key of ``meta`` with the numbers of ``note_received``, as a JSON object."""

_AGENT = "taken:"
"""Prefix of the keys of ``meta`` with the numbers of ``note_agent_numbers``."""

_BATCH = 64
"""Maximum number of steps in a batch; more exceed the processor's cache."""

_UNFIT = (OverflowError, TypeError, ValueError, msgspec.MsgspecError)
_WHY_UNFIT = "figures that fit no column"

_NOT_RECORDED = frozenset((Heartbeat, Query, Answer))


def _describe(run: RunFile | None) -> dict[str, Any]:
    """Return the rows of ``meta`` that identify the run."""
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

    Args:
        path: the file.
        run: the run; kept in ``meta`` so that the file is self-contained.

    Raises:
        RecordingError: the file exists and is damaged, or is not a recording this version can continue.
    """

    def __init__(self, path: str | os.PathLike[str], run: RunFile | None = None) -> None:
        self.path = Path(path)
        self.error = ""
        """Why nothing can be written at the moment, in one line; empty: no error."""
        self.notice = ""
        """Text to show about the file, such as its replacement after a removal; empty: none."""
        self.recorded = 0
        """Messages written by this writer."""
        self.last_seq = 0
        """Highest stream number recorded or appended."""
        self.next_seq = 1
        """Sequence number with which a hub that opens this recording continues."""
        self.agent_numbers: dict[str, int] = {}
        """The numbers that an earlier writer of this file recorded by ``note_agent_numbers``."""
        self.received: dict[str, int] | None = None
        """The numbers that an earlier writer of this file recorded by ``note_received``; None: no earlier writer."""
        self._run = run
        self._connection: sqlite3.Connection | None = None
        self._watch: RemovalWatch | None = None
        self._checkpointer: Checkpointer | None = None
        self._carried: CarriedOver | None = None
        """Rows of a removed file for the new one, until that is made."""
        self._pending = Batch()
        self._writing = Batch()
        """The batch that is being written."""
        self._lost = 0
        """Number of lost messages that are already recorded."""
        self._steps: list[tuple[int, float, Step]] = []
        """Steps collected for ``_add_steps``."""
        self._names = NameNumbers()
        self._rollups = Rollups(lambda row: self._put_row("rollups", row))
        self._curves = Curves(lambda row: self._put_row("curves", row))
        self._peaks: dict[int, float | None] = {}
        """Data-sheet peak of each rank's device, FLOP/s; None: unknown."""
        self._marks = Marks(self._put_row)
        self._received: dict[str, int] = {}
        """The last argument of ``note_received``."""
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
        """Add one message of the stream; it is on disk after the next ``commit``.

        Args:
            seq: its number in the hub's stream, higher than all before.
            t: when the hub received it, seconds since the epoch.
            message: heartbeats, queries and answers are numbered but not recorded.
        """
        self.last_seq = seq
        if type(message) in _NOT_RECORDED:
            return
        if t >= self._second + 1:
            self._second = int(t)
            self._put_row("clock", (self._second, seq))
        if type(message) is Step:
            self._steps.append((seq, t, message))
            if len(self._steps) >= _BATCH:
                self._add_steps()
            return
        self._add_steps()
        try:
            self._add(seq, t, message)
        except _UNFIT:
            self._pending.lose(1, t, t, _WHY_UNFIT)
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
        self._add_steps()
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
            try:
                total += os.stat(f"{self.path}{suffix}").st_size
            except OSError:
                continue
        return total

    def _try_open(self) -> bool:
        """Open or create the recording unless it is open; return whether it is open."""
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
        """Close a removed file, and begin a new one in its place."""
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

    def _add_steps(self) -> None:
        """Add the rows of the collected steps, table by table.

        Each stage processes the whole batch before the next stage does, so that its code and state stay in the
        processor's cache.
        """
        steps, self._steps = self._steps, []
        for add in (self._add_columns, self._add_figures, self._add_marks):
            fit: list[tuple[int, float, Step]] = []
            for one in steps:
                try:
                    add(*one)
                except _UNFIT:
                    self._pending.lose(1, one[1], one[1], _WHY_UNFIT)
                else:
                    fit.append(one)
            steps = fit
        self._pending.held += len(steps)

    def _add_columns(self, seq: int, t: float, step: Step) -> None:
        rows = self._pending.rows
        row, extra = step_rows(seq, t, step)
        rows["steps"].append(row)
        if extra:
            rows["extra_phases"] += extra
        if step.updates:
            rows["updates"] += update_rows(seq, t, step)
        self._rollups.add(row)

    def _add_figures(self, seq: int, t: float, step: Step) -> None:
        figures = figures_of(step, t)
        training = training_row(seq, step, figures[2], self._peaks.get(step.rank))
        if training is not None:
            self._put_row("training_steps", training)
        self._curves.add(seq, step.rank, figures)

    def _add_marks(self, seq: int, _t: float, step: Step) -> None:
        self._marks.step(seq, step)

    def _add(self, seq: int, t: float, message: Message) -> None:
        rows = self._pending.rows
        if isinstance(message, DeviceSample):
            rows["device_samples"].append(self._names.sample_row(seq, t, message, self._put_row))
        elif isinstance(message, LogLine):
            rows["logs"].append(log_row(seq, t, message))
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
                rows["evaluations"].append(evaluation_row(seq, t, message))
            elif isinstance(message, Checkpoint):
                rows["checkpoints"].append(checkpoint_row(seq, t, message))
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
        self.error = f"{self.path}: not recording: {reason} recording resumes by itself"
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
