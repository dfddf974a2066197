"""The extents of a file that hold data: holes of a sparse file occupy no disk space and read as zeros."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

_MOST_EXTENTS = 10_000
"""Extents that are searched for; the rest of the file counts as data."""
_COPIED_AT_ONCE = 2**20
_SEEK_DATA: int = getattr(os, "SEEK_DATA", -1)
_SEEK_HOLE: int = getattr(os, "SEEK_HOLE", -1)
"""Absent on some systems; lseek rejects -1."""


def data_extents(descriptor: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end, in bytes, of each extent with data (lseek(2), ``SEEK_DATA``); moves the file's position.

    On a file system that does not report holes the whole file is one extent.
    """
    size = os.fstat(descriptor).st_size
    end = 0
    try:
        for _ in range(_MOST_EXTENTS):
            begin = os.lseek(descriptor, end, _SEEK_DATA)
            end = os.lseek(descriptor, begin, _SEEK_HOLE)
            yield begin, end
    except OSError as error:
        if error.errno == errno.ENXIO:  # no data behind that place
            return
    if end < size:
        yield end, size


def data_bytes(path: str) -> int:
    """Return the number of data bytes of a file."""
    with open(path, "rb", buffering=0, opener=open_at_once) as file:
        return sum(end - begin for begin, end in data_extents(file.fileno()))


def copy_data(source: Path, target: Path) -> None:
    """Copy a file; holes are skipped, and stay holes in the copy."""
    with open(source, "rb") as reader, open(target, "wb") as writer:
        writer.truncate(os.fstat(reader.fileno()).st_size)
        for begin, end in data_extents(reader.fileno()):
            reader.seek(begin)
            writer.seek(begin)
            left = end - begin
            while left > 0 and (data := reader.read(min(left, _COPIED_AT_ONCE))):
                writer.write(data)
                left -= len(data)


def open_at_once(path: str, flags: int) -> int:
    """Open a file without blocking: a pipe may have replaced the file."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
