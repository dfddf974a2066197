"""Bounds on the cost of reading an untrusted recording, and on what its schema may make SQLite do.

They follow https://www.sqlite.org/security.html: no views, triggers or functions with side effects from a schema, small
limits, and a time limit on every query: processor time of the calling thread, so a slow disk does not count.
"""

import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ..errors import RecordingError

T = TypeVar("T")
_BYTES_A_SECOND = 8e6
"""Processor time of one query, per byte of the file: a full scan reads more than 100 MB/s."""
ALL_BYTES_A_SECOND = 2e6
"""Processor time of all queries of a command together, which may read the whole stream once."""
_SECONDS, _MESSAGE_SECONDS, _ALL_SECONDS = 1.5, 1.0, 2.5
"""In addition to the share for the file's size: for a query, for unpacking its messages, for all of a command's."""
_SPARE_BYTES, _AMPLIFICATION = 24 * 2**20, 8
"""Limit on the unpacked bytes of one answer, per byte of the file: zlib compresses messages by a factor of 3 to 5."""
_OPERATIONS = 50_000
"""Instructions of SQLite's virtual machine between two readings of the clock: about 2 to 5 ms."""
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
