"""Opens any recording; the messages that can be read from a damaged one are written to a new one first.

Tables keyed by ``seq`` only grow at their end, so a truncated file has lost their newest rows and the rest can be read
in order of ``seq``. Everything else (indexes, pooled rows, marks, names) is made again by the ``Writer``: it is spread
over the whole file and cannot be trusted. Messages that no sender can have sent are left out.
"""

import heapq
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from ..errors import RecordingError
from ..text import gib
from .opening import (
    ALL_BYTES_A_SECOND,
    Guard,
    Header,
    OpenedRecording,
    RefusedError,
    connect,
    is_cut_short,
    is_damage,
    open_whole,
    read_header,
    scratch_folder,
)
from .rows import Row, RowDecoder
from .schema import SCHEMA_VERSION, STREAM_TABLES, kinds_of, table_problems
from .writer import Writer

_UNREADABLE = (sqlite3.Error, UnicodeDecodeError)
_HIGHEST = 1 << 62
_COMMIT_EVERY = 5_000
_SPARSE_BYTES = 256 * 2**20  # a file with larger holes is not copied: it would fill the disk


def open_recording(path: Path, *, once: bool = False) -> OpenedRecording:
    """Open an untrusted recording read-only (``once`` as in ``Guard``); raise ``RecordingError`` if it has no data."""
    header = read_header(path)
    guard = Guard(path, once=once)
    try:
        return open_damaged(path, guard) if is_cut_short(path, header) else open_whole(path, header, guard)
    except FileNotFoundError:
        raise RecordingError(f"{path}: was removed while it was read") from None
    except (*_UNREADABLE, OSError) as error:
        if is_damage(error):
            return open_damaged(path, guard)
        guard.raise_limit(error)
        raise RecordingError(f"{path}: cannot be read: {error}") from None


def open_damaged(path: Path, guard: Guard) -> OpenedRecording:
    """Copy what can be read of a recording, and open the copy; raise ``RecordingError`` if nothing can be read."""
    header = read_header(path)
    scratch = scratch_folder()
    copy = Path(scratch.name) / "salvaged.sqlite"
    try:
        size = path.stat().st_size
        given_up = _salvage(path, header, copy, guard)
        connection = guard.harden(connect(copy, "mode=ro"))
    except BaseException as error:
        scratch.cleanup()
        guard.raise_limit(error)
        if isinstance(error, (*_UNREADABLE, OSError, MemoryError)):
            raise RecordingError(f"{path}: is damaged, nothing of it can be read: {error}") from None
        raise
    missing = "the file is damaged: only the parts that are whole were read"
    if size < header.expected_bytes:
        missing = f"the file is cut short: {gib(size)} of {gib(header.expected_bytes)} are there"
    return OpenedRecording(connection, guard, SCHEMA_VERSION, missing + given_up, scratch, salvaged=True)


def _salvage(path: Path, header: Header, copy: Path, guard: Guard) -> str:
    """Write a new recording; return why reading stopped early, in parentheses; empty if it did not."""
    given_up = ""
    with closing(sqlite3.connect(_whole_pages(path, header, copy.parent, guard), isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema=ON")
        guard.harden(connection, torn=True)
        guard.begin(ALL_BYTES_A_SECOND)
        if "table" not in kinds_of(connection).values():
            raise sqlite3.DatabaseError("it has no tables")
        torn, writer = _TornRecording(connection, guard, header.schema), Writer(copy)
        try:
            torn.write(writer)
        except RefusedError:
            given_up = " (reading was given up when it took more than the file's size justifies)"
        finally:
            writer.close()
        if writer.error:
            raise OSError(writer.error)
        torn.copy_notes(copy)
    return given_up


def _whole_pages(path: Path, header: Header, scratch: Path, guard: Guard) -> Path:
    """Copy the file without its last, torn page: SQLite would pad it with zeros and read invalid rows."""
    torn = scratch / "torn.sqlite"
    if path.stat().st_size > guard.file_bytes + _SPARSE_BYTES:
        raise sqlite3.DatabaseError("it consists mostly of holes")
    shutil.copyfile(path, torn)
    os.truncate(torn, torn.stat().st_size // header.page_bytes * header.page_bytes)
    with suppress(FileNotFoundError):
        shutil.copyfile(f"{path}-wal", f"{torn}-wal")
    return torn


class _TornRecording:
    """Reads a damaged file row by row, past the pages that cannot be read."""

    def __init__(self, connection: sqlite3.Connection, guard: Guard, schema: int) -> None:
        self._connection, self._guard = connection, guard
        self._problems = table_problems(connection, schema)
        self._decoder = RowDecoder(schema, lambda table: [row for _, row in self._rows(table)], guard)

    def write(self, writer: Writer) -> None:
        """Append the messages, by number; raise ``RefusedError`` if that exceeds what the file's size justifies."""
        rows = heapq.merge(*map(self._rows, STREAM_TABLES), key=lambda found: found[1][0])
        for count, (table, row) in enumerate(rows, 1):
            if self._guard.late:
                raise RefusedError
            frame = self._decoder.frame(table, row)
            if frame is not None:
                writer.append(frame.seq, frame.t, frame.message)
            if count % _COMMIT_EVERY == 0:
                writer.commit()

    def copy_notes(self, copy: Path) -> None:
        """Copy the description of the run, and the list of gaps."""
        with closing(sqlite3.connect(copy)) as whole, whole:
            whole.execute("DELETE FROM meta")
            for table, columns in (("meta", "key, value"), ("gaps", "first_t, last_t, messages, reason")):
                insert = f"INSERT OR IGNORE INTO {table}({columns}) VALUES ({', '.join('?' * len(columns.split()))})"
                with suppress(*_UNREADABLE):
                    if table not in self._problems:
                        whole.executemany(insert, self._connection.execute(f"SELECT {columns} FROM {table}"))

    def _rows(self, table: str) -> Iterator[tuple[str, Row]]:
        seen: set[int] = set()
        after, distance = -1, 1
        while table not in self._problems and after < _HIGHEST:
            try:
                for row in self._connection.execute(f"SELECT * FROM {table} WHERE rowid > ? ORDER BY rowid", (after,)):
                    if 0 <= row[0] < _HIGHEST and row[0] not in seen:  # pages may be there twice, or in a wrong place
                        seen.add(row[0])
                        after, distance = max(after, row[0]), 1
                        self._guard.charge(sum(len(value) for value in row if value.__class__ in (str, bytes)))
                        yield table, row
                return
            except _UNREADABLE as error:
                self._guard.raise_limit(error)
            after, distance = after + distance, 2 * distance  # the next readable page is somewhere behind
