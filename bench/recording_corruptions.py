"""Corruptions of a recording: damaged bytes and pages, hostile values, types and schemas, each drawn at random."""

import contextlib
import random
import sqlite3
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def corrupt(whole: bytes, path: Path, chance: random.Random) -> str:
    """Write one corruption of ``whole`` to ``path``; return what was done, its kind first."""
    kind = chance.choices(list(_KINDS), [weight for _, weight in _KINDS.values()])[0]
    make, _ = _KINDS[kind]
    try:
        return f"{kind} {make(whole, path, chance)}"
    except sqlite3.Error as error:  # SQLite itself would not have it: the file stays as it was made so far
        return f"{kind} ({error})"


def _page(whole: bytes) -> int:
    size = int.from_bytes(whole[16:18], "big")
    return 65_536 if size == 1 else size


def _flip(whole: bytes, path: Path, chance: random.Random) -> str:
    broken = bytearray(whole)
    count = chance.choice((1, 1, 2, 8, 64, 512))
    low, high = chance.choice(((0, len(whole)), (0, 100), (0, _page(whole)), (100, min(len(whole), 40_000))))
    for _ in range(count):
        at = chance.randrange(low, high)
        broken[at] = chance.choice((0, 255, broken[at] ^ (1 << chance.randrange(8)), chance.randrange(256)))
    broken[:16] = whole[:16]
    broken[68:72] = whole[68:72]
    path.write_bytes(broken)
    return f"{count} bytes in {low}-{high}"


def _cut(whole: bytes, path: Path, chance: random.Random) -> str:
    at = chance.choice((chance.randrange(len(whole)), chance.randrange(0, 200), _page(whole) * chance.randrange(1, 9)))
    path.write_bytes(whole[:at])
    return f"at {at}"


def _shift(whole: bytes, path: Path, chance: random.Random) -> str:
    at = chance.randrange(100, len(whole))
    size = chance.choice((1, 7, 512, _page(whole), 3 * _page(whole)))
    if chance.random() < 0.5:
        path.write_bytes(whole[:at] + whole[at + size :])
        return f"{size} bytes left out at {at}"
    path.write_bytes(whole[:at] + chance.randbytes(size) + whole[at:])
    return f"{size} bytes put in at {at}"


def _pages(whole: bytes, path: Path, chance: random.Random) -> str:
    size = _page(whole)
    broken = bytearray(whole)
    pages = len(whole) // size
    for _ in range(chance.choice((1, 2, 8))):
        one, other = chance.randrange(1, pages) * size, chance.randrange(1, pages) * size
        how = chance.randrange(4)
        if how == 0:
            broken[one : one + size], broken[other : other + size] = (
                broken[other : other + size], broken[one : one + size],
            )  # fmt: skip
        elif how == 1:
            broken[one : one + size] = broken[other : other + size]
        elif how == 2:
            broken[one : one + size] = bytes(size)
        else:
            broken[one : one + size] = chance.randbytes(size)
    path.write_bytes(broken)
    return "swapped, repeated, zeroed or random"


def _cycles(whole: bytes, path: Path, chance: random.Random) -> str:
    """Turn leaves into interior pages whose children are any pages, so that a walk finds itself again."""
    size = _page(whole)
    broken = bytearray(whole)
    pages = len(whole) // size
    for _ in range(chance.choice((1, 2, 4))):
        at = chance.randrange(1, pages) * size
        kind = broken[at]
        if kind in (5, 2):
            cells = int.from_bytes(broken[at + 3 : at + 5], "big")
            for cell in range(min(cells, 400)):
                place = at + int.from_bytes(broken[at + 12 + 2 * cell : at + 14 + 2 * cell], "big")
                if chance.random() < 0.5 and place + 4 <= len(broken):
                    broken[place : place + 4] = struct.pack(">I", chance.randrange(1, pages + 1))
            broken[at + 8 : at + 12] = struct.pack(">I", chance.randrange(1, pages + 1))
        elif kind in (13, 10):
            # An interior page with many cells that all lead to the same few pages.
            cells = chance.choice((1, 8, 200))
            target = [chance.randrange(1, pages + 1) for _ in range(3)]
            head = struct.pack(">BHHHBI", 5, 0, cells, size - 5 * cells, 0, chance.choice(target))
            pointers = b"".join(struct.pack(">H", size - 5 * (cell + 1)) for cell in range(cells))
            body = b"".join(struct.pack(">IB", chance.choice(target), cell % 127) for cell in range(cells))
            page = head + pointers
            broken[at : at + size] = page + bytes(size - len(page) - len(body)) + body
    path.write_bytes(broken)
    return "of child pages"


