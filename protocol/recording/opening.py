"""Opens a recording for reading: live, closed, or on a read-only disk. ``salvage`` reads a damaged one.

A ``Guard`` bounds the cost of reading an untrusted recording, and what its schema may make SQLite do. It follows
https://www.sqlite.org/security.html: no views, triggers or functions with side effects from a schema, small limits, and
a time limit on every query: processor time of the calling thread, so a slow disk does not count.
"""

import os
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from ..errors import RecordingError
from .schema import ADDED, APPLICATION_ID, SCHEMA_VERSION, expected_tables, table_problems

T = TypeVar("T")
_BYTES_A_SECOND = 8e6  # processor time of one query, per byte of the file: a full scan reads more than 100 MB/s
ALL_BYTES_A_SECOND = 2e6  # processor time of all queries of a command together, which may read the whole stream once
_SECONDS, _MESSAGE_SECONDS, _ALL_SECONDS = 1.5, 1.0, 2.5
"""In addition to the share for the file's size: for a query, for unpacking its messages, for all of a command's."""
_SPARE_BYTES, _AMPLIFICATION = 24 * 2**20, 8
"""Limit on the unpacked bytes of one answer, per byte of the file: zlib compresses messages by a factor of 3 to 5."""
_OPERATIONS = 50_000  # instructions of SQLite's virtual machine between two readings of the clock: about 2 to 5 ms
_LIMITS = {"LENGTH": 32 * 2**20, "SQL_LENGTH": 200_000, "COLUMN": 500, "EXPR_DEPTH": 200, "ATTACHED": 0}
_SWITCHES = {"DEFENSIVE": True, "TRUSTED_SCHEMA": False, "ENABLE_TRIGGER": False, "ENABLE_VIEW": False}
"""``Connection.setconfig`` is new in Python 3.12; older versions rely on the pragma and the check of the schema."""


class RefusedError(RecordingError):
    """An answer takes more time or memory than the file's size justifies."""


class Guard:
    """Bounds the cost of queries on one file, over any number of connections.

    A query may take ``seconds`` of processor time, in addition to the share for the file's size. ``once`` bounds all
    queries together as well: they are those of one command.
    """

    def __init__(self, path: Path, seconds: float = _SECONDS, *, once: bool = False) -> None:
        self.path = path
        self.file_bytes = 0
        self.left_out = 0
        """Messages left out of answers because they, or messages before them, exceeded the time or memory limit."""
        self._base_s, self._seconds, self._once = seconds, 0.0, once
        self._spent = self._on_messages = self._until = 0.0
        self._begun: float | None = None
        self._bytes = 0
        self.begin()

    def begin(self, bytes_a_second: float = _BYTES_A_SECOND) -> None:
        """Begin a query: count its time and bytes from now on. A hub's reader is open for days: the file grows."""
        self.end()
        self.file_bytes = max(self.file_bytes, _occupied_bytes(self.path))
        self._begun = time.thread_time()
        self._seconds = self._base_s + self.file_bytes / bytes_a_second
        left = _ALL_SECONDS + self.file_bytes / ALL_BYTES_A_SECOND - self._spent
        self._until = self._begun + (min(self._seconds, max(left, 0.0)) if self._once else self._seconds)
        self._bytes = 0
        if not self._once:
            self._on_messages = 0.0

    def end(self) -> None:
        """End the query: later work of the same thread does not count."""
        if self._begun is not None:
            self._spent += time.thread_time() - self._begun
            self._begun = None

    def unpack(self, unpack: Callable[[], T]) -> T | None:
        """Unpack one message; None if that would exceed the limit: the message then counts as left out."""
        begun = time.thread_time()
        if begun > self._until or self._on_messages > _MESSAGE_SECONDS + self.file_bytes / _BYTES_A_SECOND:
            self.left_out += 1
            return None
        try:
            return unpack()
        except RefusedError:
            self.left_out += 1
            return None
        finally:
            self._on_messages += time.thread_time() - begun

    def charge(self, count: int) -> None:
        """Add bytes to the size of the answer; raise ``RefusedError`` if that exceeds what the file justifies."""
        self._bytes += count
        if self._bytes > _SPARE_BYTES + _AMPLIFICATION * self.file_bytes:
            reason = "an answer asks for far more memory than the file's size justifies"
            raise RefusedError(f"{self.path}: refused: {reason}; it is damaged, or malicious")

    @property
    def late(self) -> bool:
        """Whether the query has used up its time."""
        return time.thread_time() > self._until

    def raise_limit(self, error: BaseException) -> None:
        """Raise what an interrupted query means: the time limit, or a ctrl-c that SQLite caught."""
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_INTERRUPT:
            if not self.late:
                raise KeyboardInterrupt from None
            raise RefusedError(
                f"{self.path}: refused: a question took more than {self._seconds:.1f} s of processor time, more than "
                "the file's size justifies; it is damaged, or malicious"
            ) from None

    def harden(self, connection: sqlite3.Connection, *, torn: bool = False) -> sqlite3.Connection:
        """Harden a connection to an untrusted file, and return it.

        SQLite opens a ``torn`` file only with a writable schema (``lockBtree`` in its btree.c), unlike defensive mode.
        """
        for name, value in _SWITCHES.items():
            option = getattr(sqlite3, f"SQLITE_DBCONFIG_{name}", None)
            if option is not None and not (torn and name == "DEFENSIVE"):
                with suppress(sqlite3.Error):
                    getattr(connection, "setconfig")(option, value)  # noqa: B009 - Python 3.12
        for name, limit in _LIMITS.items():
            connection.setlimit(getattr(sqlite3, f"SQLITE_LIMIT_{name}"), limit)
        connection.text_factory = lambda data: data.decode("utf-8", "replace")  # SQLite does not check it
        for pragma in ("trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0"):
            connection.execute(f"PRAGMA {pragma}")
        connection.set_progress_handler(lambda: self.late, _OPERATIONS)
        return connection


