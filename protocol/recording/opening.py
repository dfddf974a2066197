"""Opens a recording for reading: live, closed, on a read-only disk, or truncated."""

import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import RecordingError
from ..text import gib
from .extents import open_at_once
from .guard import Guard
from .salvage import salvage
from .schema import APPLICATION_ID, SCHEMA_VERSION, UPGRADES
from .shape import check_no_code, check_shape, kinds_of

_HEADER_BYTES = 100
_MAGIC = b"SQLite format 3\x00"


@dataclass
class OpenedRecording:
    """An open recording. ``missing`` describes what cannot be read of it; ``scratch`` holds a private copy."""

    connection: sqlite3.Connection
    guard: Guard
    missing: str = ""
    scratch: "tempfile.TemporaryDirectory[str] | None" = None
    salvaged: bool = False
    """The readable part of a damaged file."""

    def close(self) -> None:
        """Close it, and remove its private copy."""
        self.connection.close()
        if self.scratch is not None:
            self.scratch.cleanup()


@dataclass(frozen=True)
class _Header:
    """The first 100 bytes (https://www.sqlite.org/fileformat2.html#the_database_header)."""

    page_bytes: int
    expected_bytes: int
    application_id: int
    schema: int


def open_recording(path: Path, *, once: bool = False) -> OpenedRecording:
    """Open a recording read-only; the file itself is never changed.

    The file is untrusted: the cost of opening it is bounded (``guard``), and a view in place of a table is refused
    (``shape``).

    Args:
        path: the recording.
        once: for one command: the cost of all its queries together is bounded as well.

    Raises:
        RecordingError: it is missing, not a recording, of a newer schema, refused, or nothing of it can be read.
    """
    with _still_there(path):
        return _open(path, once)


@contextmanager
def _still_there(path: Path) -> Generator[None, None, None]:
    """Turn a system error about the file into a ``RecordingError``: it may be removed at any time."""
    try:
        yield
    except FileNotFoundError as error:
        if Path(error.filename or path).name.startswith(path.name):
            raise RecordingError(f"{path}: was removed while it was read") from None
        raise RecordingError(f"{path}: cannot be read: {error}") from None
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read: {error}") from None


def _open(path: Path, once: bool) -> OpenedRecording:
    header = _check_header(path)
    if header.schema > SCHEMA_VERSION:
        raise RecordingError(
            f"{path}: has recording schema {header.schema}, this ftmon reads up to {SCHEMA_VERSION}: "
            "install a newer ftmon to read it"
        )
    guard = Guard(path, once=once)
    if path.stat().st_size < header.expected_bytes and not _write_ahead_log(path):
        return open_damaged(path, guard)
    try:
        opened = _open_whole(path, guard)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if isinstance(error, sqlite3.Error) and not is_damage(error):
            raise _refined(guard, error) from None
        return open_damaged(path, guard)  # SQLite's message with a name from a damaged schema may not be UTF-8
    if header.schema < SCHEMA_VERSION:
        return _upgrade(opened, header.schema)
    try:
        _check_shape(opened)
        return opened
    except (sqlite3.Error, UnicodeDecodeError) as error:
        opened.close()
        if isinstance(error, sqlite3.Error) and not is_damage(error):
            raise _refined(guard, error) from None
        return open_damaged(path, guard)
    except BaseException:
        opened.close()
        raise


def _check_shape(opened: OpenedRecording, *, views: bool = True) -> None:
    try:
        check_shape(opened.connection, views=views)
    except RecordingError as error:
        raise RecordingError(f"{opened.guard.path}: {error}") from None


def _refined(guard: Guard, error: sqlite3.Error) -> BaseException:
    refined = guard.refine(error)
    return RecordingError(f"{guard.path}: cannot be read: {error}") if refined is error else refined


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether an error means a damaged file, not a busy or forbidden one."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    # A file that lost its tables with its tail raises "no such table" (SQLITE_ERROR). A damaged length of a value
    # exceeds the limit of a value.
    damage = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_TOOBIG)
    return code in damage or "no such table" in str(error)


def open_damaged(path: Path, guard: Guard) -> OpenedRecording:
    """Read what can be read of a damaged recording into a private copy, and open that.

    Args:
        path: the recording.
        guard: the guard of the open that found the damage.

    Raises:
        RecordingError: nothing can be read.
    """
    with _still_there(path):
        return _open_damaged(path, guard)


def _open_damaged(path: Path, guard: Guard) -> OpenedRecording:
    header = _check_header(path)
    size = path.stat().st_size
    scratch = _scratch()
    try:
        connection, given_up = salvage(path, header.page_bytes, Path(scratch.name), guard)
    except (sqlite3.Error, OSError, UnicodeDecodeError, MemoryError) as error:
        scratch.cleanup()
        refined = guard.refine(error) if isinstance(error, sqlite3.Error) else error
        if refined is not error:
            raise refined from None
        raise RecordingError(f"{path}: is damaged, nothing of it can be read: {error}") from None
    except BaseException:
        scratch.cleanup()
        raise
    if size < header.expected_bytes:
        missing = f"the file is cut short: {gib(size)} of {gib(header.expected_bytes)} are there"
    else:
        missing = "the file is damaged: only the parts that are whole were read"
    if given_up:
        missing += f" ({given_up})"
    return OpenedRecording(connection, guard, missing, scratch, salvaged=True)


