"""The results file: JSON lines, each on disk before the next run begins. A torn last line is ignored."""

import os
from collections import Counter
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from ..errors import FtmonError, UsageError
from .rows import FORMAT, Ended, Entry, Header, Plan, Row, Started, Verdict, key_of

_decoder = msgspec.json.Decoder(Entry)
_MOST_BYTES = 1 << 30


class ResultsError(UsageError):
    """A results file that cannot be used."""


class Results(NamedTuple):
    """Contents of a results file."""

    header: Header
    entries: list[Entry]
    """All entries, the header first."""
    complete_bytes: int
    """Length of the file without a torn last line."""

    @property
    def rows(self) -> list[Row]:
        """The results, in order; runs that the sweep itself ended have none."""
        return [entry for entry in self.entries if isinstance(entry, Row) and entry.verdict != "unfinished"]

    @property
    def plan(self) -> Plan | None:
        """The newest session's plan; None: there is no session."""
        return next((entry for entry in reversed(self.entries) if isinstance(entry, Plan)), None)

    @property
    def end(self) -> Ended | None:
        """How the newest session ended; None: it is running, or was killed."""
        last = self.entries[-1]
        return last if isinstance(last, Ended) else None

    @property
    def running(self) -> Started | None:
        """The run without a row, which is running or was lost with its session; None: there is none."""
        for entry in reversed(self.entries):
            if isinstance(entry, Started):
                return entry
            if not isinstance(entry, Plan):
                return None
        return None

    @property
    def unanswered(self) -> list[Started]:
        """The runs without a row: those that run, or were lost with their session."""
        found: dict[tuple[str, int], Started] = {}
        for entry in self.entries:
            if isinstance(entry, Started):
                found[key_of(entry.settings), entry.repeat] = entry
            elif isinstance(entry, Row):
                found.pop((key_of(entry.settings), entry.repeat), None)
        return list(found.values())

    @property
    def last_time(self) -> float:
        """Time of the newest entry; 0 without entries."""
        return max((entry.time for entry in self.entries if not isinstance(entry, Header)), default=0.0)

    def answered(self) -> dict[tuple[str, int], Row]:
        """Return the newest row of each configuration and repeat."""
        return {(key_of(row.settings), row.repeat): row for row in self.rows}

    def seconds_used(self) -> float:
        """Return the wall-clock time of all sessions; a killed one counts until its last entry."""
        used, begun, last = 0.0, 0.0, 0.0
        for entry in self.entries:
            if isinstance(entry, Plan):
                used += max(0.0, last - begun)
                begun = last = entry.time
            elif not isinstance(entry, Header):
                last = max(last, entry.time)
        return used + max(0.0, last - begun)


class Writer:
    """Appends to a results file, with an exclusive lock on it; a new file gets ``header``, which others must match.

    Raises ``ResultsError`` if it cannot be used, has results of another sweep, or another process writes it.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        file: BinaryIO | None = None
        try:
            # Not truncated: until it is locked, the file may belong to another sweep that has just begun.
            self._file = file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
            _lock(file, path)
            found = read(path) if path.stat().st_size else None
            if found is not None and found.header.fingerprint != header.fingerprint:
                raise ResultsError(
                    f"{path}: has results of another sweep ({found.header.name}; its base configuration, command or "
                    "steps differ): give another file with --output"
                )
            if found is not None:
                self._file.truncate(found.complete_bytes)
                self._file.seek(0, os.SEEK_END)
            else:
                self.append(header)
        except (FtmonError, OSError) as error:
            if file is not None:
                file.close()
            if isinstance(error, FtmonError):
                raise
            raise ResultsError(f"{path}: cannot be written: {error.strerror}") from None

    def append(self, entry: Entry) -> None:
        """Write one entry, which is on disk when this returns; raise ``FtmonError`` if that fails."""
        try:
            self._file.write(msgspec.json.encode(entry) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise FtmonError(f"{self.path}: cannot be written: {error.strerror}; make room and run it again") from None

    def close(self) -> None:
        """Close the file and release its lock."""
        self._file.close()


def read(path: Path) -> Results:
    """Return the contents of a results file, which may be in use by a writer.

    Raises ``ResultsError`` if it is missing, not a results file, or of another version.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ResultsError(f"{path}: is larger than 1 GiB, so it is not a results file")
        data = path.read_bytes()
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read: {error.strerror}") from None
    complete = data.rfind(b"\n") + 1
    lines = data[:complete].splitlines()
    header = _header(path, lines[0] if lines else b"")
    entries: list[Entry] = [header]
    for number, line in enumerate(lines[1:], 2):
        try:
            entries.append(_decoder.decode(line))
        except (msgspec.MsgspecError, ValueError) as error:
            raise ResultsError(f"{path}:{number}: is no entry of a results file: {error}") from None
    return Results(header, entries, complete)


def is_results(path: Path) -> bool:
    """Return whether a file begins like a results file of any version."""
    try:
        with path.open("rb") as file:
            return file.read(16).startswith(b'{"type":"sweep"')
    except OSError:
        return False


def verdicts(rows: list[Row]) -> dict[Verdict, int]:
    """Return the number of rows by verdict."""
    return Counter(row.verdict for row in rows)


class _Version(msgspec.Struct):
    type: str
    format: int


def _header(path: Path, line: bytes) -> Header:
    try:
        version = msgspec.json.decode(line, type=_Version)
    except (msgspec.MsgspecError, ValueError):
        version = None
    if version is None or version.type != "sweep":
        raise ResultsError(f"{path}: is not a results file of a sweep; 'ftmon sweep SWEEP.yaml' writes one")
    if version.format != FORMAT:
        raise ResultsError(
            f"{path}: has results of format {version.format}, this version reads {FORMAT}: give another file with "
            "--output, or read it with the version that wrote it"
        )
    try:
        return msgspec.json.decode(line, type=Header)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ResultsError(f"{path}:1: is damaged: {error}") from None


def _lock(file: BinaryIO, path: Path) -> None:
    import fcntl  # absent on Windows, where no sweep runs

    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ResultsError(f"{path}: another sweep is writing it") from None


def default_output(source: str) -> str:
    """Return the results file of a sweep file: ``lengths.results.jsonl`` for ``lengths.yaml``."""
    return f"{os.path.splitext(source)[0]}.results.jsonl"