def _occupied_bytes(path: Path) -> int:
    """Return the size of a file and its log, at most what they occupy on disk: a sparse file justifies nothing."""
    size = 0
    for suffix in ("", "-wal"):
        with suppress(OSError):
            found = os.stat(f"{path}{suffix}")
            size += min(found.st_size, getattr(found, "st_blocks", 1 << 60) * 512)
    return size


_HEADER_BYTES = 100
_MAGIC = b"SQLite format 3\x00"
scratch_folder = partial(tempfile.TemporaryDirectory[str], prefix="ftmon-", ignore_cleanup_errors=True)
"""Makes a new folder that is removed with its owner."""


@dataclass
class OpenedRecording:
    """An open recording. ``missing`` describes what cannot be read of it; ``scratch`` holds a private copy."""

    connection: sqlite3.Connection
    guard: Guard
    schema: int
    missing: str = ""
    scratch: "tempfile.TemporaryDirectory[str] | None" = None
    salvaged: bool = False  # the readable part of a damaged file

    def close(self) -> None:
        """Close it, and remove its private copy."""
        self.connection.close()
        if self.scratch is not None:
            self.scratch.cleanup()


class Header(NamedTuple):
    """From the first 100 bytes (https://www.sqlite.org/fileformat2.html#the_database_header)."""

    page_bytes: int
    expected_bytes: int
    schema: int