def _columns(connection: sqlite3.Connection, chance: random.Random) -> tuple[str, str]:
    tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    table = chance.choice(tables)
    columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    return table, chance.choice(columns)


def _value(chance: random.Random) -> Any:
    from hostile import HOSTILE, Frames

    kind = chance.randrange(14)
    if kind == 0:
        return HOSTILE
    if kind == 1:
        return chance.randbytes(chance.randrange(200))
    if kind == 2:
        return zlib.compress(bytes(chance.choice((100, 10**6, 65 * 2**20))))
    if kind == 3:
        return b"\x91" * chance.choice((10, 2_000, 100_000))
    if kind == 4:
        return "x" * chance.choice((0, 5_000, 3_000_000))
    if kind == 5:
        return chance.choice((2**63 - 1, -(2**63), 2**40, -1, 0, 2**31))
    if kind == 6:
        return chance.choice((9e999, -9e999, 1e300, -0.5, 1e11))
    if kind == 7:
        return None
    if kind == 8:
        return chance.choice(("[" * 3_000, '{"a":1}', "[1,2", '["a"]', "NaN", "1e999", "12", "-5", "\ud7ff"))
    if kind == 9:
        return zlib.compress(Frames(chance.randrange(10**6)).body())
    if kind == 10:
        # Empty lists in a field that takes anything: ten times their size in memory.
        import msgspec

        head = msgspec.msgpack.encode({"type": "command", "id": "x", "verb": "v", "args": {"a": []}})
        count = 2**22
        return zlib.compress(head[:-1] + b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count)
    return Frames(chance.randrange(10**6)).body()


def _values(whole: bytes, path: Path, chance: random.Random) -> str:
    path.write_bytes(whole)
    done: list[str] = []
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.create_function("random", 0, lambda: chance.getrandbits(62))  # the same file for the same number
        for _ in range(chance.choice((1, 1, 3, 10))):
            table, column = _columns(connection, chance)
            where = chance.choice(("", "WHERE abs(random()) % 3 = 0", "WHERE abs(random()) % 20 = 0"))
            value = _value(chance)
            connection.execute(f'UPDATE OR IGNORE {table} SET "{column}" = ? {where}', (value,))
            done.append(f"{table}.{column}")
        connection.commit()
    return ", ".join(done)


def _types(whole: bytes, path: Path, chance: random.Random) -> str:
    """Change the type of every value of a column, or of every column of a table."""
    path.write_bytes(whole)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        table, column = _columns(connection, chance)
        columns = [column]
        if chance.random() < 0.4:
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        more = ("x'ff'", "CAST(x'fffe80' AS TEXT)", "NULL", "-1", "? * 1e300", "zeroblob(8)")
        into = chance.choice(
            ("CAST(? AS BLOB)", "CAST(? AS TEXT)", "'text' || ?", "CAST(CAST(? AS TEXT) AS BLOB)", *more)
        )
        for name in columns:
            with contextlib.suppress(sqlite3.Error):
                new = into.replace("?", f'"{name}"')
                connection.execute(f'UPDATE OR IGNORE {table} SET "{name}" = {new}')
        connection.commit()
    return f"{table}.{column if len(columns) == 1 else '*'} = {into}"


_ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT"
_HUGE = "printf('%.*c', 900000000, 'x')"


