"""Opens a recording for reading: live, closed, on a read-only disk, or what is left of one that was cut short."""

import shutil
import sqlite3
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import RecordingError
from ..text import gib
from .salvage import salvage
from .schema import APPLICATION_ID, SCHEMA_VERSION, UPGRADES

_HEADER_BYTES = 100
_MAGIC = b"SQLite format 3\x00"


@dataclass
class Opened:
    """An open recording. ``missing`` says in words what cannot be read of it; ``scratch`` holds a private copy."""

    connection: sqlite3.Connection
    missing: str = ""
    scratch: "tempfile.TemporaryDirectory[str] | None" = None
    salvaged: bool = False
    """It is what was left of a damaged file."""

    def close(self) -> None:
        """Close it, and remove what was made to read it."""
        self.connection.close()
        if self.scratch is not None:
            self.scratch.cleanup()


@dataclass(frozen=True)
class _Header:
    """What the first 100 bytes say (https://www.sqlite.org/fileformat2.html#the_database_header)."""

    page_bytes: int
    expected_bytes: int
    application_id: int
    schema: int


def open_recording(path: Path) -> Opened:
    """Open a recording read-only; the file itself is never changed.

    Raises:
        RecordingError: it is missing, not a recording, of a newer schema, or nothing of it can be read.
    """
    header = _check_header(path)
    if header.schema > SCHEMA_VERSION:
        raise RecordingError(
            f"{path}: has recording schema {header.schema}, this ftmon reads up to {SCHEMA_VERSION}: "
            "install a newer ftmon to read it"
        )
    if path.stat().st_size < header.expected_bytes and not _write_ahead_log(path):
        return open_damaged(path)
    try:
        opened = _open_whole(path)
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise RecordingError(f"{path}: cannot be read: {error}") from None
        return open_damaged(path)
    return _upgrade(path, opened, header.schema) if header.schema < SCHEMA_VERSION else opened


def is_damage(error: sqlite3.Error) -> bool:
    """Tell whether an error means a damaged file, not a busy or forbidden one."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    # A file that lost its tables with its tail says "no such table" (SQLITE_ERROR).
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or "no such table" in str(error)


def open_damaged(path: Path) -> Opened:
    """Read what can be read of a damaged recording into a private copy, and open that.

    Raises:
        RecordingError: nothing can be read.
    """
    header = _check_header(path)
    size = path.stat().st_size
    scratch = _scratch()
    try:
        connection = salvage(path, header.page_bytes, Path(scratch.name))
    except (sqlite3.Error, OSError) as error:
        scratch.cleanup()
        raise RecordingError(f"{path}: is damaged, nothing of it can be read: {error}") from None
    if size < header.expected_bytes:
        missing = f"the file is cut short: {gib(size)} of {gib(header.expected_bytes)} are there"
    else:
        missing = "the file is damaged: only the parts that are whole were read"
    return Opened(connection, missing, scratch, salvaged=True)


def _check_header(path: Path) -> _Header:
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
    except FileNotFoundError:
        raise RecordingError(f"{path}: no such recording; 'ftmon ls' lists the runs there are") from None
    except IsADirectoryError:
        raise RecordingError(f"{path}: is a directory; name the recording.sqlite in it") from None
    except OSError as error:
        hint = (
            "is a directory; name the recording.sqlite in it" if path.is_dir() else f"cannot be read: {error.strerror}"
        )
        raise RecordingError(f"{path}: {hint}") from None
    if not head:
        raise RecordingError(f"{path}: is empty: nothing was recorded, or the copy of it failed")
    if not _MAGIC.startswith(head[:16]) and head[:16] != _MAGIC:
        raise RecordingError(f"{path}: is not an ftmon recording (not a SQLite file)")
    if len(head) < _HEADER_BYTES:
        raise RecordingError(f"{path}: is cut short after {len(head)} bytes: nothing of it can be read")
    page = int.from_bytes(head[16:18], "big")
    page_bytes = 65_536 if page == 1 else page
    header = _Header(
        page_bytes=page_bytes,
        expected_bytes=int.from_bytes(head[28:32], "big") * page_bytes,
        application_id=int.from_bytes(head[68:72], "big"),
        schema=int.from_bytes(head[60:64], "big"),
    )
    if header.application_id != APPLICATION_ID:
        raise RecordingError(f"{path}: is a SQLite file, but not an ftmon recording")
    return header


def _write_ahead_log(path: Path) -> Path | None:
    log = Path(f"{path}-wal")
    try:
        return log if log.stat().st_size else None
    except OSError:
        return None


def connect(path: Path, options: str) -> sqlite3.Connection:
    """Open a SQLite file by URI, such as ``mode=ro``, for use from any thread (one at a time)."""
    address = f"{path.absolute().as_uri()}?{options}"
    return sqlite3.connect(address, uri=True, check_same_thread=False, isolation_level=None, timeout=5.0)


def _scratch() -> "tempfile.TemporaryDirectory[str]":
    """Make a folder that goes away with whoever holds it."""
    return tempfile.TemporaryDirectory(prefix="ftmon-", ignore_cleanup_errors=True)


def _open_whole(path: Path) -> Opened:
    connection = connect(path, "mode=ro")
    try:
        connection.execute("SELECT count(*) FROM meta").fetchone()
        return Opened(connection)
    except sqlite3.Error as error:
        connection.close()
        if is_damage(error) or not isinstance(error, sqlite3.OperationalError):
            raise
    # Read-only media: SQLite cannot make the index of the write-ahead log beside the file.
    log = _write_ahead_log(path)
    if log is None:
        return Opened(connect(path, "mode=ro&immutable=1"))
    scratch = _scratch()
    try:
        shutil.copyfile(path, Path(scratch.name) / "copy.sqlite")
        shutil.copyfile(log, Path(scratch.name) / "copy.sqlite-wal")
        return Opened(connect(Path(scratch.name) / "copy.sqlite", "mode=rw"), scratch=scratch)
    except OSError as error:
        scratch.cleanup()
        reason = f"its newest part ({log.name}) cannot be read here: {error.strerror}"
        return Opened(connect(path, "mode=ro&immutable=1"), reason)


def _upgrade(path: Path, opened: Opened, schema: int) -> Opened:
    """Bring an older schema up to date in a private copy."""
    scratch = _scratch()
    copy = connect(Path(scratch.name) / "upgraded.sqlite", "mode=rwc")
    try:
        opened.connection.backup(copy)
        for version in range(schema, SCHEMA_VERSION):
            for statement in UPGRADES[version]:
                copy.execute(statement)
    except (KeyError, sqlite3.Error) as error:
        copy.close()
        scratch.cleanup()
        raise RecordingError(f"{path}: recording schema {schema} cannot be brought up to date: {error}") from None
    finally:
        opened.close()
    return Opened(copy, opened.missing, scratch)


def check_continuable(path: Path) -> None:
    """Make sure that a file that is there is a recording of this schema, and as long as it says.

    Raises:
        RecordingError: it is something else, or was cut short.
    """
    header = _check_header(path)
    if path.stat().st_size < header.expected_bytes and not _write_ahead_log(path):
        raise RecordingError(f"{path}: is cut short and cannot be continued; move it out of the way")
    if header.schema != SCHEMA_VERSION:
        raise RecordingError(
            f"{path}: has recording schema {header.schema}, this ftmon writes {SCHEMA_VERSION}; move it out of the way"
        )