def is_damage(error: Exception) -> bool:
    """Return whether an error means a damaged file, not a busy or forbidden one."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    # A lost tail may have had a table. A damaged length exceeds the limit. A message with a damaged name is no UTF-8.
    damage = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_TOOBIG)
    return code in damage or "no such table" in str(error) or isinstance(error, UnicodeDecodeError)


def read_header(path: Path) -> Header:
    """Read the header of a file; raise ``RecordingError`` if that is no recording of a schema this version reads."""
    try:
        _check_regular(path)
        # Without blocking: a pipe may have replaced the file.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            head = file.read(_HEADER_BYTES)
    except FileNotFoundError:
        raise RecordingError(f"{path}: no such recording; 'ftmon ls' lists the runs there are") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL byte
        raise RecordingError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not head:
        raise RecordingError(f"{path}: is empty: nothing was recorded, or the copy of it failed")
    if not _MAGIC.startswith(head[:16]):
        raise RecordingError(
            f"{path}: is not an ftmon recording (not a SQLite file); 'ftmon snapshot' opens a memory snapshot"
        )
    if len(head) < _HEADER_BYTES:
        raise RecordingError(f"{path}: is cut short after {len(head)} bytes: nothing of it can be read")
    page, pages, schema, application = (
        int.from_bytes(head[at:end], "big") for at, end in ((16, 18), (28, 32), (60, 64), (68, 72))
    )
    if application != APPLICATION_ID:
        raise RecordingError(f"{path}: is a SQLite file, but not an ftmon recording")
    page_bytes = 65_536 if page == 1 else page
    if not 512 <= page_bytes <= 65_536 or page_bytes & (page_bytes - 1):
        raise RecordingError(f"{path}: is damaged, nothing of it can be read: pages of {page_bytes} bytes")
    if not 1 <= schema <= SCHEMA_VERSION:
        hint = "install a newer ftmon to read it" if schema > SCHEMA_VERSION else "no ftmon wrote it"
        raise RecordingError(f"{path}: has recording schema {schema}, this ftmon reads 1 to {SCHEMA_VERSION}: {hint}")
    return Header(page_bytes, pages * page_bytes, schema)


def _check_regular(path: Path) -> None:
    """Refuse folders, pipes, sockets and devices, also in place of SQLite's log: opening one may block."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise RecordingError(f"{path}: is a directory; name the recording.sqlite in it")
    if not stat.S_ISREG(mode):
        raise RecordingError(f"{path}: is not a regular file; name a recording.sqlite")
    for suffix in ("-wal", "-shm", "-journal"):
        beside = Path(f"{path}{suffix}")
        if os.path.lexists(beside) and not beside.is_file():
            raise RecordingError(f"{beside}: is not a regular file; remove it, or copy the recording elsewhere")


def _has_log(path: Path) -> bool:
    log = Path(f"{path}-wal")
    return log.exists() and log.stat().st_size > 0


def is_cut_short(path: Path, header: Header) -> bool:
    """Return whether a file is shorter than its header states, and has no log with the rest."""
    return path.stat().st_size < header.expected_bytes and not _has_log(path)


def connect(path: Path, options: str) -> sqlite3.Connection:
    """Open a SQLite file with URI options, such as ``mode=ro``, for use from any thread (one at a time)."""
    address = f"{path.absolute().as_uri()}?{options}"
    return sqlite3.connect(address, uri=True, check_same_thread=False, isolation_level=None, timeout=5.0)


def open_whole(path: Path, header: Header, guard: Guard) -> OpenedRecording:
    """Open a recording that is not damaged, read-only, with the tables of its schema.

    Raises ``sqlite3.Error`` or ``UnicodeDecodeError`` if it is damaged (``is_damage``), or cannot be opened.
    """
    opened = _connected(path, header, guard)
    try:
        problems = table_problems(opened.connection, header.schema)
        for table, reason in problems.items():
            if reason:
                raise RecordingError(f"{path}: refused: {reason}")
            if header.schema == 1:  # early recordings of that schema lack tables; the file is not changed
                names = ", ".join(f'"{name}"' for name, *_ in expected_tables(SCHEMA_VERSION)[table])
                opened.connection.execute(f"CREATE TEMP TABLE {table}({names})")
        for table in ADDED.keys() - problems.keys() if header.schema < SCHEMA_VERSION else ():
            known = ", ".join(name for name, *_ in expected_tables(header.schema)[table])
            more = ", ".join(f"{value} AS {name}" for name, value in ADDED[table].items())
            # A temporary view hides the file's table of the same name; SQLite allows it with ENABLE_VIEW off, too.
            opened.connection.execute(f"CREATE TEMP VIEW {table} AS SELECT {known}, {more} FROM main.{table}")
        return opened
    except BaseException:
        opened.close()
        raise


def _connected(path: Path, header: Header, guard: Guard) -> OpenedRecording:
    connection = connect(path, "mode=ro")
    try:
        guard.harden(connection)
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        return OpenedRecording(connection, guard, header.schema)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        connection.close()
        guard.raise_limit(error)
        if is_damage(error) or not isinstance(error, sqlite3.OperationalError):
            raise
    # Read-only media: SQLite cannot create the index of the write-ahead log beside the file.
    if not _has_log(path):
        return OpenedRecording(guard.harden(connect(path, "mode=ro&immutable=1")), guard, header.schema)
    scratch = scratch_folder()
    copy = Path(scratch.name) / "copy.sqlite"
    for suffix in ("", "-wal"):
        shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
    return OpenedRecording(guard.harden(connect(copy, "mode=rw")), guard, header.schema, scratch=scratch)
