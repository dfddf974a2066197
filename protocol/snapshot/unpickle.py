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

from .errors import SnapshotError

MOST_BYTES = 4 * 2**30
"""The largest pickle that is read, unpacked: forty times that of a million trace entries."""
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


def read_pickle(path: Path, most_bytes: int = MOST_BYTES) -> Any:
    """Read a pickle, gzip-compressed or not, of plain data; the caller checks what it holds.

    A hostile file may still ask for much memory or exhaust the C stack, so this belongs in a process of its own.

    Raises:
        SnapshotError: cannot be read, would run code, is cut short, is too large, or is no pickle.
    """
    collecting = gc.isenabled()
    # A million dictionaries without a cycle among them: the collector would walk them again and again.
    gc.disable()
    try:
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
