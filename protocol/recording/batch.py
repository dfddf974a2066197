"""Rows to be written to a recording: kept while the disk cannot be written, and thinned out above a limit."""

import sqlite3
from itertools import chain

from .rows import Row
from .schema import SCHEMA_VERSION, STREAM_TABLES
from .shape import expected_tables

PENDING_LIMIT = 20_000
"""Messages kept while the disk cannot be written (some 40 MB); beyond, steps, samples and log lines are dropped."""

_EVENTS_KEPT = 5_000
"""Limit on the states and other events that are kept beyond ``PENDING_LIMIT``."""

_ROWS_A_STATEMENT = 200
"""Rows inserted per statement."""

_BULKY = ("steps", "device_samples", "logs")
_NAMES = ("device_names", "process_names")
INSERTS = {
    table: f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(columns))})"
    for table, columns in expected_tables(SCHEMA_VERSION).items()
} | {"clock": "INSERT OR IGNORE INTO clock VALUES (?, ?)"}
"""The statement that inserts a row, by table."""

_UNFIT = (OverflowError, ValueError, sqlite3.ProgrammingError, sqlite3.InterfaceError)
"""SQLite's errors for a value that no column can hold."""


class Batch:
    """Rows by table, the number of their messages, and the number of messages that were lost before."""

    __slots__ = ("agent_numbers", "gap", "held", "last_seq", "received", "rows")

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = {table: [] for table in INSERTS}
        self.held = 0
        """Messages whose rows are here."""
        self.last_seq = 0
        """Highest message number in the stream when the batch was taken."""
        self.agent_numbers: dict[str, int] = {}
        """Highest sequence number recorded per agent; agents resend until it is confirmed."""
        self.received: dict[str, int] = {}
        """Highest sequence number received from each rank; empty: none since the last batch."""
        self.gap: tuple[float, float, int, str] | None = None
        """Messages lost: when the hub received the first and the last, their number, and the reason."""

    def __bool__(self) -> bool:
        """Return whether there is anything to write."""
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
        """Record that messages were lost.

        Args:
            count: their number.
            first_t: when the hub received the first of them, seconds since the epoch.
            last_t: when it received the last.
            reason: the reason, as text.
        """
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
        self.rows["extra_phases"].clear()
        self.rows["updates"].clear()
        self.rows["training_steps"].clear()
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
        """Insert all rows; return the number of messages skipped because no column can hold their (invalid) values.

        Raises:
            sqlite3.Error: they could not be written.
        """
        return sum(_insert(connection, table, rows) for table, rows in self.rows.items() if rows)


def _insert(connection: sqlite3.Connection, table: str, rows: list[Row]) -> int:
    connection.execute("SAVEPOINT rows")
    try:
        _insert_many(connection, INSERTS[table], rows)
    except _UNFIT:
        connection.execute("ROLLBACK TO rows")
    else:
        connection.execute("RELEASE rows")
        return 0
    connection.execute("RELEASE rows")
    lost = 0
    for row in rows:
        try:
            connection.execute(INSERTS[table], row)
        except _UNFIT:
            lost += table in STREAM_TABLES
    return lost


def _insert_many(connection: sqlite3.Connection, statement: str, rows: list[Row]) -> None:
    """Insert rows, many per statement: sqlite3 releases and reacquires the GIL for each statement."""
    whole = len(rows) - len(rows) % _ROWS_A_STATEMENT
    if whole:
        values = statement[statement.index("(") :]
        many = statement + f", {values}" * (_ROWS_A_STATEMENT - 1)
        for first in range(0, whole, _ROWS_A_STATEMENT):
            connection.execute(many, list(chain.from_iterable(rows[first : first + _ROWS_A_STATEMENT])))
    connection.executemany(statement, rows[whole:])