def _check_header(path: Path) -> _Header:
    try:
        _check_regular(path)
        with open(path, "rb", opener=open_at_once) as file:
            head = file.read(_HEADER_BYTES)
    except FileNotFoundError:
        raise RecordingError(f"{path}: no such recording; 'ftmon ls' lists the runs there are") from None
    except IsADirectoryError:
        raise RecordingError(f"{path}: is a directory; name the recording.sqlite in it") from None
    except ValueError as error:  # a name with a NUL byte
        raise RecordingError(f"{path}: cannot be read: {error}") from None
    except OSError as error:
        try:
            is_folder = path.is_dir()
        except OSError:
            is_folder = False
        hint = "is a directory; name the recording.sqlite in it" if is_folder else f"cannot be read: {error.strerror}"
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
    if not 512 <= page_bytes <= 65_536 or page_bytes & (page_bytes - 1):
        raise RecordingError(f"{path}: is damaged, nothing of it can be read: pages of {page_bytes} bytes")
    return header


def _check_regular(path: Path) -> None:
    """Refuse pipes, sockets and devices, also in place of SQLite's log: opening one may block.

    Raises:
        RecordingError: the file, or one of SQLite's files beside it, is not regular.
        OSError: the file does not exist or is not accessible.
    """
    if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
        raise RecordingError(f"{path}: is not a regular file; name a recording.sqlite")
    for suffix in ("-wal", "-shm", "-journal"):
        beside = Path(f"{path}{suffix}")
        try:
            regular = stat.S_ISREG(beside.stat().st_mode)
        except FileNotFoundError:  # absent, as after a hub's end, or a link that leads nowhere
            regular = not beside.is_symlink()
        if not regular:
            raise RecordingError(f"{beside}: is not a regular file; remove it, or copy the recording elsewhere")


def _write_ahead_log(path: Path) -> Path | None:
    log = Path(f"{path}-wal")
    try:
        return log if log.stat().st_size else None
    except OSError:
        return None


def connect(path: Path, options: str) -> sqlite3.Connection:
    """Open a SQLite file with URI options, such as ``mode=ro``, for use from any thread (one at a time)."""
    address = f"{path.absolute().as_uri()}?{options}"
    return sqlite3.connect(address, uri=True, check_same_thread=False, isolation_level=None, timeout=5.0)


def _scratch() -> "tempfile.TemporaryDirectory[str]":
    """Return a new folder that is removed with its owner."""
    return tempfile.TemporaryDirectory(prefix="ftmon-", ignore_cleanup_errors=True)


def _open_whole(path: Path, guard: Guard) -> OpenedRecording:
    connection = connect(path, "mode=ro")
    try:
        guard.harden(connection)
        if kinds_of(connection).get("meta", "table") == "table":
            connection.execute("SELECT count(key) FROM meta").fetchone()
        return OpenedRecording(connection, guard)
    except sqlite3.Error as error:
        connection.close()
        if is_damage(error) or not isinstance(error, sqlite3.OperationalError) or guard.refine(error) is not error:
            raise
    except UnicodeDecodeError:
        connection.close()
        raise
    # Read-only media: SQLite cannot create the index of the write-ahead log beside the file.
    log = _write_ahead_log(path)
    if log is None:
        return OpenedRecording(guard.harden(connect(path, "mode=ro&immutable=1")), guard)
    scratch = _scratch()
    try:
        shutil.copyfile(path, Path(scratch.name) / "copy.sqlite")
        shutil.copyfile(log, Path(scratch.name) / "copy.sqlite-wal")
        return OpenedRecording(
            guard.harden(connect(Path(scratch.name) / "copy.sqlite", "mode=rw")), guard, scratch=scratch
        )
    except OSError as error:
        scratch.cleanup()
        reason = f"its newest part ({log.name}) cannot be read here: {error.strerror}"
        return OpenedRecording(guard.harden(connect(path, "mode=ro&immutable=1")), guard, reason)


def _upgrade(opened: OpenedRecording, schema: int) -> OpenedRecording:
    """Upgrade an older schema in a private copy, and check that the result has this version's tables."""
    guard, scratch = opened.guard, _scratch()
    copy = connect(Path(scratch.name) / "upgraded.sqlite", "mode=rwc")
    upgraded = OpenedRecording(copy, guard, opened.missing, scratch)
    try:
        check_no_code(opened.connection)
        opened.connection.backup(copy)
        guard.harden(copy)
        for version in range(schema, SCHEMA_VERSION):
            for statement in UPGRADES[version]:
                copy.execute(statement)
        _check_shape(upgraded, views=False)
    except (KeyError, UnicodeDecodeError, sqlite3.Error) as error:
        upgraded.close()
        if isinstance(error, sqlite3.Error) and is_damage(error):
            return open_damaged(guard.path, guard)
        refined = guard.refine(error) if isinstance(error, sqlite3.Error) else error
        if refined is not error:
            raise refined from None
        reason = f"recording schema {schema} cannot be brought up to date: {error}"
        raise RecordingError(f"{guard.path}: {reason}") from None
    except RecordingError as error:
        upgraded.close()
        reason = str(error).removeprefix(f"{guard.path}: ")
        raise RecordingError(f"{guard.path}: {reason}") from None
    except BaseException:
        upgraded.close()
        raise
    finally:
        opened.close()
    return upgraded


def check_continuable(path: Path) -> None:
    """Check that an existing file is a recording of this schema, and as long as its header states.

    Raises:
        RecordingError: it is something else, or is truncated.
    """
    header = _check_header(path)
    if path.stat().st_size < header.expected_bytes and not _write_ahead_log(path):
        raise RecordingError(f"{path}: is cut short and cannot be continued; move it out of the way")
    if header.schema != SCHEMA_VERSION:
        raise RecordingError(
            f"{path}: has recording schema {header.schema}, this ftmon writes {SCHEMA_VERSION}; move it out of the way"
        )
