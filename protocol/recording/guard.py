"""Bounds on the cost of reading an untrusted recording, and on what its schema may make SQLite do.

They follow https://www.sqlite.org/security.html for untrusted files: no functions with side effects from a schema, no
views or triggers except by name, small limits, and a time limit on every query. Time is processor time of the calling
thread, so a slow disk or a loaded host does not count.
"""

import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ..errors import RecordingError
from .extents import data_bytes

T = TypeVar("T")

LARGEST_VALUE = 32 * 2**20
"""Limit of a value in bytes; bodies and log lines of a recording are kilobytes."""

_SECONDS = 1.5
_BYTES_A_SECOND = 8e6
"""Processor time of one query, per byte of the file: a full scan reads more than 100 MB/s."""

_MESSAGE_SECONDS = 1.0
"""Processor time for unpacking the messages of one query, in addition to the share for the file's size."""

_ALL_SECONDS = 2.5
_ALL_BYTES_A_SECOND = 2e6
"""Processor time of all queries of a command together, which may read the whole stream once."""

_SPARE_BYTES = 24 * 2**20
_AMPLIFICATION = 8
"""Limit on the unpacked bytes of one answer, per byte of the file: zlib compresses messages by a factor of 3 to 5."""

_OPERATIONS = 50_000
"""Instructions of SQLite's virtual machine between two readings of the clock: about 2 to 5 ms."""

_LIMITS = (
    ("SQLITE_LIMIT_LENGTH", LARGEST_VALUE),
    ("SQLITE_LIMIT_SQL_LENGTH", 200_000),
    ("SQLITE_LIMIT_COLUMN", 500),
    ("SQLITE_LIMIT_EXPR_DEPTH", 200),
    ("SQLITE_LIMIT_COMPOUND_SELECT", 32),
    ("SQLITE_LIMIT_ATTACHED", 0),
    ("SQLITE_LIMIT_TRIGGER_DEPTH", 1),
    ("SQLITE_LIMIT_WORKER_THREADS", 0),
)
_SWITCHES = (
    ("SQLITE_DBCONFIG_DEFENSIVE", True),
    ("SQLITE_DBCONFIG_TRUSTED_SCHEMA", False),
    ("SQLITE_DBCONFIG_ENABLE_TRIGGER", False),
    ("SQLITE_DBCONFIG_ENABLE_VIEW", False),
    ("SQLITE_DBCONFIG_ENABLE_FTS3_TOKENIZER", False),
    ("SQLITE_DBCONFIG_ENABLE_LOAD_EXTENSION", False),
    ("SQLITE_DBCONFIG_DQS_DML", False),
    ("SQLITE_DBCONFIG_DQS_DDL", False),
)
"""``Connection.setconfig`` is new in Python 3.12; older versions rely on the pragma and the check of the schema."""


class RefusedError(RecordingError):
    """An answer takes more time or memory than the file's size justifies."""


