"""Handles a recording that is removed while it is written: the messages that explain the run are copied to a new one.

The removed file stays readable for the writer that has it open. Steps, samples and log lines, which are most of it, are
left out and counted; ranks, alerts, names and the latest event of each kind and rank are copied, so that the new file
alone gives the run's current state.
"""

import contextlib
import os
import sqlite3
import time
from dataclasses import dataclass, field
from pathlib import Path

from .batch import INSERTS
from .rows import Row
from .schema import STREAM_TABLES

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
        if _identity(self._path) == self._identity or not self._directory_stays():
            self._missed_at = None
            return False
        self._missed_at = now if self._missed_at is None else self._missed_at
        return now - self._missed_at >= SETTLE_S

    def _directory_stays(self) -> bool:
        return self._beside.exists() if self._has_run else self._path.parent.is_dir()


@dataclass
class CarriedOver:
    """Rows copied out of a removed recording."""

    rows: dict[str, list[Row]] = field(default_factory=dict[str, list[Row]])
    meta: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    left: int = 0
    """Messages left out."""
    first_t: float = 0.0
    """When the hub received the first message that was recorded, seconds since the epoch."""

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
