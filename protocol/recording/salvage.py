"""Copies the readable rows of a damaged recording into a new file.

Tables keyed by ``seq`` only grow at their end, so a truncated file has lost their newest rows and the rest can be read
in order of ``seq``. Indexes, pooled rows and marks are rebuilt; they are spread over the whole file and cannot be
trusted. Rows with values that no message can have are left out.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import RecordingError
from ..messages.bounds import LAST_TIME, MAX_RANKS
from ..messages.telemetry import Step
from .curves import INSERT_CURVE, Curves
from .extents import copy_data
from .guard import Guard
from .marks import INSERT_EXPLAINED, INSERT_MARK, Marks
from .rollup import INSERT_ROLLUP, Rollups
from .rows import NO_RANK, UNBELIEVABLE, Row, believed, unpack_body
from .schema import APPLICATION_ID, SCHEMA_VERSION, STATEMENTS
from .shape import Column, columns_of, expected_tables, kinds_of, quoted
from .steprow import step_from_row

DERIVED_TABLES = ("rollups", "curves", "marks", "explained")
"""Tables rebuilt from the stream."""

BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("t", "time", "started", "first_t", "last_t"), (0.0, LAST_TIME)),
    **dict.fromkeys(("seq", "second", "device", "process", "id"), (0, 1 << 62)),
    "rank": (NO_RANK, MAX_RANKS - 1),
}
"""Inclusive bounds of the columns of these names, in every table."""

_KINDS: dict[str, tuple[type, ...]] = {"INTEGER": (int,), "REAL": (float, int), "TEXT": (str,), "BLOB": (bytes,)}
_LOWEST, _HIGHEST = -(1 << 62), 1 << 62
_LEAST_ROW_BYTES = 3
_SPARE_ROWS = 10_000
_AMPLIFICATION = 2
_SPARE_BYTES = 16 * 2**20
"""Limits on what is copied, by the file's size: an undamaged file has each row and each byte once."""

_MOST_HOLES = 2_000
_MARKED_STEPS = 200_000
"""Steps that are searched for marks, about 4 s; a longer recording lacks the later marks."""


def salvage(path: Path, page_bytes: int, scratch: Path, guard: Guard) -> tuple[sqlite3.Connection, str]:
    """Copy every row that can be read from ``path`` into a new recording in the folder ``scratch``.

    Pages of a damaged file may refer back to pages that were read before, so rows, bytes and processor time are
    bounded by the file's size.

    Returns:
        The new recording, open, and why copying stopped early; empty if it did not.

    Raises:
        sqlite3.Error: not even the list of tables can be read.
        OSError: no disk space for the copy.
    """
    torn_path = _copy_whole_pages(path, page_bytes, scratch)
    connection = sqlite3.connect(scratch / "salvaged.sqlite", check_same_thread=False, isolation_level=None)
    torn = sqlite3.connect(torn_path, isolation_level=None)
    guard.begin()
    try:
        connection.execute("PRAGMA journal_mode=OFF")
        connection.execute("PRAGMA synchronous=OFF")
        for statement in STATEMENTS:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        torn.execute("PRAGMA writable_schema=ON")
        guard.harden(torn, torn=True)
        given_up = _copy_tables(torn, connection, guard)
        connection.execute("BEGIN")
        _pool_again(connection, guard)
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    finally:
        torn.close()
    torn_path.unlink()
    return guard.harden(connection), given_up