class Guard:
    """Bounds the cost of queries on one file, over any number of connections.

    Args:
        path: the file, for its size and for messages.
        seconds: processor time for one query, in addition to the share for the file's size.
        once: bound all queries together as well: they are the queries of one command.
    """

    def __init__(self, path: Path, seconds: float = _SECONDS, *, once: bool = False) -> None:
        size = 0
        for suffix in ("", "-wal"):
            with suppress(OSError):
                size += data_bytes(f"{path}{suffix}")
        self.path = path
        self.file_bytes = 0
        self._occupied = max(size, _occupied_bytes(path))
        self._seconds = seconds
        self._most_bytes = _SPARE_BYTES
        self._message_seconds = _MESSAGE_SECONDS
        self._left = _ALL_SECONDS
        self._grant(size)
        self._once = once
        self._bytes = 0
        self._begun: float | None = None
        self._until = 0.0
        self._late = False
        self._on_messages = 0.0
        self.left_out = 0
        """Messages left out of answers because they, or messages before them, exceeded the time or memory limit."""
        self.begin()

    def begin(self) -> None:
        """Begin a query: count its time and bytes from now on."""
        self.end()
        occupied = _occupied_bytes(self.path)
        if occupied > self._occupied:  # a hub's reader is open for days while the file is written
            self._grant(occupied - self._occupied)
            self._occupied = occupied
        self._begun = time.thread_time()
        self._until = self._begun + (min(self._seconds, max(self._left, 0.0)) if self._once else self._seconds)
        self._bytes = 0
        self._late = False
        if not self._once:
            self._on_messages = 0.0

    def _grant(self, size: int) -> None:
        """Raise the limits for ``size`` more bytes of the file."""
        self.file_bytes += size
        self._seconds += size / _BYTES_A_SECOND
        self._most_bytes += _AMPLIFICATION * size
        self._message_seconds += size / _BYTES_A_SECOND
        self._left += size / _ALL_BYTES_A_SECOND

    def end(self) -> None:
        """End the query: later work of the same thread does not count."""
        if self._begun is not None:
            self._left -= time.thread_time() - self._begun
            self._begun = None

    def unpack(self, unpack: Callable[[], T]) -> T | None:
        """Unpack one message; None if that would exceed the limit: the message then counts as left out.

        A few expensive messages are thus left out, with the ones behind them, and the rest of the answer is returned.
        """
        begun = time.thread_time()
        if begun > self._until or self._on_messages > self._message_seconds:
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
        """Add bytes to the size of the answer.

        Raises:
            RecordingError: the answer is larger than the file's size justifies.
        """
        self._bytes += count
        if self._bytes > self._most_bytes:
            raise RefusedError(
                f"{self.path}: refused: an answer asks for far more memory than the file's size justifies; "
                "it is damaged, or malicious"
            )

    @property
    def late(self) -> bool:
        """Whether the query has used up its time."""
        self._late = self._late or time.thread_time() > self._until
        return self._late

    def too_late(self) -> RecordingError:
        """Return the error for a query that used up its time."""
        return RefusedError(
            f"{self.path}: refused: a question took more than {self._seconds:.1f} s of processor time, more than the "
            "file's size justifies; it is damaged, or malicious"
        )

    def refine(self, error: sqlite3.Error) -> BaseException:
        """Return what to raise for an error: an interrupt means the time limit, or a ctrl-c that SQLite caught."""
        if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_INTERRUPT:
            return error
        return self.too_late() if self.late else KeyboardInterrupt()

    def harden(self, connection: sqlite3.Connection, *, torn: bool = False) -> sqlite3.Connection:
        """Harden a connection to an untrusted file, and return it.

        Args:
            connection: the connection.
            torn: the file is a private copy, shorter than its header states. SQLite opens such a file only with a
                writable schema (``lockBtree`` in its btree.c), which the defensive mode (Python 3.12) does not allow.
        """
        for name, value in _SWITCHES:
            if torn and name == "SQLITE_DBCONFIG_DEFENSIVE":
                continue
            option, switch = getattr(sqlite3, name, None), getattr(connection, "setconfig", None)
            if option is not None and switch is not None:
                with suppress(sqlite3.Error):
                    switch(option, value)
        for name, value in _LIMITS:
            connection.setlimit(getattr(sqlite3, name), value)
        connection.text_factory = _text
        connection.execute("PRAGMA trusted_schema=OFF")
        connection.execute("PRAGMA cell_size_check=ON")
        connection.execute("PRAGMA mmap_size=0")
        connection.set_progress_handler(self._is_late, _OPERATIONS)
        return connection

    def _is_late(self) -> bool:
        return self.late


def _occupied_bytes(path: Path) -> int:
    """Return the size on disk of a file and its log, from stat(): opening them would release SQLite's locks."""
    size = 0
    for suffix in ("", "-wal"):
        with suppress(OSError):
            size += getattr(os.stat(f"{path}{suffix}"), "st_blocks", 0) * 512
    return size


def _text(data: bytes) -> str:
    """Decode a text value, which need not be UTF-8: SQLite does not check it."""
    return data.decode("utf-8", "replace")
