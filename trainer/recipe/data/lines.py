"""Files with one record per line, read by position, and rows of a ``datasets.Dataset``."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from .decode import BOM, parse, utf8
from .messages import RefusedError

_CHUNK = 16 << 20


class _Lines:
    """Non-blank lines of a file; only their positions are held in memory."""

    def __init__(self, path: Path, weight: float) -> None:
        self.weight = weight
        self._path = path
        self._digest, self._starts, self._ends = _index(path)
        self._numbers = numpy.arange(1, len(self._starts) + 1)
        short = numpy.flatnonzero(self._ends - self._starts < 64)
        with path.open("rb") as file:
            blank = [line for line in short.tolist() if not self._bytes(file, line).strip()]
        self._blank = self._numbers[blank]
        if blank:
            kept = numpy.ones(len(self._starts), bool)
            kept[blank] = False
            self._starts, self._ends, self._numbers = self._starts[kept], self._ends[kept], self._numbers[kept]
        self._file: Any = None

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def digest(self) -> str:
        """Hash of the content."""
        return self._digest

    def blank(self) -> Iterator[str]:
        """Yield the place of each blank line, which is no record."""
        return (f"{self._path.name}:{number}" for number in self._blank)

    def place(self, index: int) -> str:
        """Return ``file:line``."""
        return f"{self._path.name}:{self._numbers[index]}"

    def line(self, index: int) -> str:
        """Return a line's text, decoded.

        Raises:
            RefusedError: it is not UTF-8.
        """
        if self._file is None:
            self._file = self._path.open("rb")
        content = self._bytes(self._file, index).removeprefix(BOM if self._numbers[index] == 1 else b"")
        try:
            return utf8(content)
        except ValueError as error:
            raise RefusedError(str(error)) from None

    def _bytes(self, file: Any, index: int) -> bytes:
        start = int(self._starts[index])
        file.seek(start)
        return file.read(int(self._ends[index]) - start)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}


class JsonLines(_Lines):
    """A JSON record a line."""

    def record(self, index: int) -> Any:
        """Return a record; raise ``RefusedError`` if the line is not JSON."""
        text = self.line(index)
        try:
            return parse(text)
        except ValueError as error:
            raise RefusedError(str(error)) from None


class PlainLines(_Lines):
    """A text a line."""

    def __init__(self, path: Path, weight: float, column: str) -> None:
        super().__init__(path, weight)
        self._column = column

    def record(self, index: int) -> Any:
        """Return the line as a record of one column."""
        return {self._column: self.line(index).rstrip("\r\n")}


class Rows:
    """Rows of a ``datasets.Dataset``."""

    def __init__(self, rows: Any, name: str, weight: float, digest: str) -> None:
        self.weight = weight
        self.digest = digest
        self._rows = rows
        self._name = name

    def __len__(self) -> int:
        return len(self._rows)

    def record(self, index: int) -> Any:
        """Return a row without the nulls with which Arrow fills structures of different keys."""
        return {column: _without_nulls(value) for column, value in self._rows[index].items()}

    def place(self, index: int) -> str:
        """Return ``name:row N``, from 1."""
        return f"{self._name}:row {index + 1}"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(below) for key, below in value.items() if below is not None}
    if isinstance(value, list):
        return [_without_nulls(below) for below in value]
    return value


def _index(path: Path) -> tuple[str, NDArray[numpy.int64], NDArray[numpy.int64]]:
    """Return the hash of a file, and the start and end of each line (without its newline)."""
    digest = hashlib.blake2b()
    found: list[NDArray[numpy.int64]] = []
    size = 0
    last = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            found.append(numpy.flatnonzero(numpy.frombuffer(chunk, numpy.uint8) == 10) + size)
            size += len(chunk)
            last = chunk[-1:]
    ends = numpy.concatenate(found) if found else numpy.empty(0, numpy.int64)
    if size and last != b"\n":
        ends = numpy.append(ends, size)
    starts = numpy.empty_like(ends)
    starts[:1] = 0
    starts[1:] = ends[:-1] + 1
    return digest.hexdigest(), starts, ends
