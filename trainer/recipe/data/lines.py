"""Files with one record per line, read by position: only the positions are held in memory."""

import hashlib
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from .decode import BOM, parse, utf8
from .messages import RefusedError
from .tables import Source

_CHUNK = 16 << 20


class Lines(Source):
    """A record for each line that is not blank: JSON, or with ``column`` a text under that name."""

    def __init__(self, path: Path, column: str = "") -> None:
        digest, starts, ends = _index(path)
        super().__init__(starts, path.name, digest)
        self._column = column
        self._file = path.open("rb")
        self._starts, self._ends = starts, ends
        short = numpy.flatnonzero(ends - starts < 64)
        blank = [line for line in short.tolist() if not self._bytes(line).strip()]
        self.blank = [f"{path.name}:{line + 1}" for line in blank]
        self._rows = numpy.delete(numpy.arange(len(starts)), blank)

    def place(self, index: int) -> str:
        """Return ``file:line``."""
        return f"{self._name}:{self._rows[index] + 1}"

    def record(self, index: int) -> Any:
        """Return the record of a line; raise ``RefusedError`` if it is not UTF-8, or not JSON."""
        line = int(self._rows[index])
        try:
            text = utf8(self._bytes(line).removeprefix(b"" if line else BOM))
            return {self._column: text.rstrip("\r\n")} if self._column else parse(text)
        except ValueError as error:
            raise RefusedError(str(error)) from None

    def _bytes(self, line: int) -> bytes:
        start = int(self._starts[line])
        self._file.seek(start)
        return self._file.read(int(self._ends[line]) - start)


def _index(path: Path) -> tuple[str, NDArray[numpy.int64], NDArray[numpy.int64]]:
    """Return the hash of a file, and the start and end of each line (without its newline)."""
    digest = hashlib.blake2b()
    found = [numpy.empty(0, numpy.int64)]
    size, last = 0, b"\n"
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            found.append(numpy.flatnonzero(numpy.frombuffer(chunk, numpy.uint8) == 10) + size)
            size, last = size + len(chunk), chunk[-1:]
    ends = numpy.concatenate([*found, [] if last == b"\n" else [size]]).astype(numpy.int64)
    return digest.hexdigest(), numpy.concatenate([[0], ends[:-1] + 1])[: len(ends)].astype(numpy.int64), ends