def _schema(whole: bytes, path: Path, chance: random.Random) -> str:
    """Put something else in the place of a table, or something beside it."""
    path.write_bytes(whole)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        table, column = _columns(connection, chance)
        names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        listed = ", ".join(f'"{name}"' for name in names)
        numbers = ", ".join(f'n AS "{name}"' for name in names)
        huge = ", ".join(f'{_HUGE} AS "{name}"' for name in names)
        how = chance.randrange(14)
        away = f"ALTER TABLE {table} RENAME TO away"
        connection.execute("PRAGMA legacy_alter_table=ON")
        if how == 0:
            statements = [away, f"CREATE VIEW {table} AS {_ENDLESS} {numbers} FROM r"]
        elif how == 1:
            statements = [away, f"CREATE VIEW {table} AS SELECT {huge}"]
        elif how == 2:
            cross = ", ".join(f"away AS a{number}" for number in range(8))
            statements = [away, f"CREATE VIEW {table} AS SELECT a0.* FROM {cross}"]
        elif how == 3:
            statements = [f"CREATE TRIGGER t AFTER INSERT ON {table} BEGIN DELETE FROM {table}; END"]
        elif how == 4:
            generated = listed.replace(f'"{column}"', f'"{column}" AS ({_HUGE})')
            statements = [f"DROP TABLE {table}", f"CREATE TABLE {table}({generated}, extra)",
                          f"INSERT INTO {table}(extra) VALUES (1), (2)"]  # fmt: skip
        elif how == 5:
            statements = [f"DROP TABLE {table}", f"CREATE VIRTUAL TABLE {table} USING fts5({listed})"]
        elif how == 6:
            statements = [f"CREATE INDEX odd ON {table}(hex(zeroblob(1000)))"]
        elif how == 7:
            statements = [f'ALTER TABLE {table} RENAME COLUMN "{column}" TO other']
        elif how == 8:
            statements = [f"DROP TABLE {table}"]
        elif how == 9:
            statements = [f"DROP TABLE {table}", f"CREATE TABLE {table}({listed})",
                          f"INSERT INTO {table} VALUES ({', '.join(['0'] * len(names))})"]  # fmt: skip
        elif how == 10:
            endless = f"CREATE VIEW {table} AS {_ENDLESS} {numbers} FROM r"
            change = f"UPDATE sqlite_schema SET sql = '{endless}', rootpage = 0 WHERE name = '{table}'"
            statements = ["PRAGMA writable_schema=ON", change]
        elif how == 11:
            root = chance.randrange(0, 60)
            statements = [
                "PRAGMA writable_schema=ON",
                f"UPDATE sqlite_schema SET rootpage = {root} WHERE name = '{table}'",
            ]
        elif how == 12:
            statements = ["DROP VIEW IF EXISTS phases", f"CREATE VIEW phases AS {_ENDLESS} n FROM r"]
        else:
            statements = [f"PRAGMA user_version={chance.choice((0, -5, 1, 2, 2**31 - 1))}"]
        for statement in statements:
            connection.execute(statement)
    return f"{how} of {table}.{column}"


def _log_beside(whole: bytes, path: Path, chance: random.Random) -> str:
    path.write_bytes(whole)
    log = bytearray(struct.pack(">IIIIIIII", 0x377F0682, 3_007_000, _page(whole), 0, 1, 2, 3, 4))
    log += chance.randbytes(chance.randrange(3 * _page(whole)))
    Path(f"{path}-wal").write_bytes(log[: chance.randrange(len(log))])
    return "a log of nothing beside it"


_KINDS: dict[str, tuple[Callable[[bytes, Path, random.Random], str], int]] = {
    "flip": (_flip, 20),
    "cut": (_cut, 10),
    "shift": (_shift, 10),
    "pages": (_pages, 10),
    "cycles": (_cycles, 10),
    "values": (_values, 15),
    "types": (_types, 10),
    "schema": (_schema, 13),
    "log": (_log_beside, 2),
}
