"""Checks that a file's tables are those of its schema: real tables with its columns, none of them generated.

A view, a virtual table or a generated column of the same name would run its author's code whenever it is read. Other
views, triggers and virtual tables do not run: the file is never changed, and only these tables are read. The expected
tables are those that SQLite makes from the schema's statements, so there is no second list.
"""

import sqlite3
from functools import cache

from .schema import STATEMENTS, STATEMENTS_V1

Columns = list[tuple[str, str, int, int]]
"""Name, type, place in the primary key, and whether it is generated or of a virtual table, of each column."""


def _columns_of(connection: sqlite3.Connection, table: str) -> Columns:
    found = connection.execute(f"PRAGMA table_xinfo({table})")
    return [(name, kind.upper(), key, hidden) for _, name, kind, _, _, key, hidden in found]


@cache
def expected_tables(schema: int) -> dict[str, Columns]:
    """Return the tables of a schema by name."""
    connection = sqlite3.connect(":memory:")
    for statement in STATEMENTS_V1 if schema == 1 else STATEMENTS:
        connection.execute(statement)
    names = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
    return {name: _columns_of(connection, name) for (name,) in names}


def kinds_of(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the kind of each table and view of the file, by name: ``table``, ``view``, ``virtual`` or ``shadow``.

    SQLite parses the statement; the ``type`` column may hold any text. Before SQLite 3.37 the statement's begin counts.
    """
    if sqlite3.sqlite_version_info >= (3, 37):
        rows = connection.execute("PRAGMA main.table_list").fetchall()
        return {row[1]: row[2] for row in rows if row[0] == "main"}
    rows = connection.execute("SELECT name, sql FROM main.sqlite_schema WHERE sql IS NOT NULL").fetchall()
    return {name: "table" if str(sql)[:13].upper() == "CREATE TABLE " else "view" for name, sql in rows}


def table_problems(connection: sqlite3.Connection, schema: int) -> dict[str, str]:
    """Return why tables are not those of the schema, by name; ``""`` for missing ones: the file may be damaged."""
    kinds = kinds_of(connection)
    found: dict[str, str] = {}
    for table, expected in expected_tables(schema).items():
        kind = kinds.get(table, "")
        columns = _columns_of(connection, table) if kind == "table" else []
        if kind != "table":
            found[table] = kind and f"{table!r} in it is a {kind}, not a table"
        elif columns[: len(expected)] != expected or any(hidden for *_, hidden in columns):  # later ones may be added
            found[table] = f"its table {table!r} has other columns than a recording's"
    return found
