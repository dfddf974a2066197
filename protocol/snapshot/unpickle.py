"""Unpickling that admits plain containers, strings and numbers only, within bounds of size.

PyTorch's snapshots are pickles, and a pickle is a program. Nothing but the literal opcodes gets through here: every
opcode that names a class or function ends in ``find_class``, which refuses.
"""

import gc
import gzip
import io
import pickle
import zlib
from pathlib import Path
from typing import Any, NoReturn

from ..host_memory import available_memory
from .errors import SnapshotError

MOST_BYTES = 4 * 2**30
"""The largest pickle that is read, unpacked: forty times that of a million trace entries."""
_COSTS = {b"}": 72, b"]": 64, b")": 8, b"(": 8, b"\x85": 56, b"\x86": 64, b"\x87": 72, b"\x8f": 224}
"""Bytes of an object that one opcode makes: an empty dictionary, an empty list, a tuple, a mark, an empty set, with its
place in a container. (Found within a string, such a byte counts too: the estimate is from above.)"""

_MEMORY_PER_BYTE, _MEMORY_PER_PACKED_BYTE, _SPARE_MEMORY = 100, 500, 2**30
"""Real snapshots take some 10 bytes of objects for a byte, and gzip makes them 10 to 40 times smaller."""

_GZIP = b"\x1f\x8b"
_CHUNK = 2**20
_DUMP = "write one with torch.cuda.memory._dump_snapshot(path)"


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise _WantsCodeError(f"{module_name}.{global_name}"[:80])

    def persistent_load(self, pid: object) -> NoReturn:
        del pid
        raise _WantsCodeError("a persistent object")


class _WantsCodeError(Exception):
    """The pickle names something that is not plain data."""


def granted_memory(path: Path) -> int:
    """Return the bytes of memory that a file's objects may take, by its size and by what this host has available."""
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
    by_size = _SPARE_MEMORY + path.stat().st_size * (_MEMORY_PER_PACKED_BYTE if packed else _MEMORY_PER_BYTE)
    return min(by_size, available_memory() // 2 or by_size)


def check_cost(path: Path, most_bytes: int = MOST_BYTES, most_memory: int = 0) -> None:
    """Read a pickle through, unpacked as it goes, and estimate what its objects take before any is made.

    Every opcode that makes an object is one byte, and its argument at least as long as what it stands for, so bytes
    counted by value bound the objects from above: ``_COSTS`` for those that make the most of one byte.

    Args:
        path: the file, gzip-compressed or not.
        most_bytes: the largest that it may be unpacked.
        most_memory: bytes that its objects may take; 0: what ``granted_memory`` gives.

    Raises:
        SnapshotError: it unpacks to more, or its objects would take more.
        EOFError, gzip.BadGzipFile, zlib.error: its gzip data is damaged.
    """
    most_memory = most_memory or granted_memory(path)
    cost = 0
    with _opened(path, most_bytes) as file:
        while part := file.read(_CHUNK):
            cost += len(part) + sum(part.count(opcode) * size for opcode, size in _COSTS.items())
            if cost > most_memory:
                raise SnapshotError(
                    f"{path}: refused: it asks for far more memory than its size justifies, or than half of what is "
                    f"available here: more than {most_memory / 2**30:.3g} GiB"
                )


def read_pickle(path: Path, most_bytes: int = MOST_BYTES, most_memory: int = 0) -> Any:
    """Read a pickle, gzip-compressed or not, of plain data; the caller checks what it holds.

    A hostile file may still ask for much memory or exhaust the C stack, so this belongs in a process of its own.

    Raises:
        SnapshotError: cannot be read, would run code, is cut short, is too large, or is no pickle.
    """
    collecting = gc.isenabled()
    # A million dictionaries without a cycle among them: the collector would walk them again and again.
    gc.disable()
    try:
        check_cost(path, most_bytes, most_memory)
        with _opened(path, most_bytes) as file:
            found = _PlainUnpickler(file).load()
            # What is packed is checked at its very end only.
            while file.read(_CHUNK):
                pass
        return found
    except _WantsCodeError as error:
        raise SnapshotError(
            f"{path}: refused: this pickle would run code (it names {str(error)!r}); a snapshot holds plain data only"
        ) from None
    except (gzip.BadGzipFile, zlib.error):
        raise SnapshotError(f"{path}: its gzip data is damaged: copy the file again") from None
    except EOFError:
        raise SnapshotError(f"{path}: cut short: copy the file again") from None
    except MemoryError:
        raise SnapshotError(f"{path}: refused: it asks for far more memory than its size justifies") from None
    except SnapshotError:
        raise
    except Exception as error:
        # The unpickler raises almost any exception on bytes that are no pickle.
        if "truncated" in str(error) or "ran out" in str(error).lower():
            raise SnapshotError(f"{path}: cut short: copy the file again") from None
        raise SnapshotError(f"{path}: not a memory snapshot (no pickle of plain data): {_DUMP}") from None
    finally:
        if collecting:
            gc.enable()


def _opened(path: Path, most_bytes: int) -> io.BufferedReader:
    """Open a file to be unpickled as it is read: a copy of it in memory would cost as much again."""
    with path.open("rb") as file:
        magic = file.read(2)
    if not magic:
        raise SnapshotError(f"{path}: empty: {_DUMP}")
    if magic == b"PK":
        raise SnapshotError(f"{path}: not a memory snapshot but a zip file (as torch.save writes): {_DUMP}")
    raw = gzip.GzipFile(path) if magic == _GZIP else path.open("rb", buffering=0)
    return io.BufferedReader(_Bounded(raw, path, most_bytes), _CHUNK)


class _Bounded(io.RawIOBase):
    """Gives a file's bytes, up to a limit."""

    def __init__(self, file: io.FileIO | gzip.GzipFile, path: Path, most_bytes: int) -> None:
        self._file, self._path, self._most, self._read = file, path, most_bytes, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        count = self._file.readinto(buffer) or 0
        self._read += count
        if self._read > self._most:
            raise SnapshotError(f"{self._path}: refused: it unpacks to more than {self._most / 2**30:.3g} GiB")
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