def _copy_whole_pages(path: Path, page_bytes: int, scratch: Path) -> Path:
    """Copy the file without its last, torn page: SQLite would pad it with zeros and read invalid rows."""
    torn = scratch / "torn.sqlite"
    copy_data(path, torn)
    os.truncate(torn, path.stat().st_size // page_bytes * page_bytes)
    log = Path(f"{path}-wal")
    if log.exists():
        copy_data(log, scratch / "torn.sqlite-wal")
    return torn


def _copy_tables(torn: sqlite3.Connection, whole: sqlite3.Connection, guard: Guard) -> str:
    """Copy all tables; return why copying stopped early, empty if it did not."""
    kinds = kinds_of(torn)
    if "table" not in kinds.values():
        raise sqlite3.DatabaseError("it has no tables")
    reading = _Reading(torn, whole, guard)
    try:
        for table, expected in expected_tables().items():
            if table in DERIVED_TABLES or kinds.get(table) != "table":
                continue
            there = columns_of(torn, table)
            # A recording may have more columns, or lack some. A generated column runs code of the file's author.
            names = [column.name for column in expected if column in there]
            keys = [column.name for column in expected if column.key]
            if any(column.hidden for column in there) or not set(keys) <= set(names):
                continue
            reading.copy(table, [column for column in expected if column.name in names], by_rowid=len(keys) == 1)
    except _Enough as reason:
        return str(reason)
    return ""


class _Enough(Exception):  # noqa: N818 - no error: what was copied so far is kept
    """The file yields more rows or bytes than its size justifies."""


class _Reading:
    """Copies tables row by row, as far as the file is readable and its size justifies."""

    def __init__(self, torn: sqlite3.Connection, whole: sqlite3.Connection, guard: Guard) -> None:
        self._torn, self._whole, self._guard = torn, whole, guard
        self._rows_left = guard.file_bytes // _LEAST_ROW_BYTES + _SPARE_ROWS
        self._bytes_left = _AMPLIFICATION * guard.file_bytes + _SPARE_BYTES

    def copy(self, table: str, columns: list[Column], *, by_rowid: bool) -> None:
        """Copy one table; a table with numbered rows is also copied beyond damaged pages."""
        self._highest = _LOWEST
        names = ", ".join(quoted(column.name) for column in columns)
        number = "rowid" if by_rowid and columns[0].type == "INTEGER" else "NULL"
        query = f"SELECT {number}, {names} FROM {quoted(table)}"
        insert = f"INSERT OR IGNORE INTO {quoted(table)}({names}) VALUES ({', '.join('?' * len(columns))})"
        where, bind = "", ()
        for _ in range(_MOST_HOLES):
            try:
                rows = self._torn.execute(query + where, bind)
                self._whole.execute("BEGIN")
                try:
                    self._whole.executemany(insert, self._sound(rows, columns))
                finally:
                    self._whole.execute("COMMIT")
                return
            except (sqlite3.Error, UnicodeDecodeError) as error:
                refined = self._guard.refine(error) if isinstance(error, sqlite3.Error) else error
                if isinstance(refined, RecordingError):
                    raise _Enough("reading was given up when it took longer than the file's size justifies") from None
                if refined is not error:
                    raise refined from None
            ahead = None if number == "NULL" else self._next_readable(table)
            if ahead is None:
                return
            where, bind = " WHERE rowid >= ? ORDER BY rowid", (ahead,)
            self._highest = ahead

    def _sound(self, rows: Iterable[Row], columns: list[Column]) -> Iterator[Row]:
        """Yield the rows whose values match the columns' types and bounds."""
        known: dict[tuple[type, ...], bool] = {}
        bounds = [
            (place, BOUNDS[column.name])
            for place, column in enumerate(columns)
            if column.name in BOUNDS and column.type in ("INTEGER", "REAL")
        ]
        long = [place for place, column in enumerate(columns) if column.type in ("TEXT", "BLOB")]
        for number, *values in rows:
            self._rows_left -= 1
            self._bytes_left -= sum(len(values[place]) for place in long if values[place].__class__ in (str, bytes))
            if self._rows_left < 0 or self._bytes_left < 0:
                raise _Enough("reading was given up when there was more than the file's size justifies")
            if number.__class__ is int and number > self._highest:
                self._highest = number
            kinds = tuple(map(type, values))
            sound = known.get(kinds)
            if sound is None:
                sound = known[kinds] = all(map(_fits, kinds, columns))
            if sound and all(
                low <= values[place] <= high for place, (low, high) in bounds if values[place] is not None
            ):
                yield tuple(values)

    def _next_readable(self, table: str) -> int | None:
        """Return a row beyond unreadable pages, searched at doubling distances; None if the rest is unreadable too."""
        after = self._highest
        for power in range(60):
            beyond = max(after, 0) + (1 << power)
            if beyond > _HIGHEST:
                return None
            try:
                query = f"SELECT rowid FROM {quoted(table)} WHERE rowid > ? ORDER BY rowid LIMIT 1"
                found = self._torn.execute(query, (beyond,)).fetchone()
            except sqlite3.Error as error:
                if self._guard.refine(error) is not error:
                    raise
                continue
            except UnicodeDecodeError:
                continue
            if found is None:
                return None
            # Misplaced pages have row numbers that were passed already: going back could loop forever.
            if found[0] > beyond:
                return found[0]
        return None


def _fits(kind: type, column: Column) -> bool:
    if kind is type(None):
        return not column.key
    return kind in _KINDS.get(column.type, ())


def _pool_again(connection: sqlite3.Connection, guard: Guard) -> None:
    """Rebuild the pooled rows and marks from the steps; steps that no rank can have sent are deleted."""
    made: dict[str, list[Row]] = {"rollups": [], "marks": [], "explained": []}
    unsound: list[tuple[int]] = []
    rollups = Rollups(made["rollups"].append)
    marks = Marks(lambda table, row: made[table].append(row))
    for count, row in enumerate(connection.execute("SELECT * FROM steps ORDER BY seq")):
        if count % 64 == 0 and guard.late:
            break
        try:
            step = believed(step_from_row(row))
        except UNBELIEVABLE:
            unsound.append((row[0],))
            continue
        rollups.add(row)
        if count < _MARKED_STEPS and isinstance(step, Step):
            marks.step(row[0], step)
    query = "SELECT seq, body FROM events WHERE type IN ('composition', 'cause') ORDER BY seq"
    for seq, body in connection.execute(query):
        if guard.late:
            break
        with contextlib.suppress(*UNBELIEVABLE):
            message = unpack_body(body, guard.charge)
            if message is not None:
                marks.message(seq, message)
    connection.executemany("DELETE FROM steps WHERE seq = ?", unsound)
    connection.executemany(INSERT_ROLLUP, filter(_fit_columns, made["rollups"]))
    if not guard.late:
        curves: list[Row] = []
        Curves(curves.append).load(connection)
        connection.executemany(INSERT_CURVE, filter(_fit_columns, curves))
    connection.executemany(INSERT_MARK, filter(_fit_columns, made["marks"]))
    connection.executemany(INSERT_EXPLAINED, filter(_fit_columns, made["explained"]))


def _fit_columns(row: Row) -> bool:
    """Return whether every number of a row fits SQLite's 64 bits: a sum of steps may not."""
    return all(-(1 << 63) <= value < 1 << 63 for value in row if value.__class__ is int)
