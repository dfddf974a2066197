"""Checks that a file's tables are those of the schema: real tables with its columns, none of them generated.

A view, a virtual table or a generated column of the same name would run its author's code whenever it is read. The
expected tables are those that SQLite creates from ``schema.STATEMENTS``, so there is no second list.
"""

import sqlite3
from functools import cache
from typing import NamedTuple

from ..errors import RecordingError
from .schema import STATEMENTS


class Column(NamedTuple):
    """One column as SQLite parsed it; ``hidden`` is not 0 if it is generated or of a virtual table."""

    name: str
    type: str
    key: int
    hidden: int


def quoted(name: str) -> str:
    """Return a name quoted for SQL."""
    return '"' + name.replace('"', '""') + '"'


def columns_of(connection: sqlite3.Connection, table: str) -> tuple[Column, ...]:
    """Return the columns of a table or view; empty if it does not exist."""
    found = connection.execute(f"PRAGMA table_xinfo({quoted(table)})").fetchall()
    return tuple(Column(name, kind.upper(), key, hidden) for _, name, kind, _, _, key, hidden in found)


@cache
def expected_tables() -> dict[str, tuple[Column, ...]]:
    """Return the schema's tables by name."""
    with _empty() as connection:
        names = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        return {name: columns_of(connection, name) for (name,) in names}


@cache
def _expected_views() -> dict[str, str]:
    with _empty() as connection:
        return dict(connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'view'").fetchall())


def _empty() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    for statement in STATEMENTS:
        connection.execute(statement)
    return connection


def kinds_of(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the kind of each table and view of the file, by name: ``table``, ``view``, ``virtual`` or ``shadow``.

    SQLite finds the kind by parsing the statement; the ``type`` column may hold any text. Before SQLite 3.37 the kind
    is derived from the statement here.
    """
    if sqlite3.sqlite_version_info >= (3, 37):
        rows = connection.execute("PRAGMA main.table_list").fetchall()
        return {row[1]: row[2] for row in rows if row[0] == "main"}
    rows = connection.execute("SELECT name, sql FROM main.sqlite_schema WHERE sql IS NOT NULL").fetchall()
    return {name: "table" if str(sql)[:13].upper() == "CREATE TABLE " else "view" for name, sql in rows}


def check_no_code(connection: sqlite3.Connection) -> None:
    """Refuse triggers and virtual tables, which run code when a copy of the file is changed; for any schema version.

    Raises:
        RecordingError: the file has some. The text does not name the file.
    """
    (triggers,) = connection.execute("SELECT count(*) FROM sqlite_schema WHERE type = 'trigger'").fetchone()
    if triggers:
        raise RecordingError("refused: it has triggers, which no recording has")
    virtual = [name for name, kind in kinds_of(connection).items() if kind in ("virtual", "shadow")]
    if virtual:
        raise RecordingError(f"refused: {virtual[0][:80]!r} is a virtual table, which no recording has")


def check_shape(connection: sqlite3.Connection, *, views: bool = True) -> None:
    """Check the tables of a file of this version's schema; missing tables are accepted, the file may be damaged.

    Args:
        connection: to the file.
        views: check the recording's own views too. Nothing here reads them; those of an older schema differ.

    Raises:
        RecordingError: one is not a table, lacks columns of the schema, or has a generated one. The text does not name
            the file.
    """
    check_no_code(connection)
    kinds = kinds_of(connection)
    for table, expected in expected_tables().items():
        if table not in kinds:
            continue
        if kinds[table] != "table":
            raise RecordingError(f"refused: {table!r} in it is a {kinds[table]}, not a table")
        reason = mismatch(expected, columns_of(connection, table))
        if reason:
            raise RecordingError(f"refused: its table {table!r} does not belong to a recording: {reason}")
    for view, expected_sql in _expected_views().items() if views else ():
        if view not in kinds:
            continue
        row = connection.execute("SELECT sql FROM sqlite_schema WHERE name = ? LIMIT 1", (view,)).fetchone()
        if kinds[view] != "view" or row is None or row[0] != expected_sql:
            raise RecordingError(f"refused: its view {view!r} is not the recording's own")


def mismatch(expected: tuple[Column, ...], found: tuple[Column, ...]) -> str:
    """Return how columns differ from the expected ones; empty if they match. Later versions may append columns."""
    if any(column.hidden for column in found):
        return "it has a generated column"
    for wanted, there in zip(expected, found, strict=False):
        if wanted != there:
            return f"column {there.name[:80]!r} is where {wanted.name!r} belongs"
    return f"column {expected[len(found)].name!r} is missing" if len(found) < len(expected) else ""
