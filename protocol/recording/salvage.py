"""Reads what is left of a damaged recording into a new file.

Tables keyed by ``seq`` only grow at their end, so a file cut short has lost their newest rows and the rest can be read
in order of ``seq``. Indexes, pooled rows and marks are made anew; they are spread over the whole file and cannot be
trusted.
"""

import contextlib
import os
import shutil
import sqlite3
from pathlib import Path

from ..errors import RecordingError
from .marks import INSERT_EXPLAINED, INSERT_MARK, Marks
from .rollup import INSERT_ROLLUP, Rollups
from .rows import Row, unpack_body
from .schema import APPLICATION_ID, SCHEMA_VERSION, STATEMENTS
from .steprow import step_from_row

_KEYED_TABLES = (
    "steps",
    "device_samples",
    "device_names",
    "process_names",
    "alerts",
    "logs",
    "ranks",
    "events",
    "clock",
    "gaps",
)
_OTHER_TABLES = ("meta", "extra_phases")
_CHUNK = 16_384
_MARKED_STEPS = 200_000
"""Steps that are looked through for marks: some 4 s; of a longer recording the later marks are missing."""


def salvage(path: Path, page_bytes: int, scratch: Path) -> sqlite3.Connection:
    """Copy every row that can be read from ``path`` into a new recording in the folder ``scratch``; return it, open.

    Raises:
        sqlite3.Error: not even the list of tables can be read.
        OSError: there is no room for the copy.
    """
    torn = _copy_whole_pages(path, page_bytes, scratch)
    connection = sqlite3.connect(scratch / "salvaged.sqlite", check_same_thread=False, isolation_level=None)
    try:
        # A statement that meets a damaged page is rolled back, so there must be a journal.
        connection.execute("PRAGMA journal_mode=MEMORY")
        connection.execute("PRAGMA synchronous=OFF")
        for statement in STATEMENTS:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        # A file shorter than its header says is refused, unless this is set (lockBtree in SQLite's btree.c).
        connection.execute("PRAGMA writable_schema=ON")
        connection.execute("PRAGMA cell_size_check=ON")
        connection.execute("ATTACH ? AS torn", (str(torn),))
        if not connection.execute("SELECT count(*) FROM torn.sqlite_schema WHERE type = 'table'").fetchone()[0]:
            raise sqlite3.DatabaseError("it has no tables")
        for table in _KEYED_TABLES:
            _copy_keyed(connection, table)
        for table in _OTHER_TABLES:
            _copy_other(connection, table)
        connection.execute("DETACH torn")
        connection.execute("PRAGMA writable_schema=OFF")
        connection.execute("BEGIN")
        _pool_again(connection)
        _mark_again(connection)
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    torn.unlink()
    return connection


def _copy_whole_pages(path: Path, page_bytes: int, scratch: Path) -> Path:
    """Copy the file without its last, torn page: SQLite would fill it up with zeros and read rows of nothing."""
    torn = scratch / "torn.sqlite"
    shutil.copyfile(path, torn)
    os.truncate(torn, path.stat().st_size // page_bytes * page_bytes)
    log = Path(f"{path}-wal")
    if log.exists():
        shutil.copyfile(log, scratch / "torn.sqlite-wal")
    return torn


def _columns(connection: sqlite3.Connection, table: str) -> str:
    """Name the columns that both files have: a recording may have more, or lack some, than this version knows."""
    known = [row[1] for row in connection.execute(f"PRAGMA main.table_info({table})")]
    there = {row[1] for row in connection.execute(f"PRAGMA torn.table_info({table})")}
    return ", ".join(f'"{name}"' for name in known if name in there)


def _copy_keyed(connection: sqlite3.Connection, table: str) -> None:
    columns = _columns(connection, table)
    if not columns:
        return
    copy = (
        f"INSERT INTO main.{table}({columns}) SELECT {columns} FROM torn.{table} WHERE rowid > ? ORDER BY rowid LIMIT ?"
    )
    newest = f"SELECT max(rowid) FROM main.{table}"
    at, limit = -(1 << 62), _CHUNK
    while True:
        try:
            connection.execute(copy, (at, limit))
        except sqlite3.DatabaseError:
            if limit > 1:
                limit //= 2
                continue
            ahead = _next_readable(connection, table, at)
            if ahead is None:
                return
            at = ahead - 1
            continue
        last = connection.execute(newest).fetchone()[0]
        if last is None or last <= at:
            return
        at = last
        limit = min(limit * 2, _CHUNK)


def _next_readable(connection: sqlite3.Connection, table: str, after: int) -> int | None:
    """Find a row beyond a hole, by leaps that double; None when the rest cannot be read either."""
    for power in range(48):
        beyond = max(after, 0) + (1 << power)
        try:
            query = f"SELECT rowid FROM torn.{table} WHERE rowid > ? ORDER BY rowid LIMIT 1"
            found = connection.execute(query, (beyond,)).fetchone()
        except sqlite3.DatabaseError:
            continue
        return found[0] if found else None
    return None


def _copy_other(connection: sqlite3.Connection, table: str) -> None:
    columns = _columns(connection, table)
    if not columns:
        return
    insert = f"INSERT INTO main.{table}({columns}) VALUES ({', '.join('?' * (columns.count(',') + 1))})"
    try:
        for row in connection.execute(f"SELECT {columns} FROM torn.{table}"):
            connection.execute(insert, row)
    except sqlite3.DatabaseError:
        return


def _pool_again(connection: sqlite3.Connection) -> None:
    pooled: list[Row] = []
    rollups = Rollups(pooled.append)
    for row in connection.execute("SELECT * FROM main.steps ORDER BY seq"):
        rollups.add(row)
    connection.executemany(INSERT_ROLLUP, pooled)


def _mark_again(connection: sqlite3.Connection) -> None:
    found: dict[str, list[Row]] = {"marks": [], "explained": []}
    marks = Marks(lambda table, row: found[table].append(row))
    query = "SELECT * FROM main.steps ORDER BY seq LIMIT ?"
    for row in connection.execute(query, (_MARKED_STEPS,)):
        with contextlib.suppress(RecordingError):
            marks.step(row[0], step_from_row(row))
    query = "SELECT seq, body FROM main.events WHERE type IN ('composition', 'cause') ORDER BY seq"
    for seq, body in connection.execute(query):
        with contextlib.suppress(RecordingError):
            message = unpack_body(body)
            if message is not None:
                marks.message(seq, message)
    connection.executemany(INSERT_MARK, found["marks"])
    connection.executemany(INSERT_EXPLAINED, found["explained"])
