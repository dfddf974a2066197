"""Opens a snapshot file: a separate process unpickles it and returns columns.

PyTorch's snapshots are pickles, and a pickle is a program. Only plain containers, strings and numbers are accepted:
every opcode that names a class or function calls ``find_class``, which raises. Restricting the names does not bound the
cost: one opcode can allocate gigabytes, and a tuple nested a million times overflows the C stack when it is hashed.
Either ends only the separate process, whose end also returns the memory of a million dictionaries to the system:
``python -m ftmon.protocol.snapshot.reader FILE`` writes a snapshot's columns to stdout.
"""

import contextlib
import gc
import gzip
import io
import os
import pickle
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ..host.machine import available_memory
from ..text import sanitize
from .columns import Snapshot, SnapshotError, compact

MOST_BYTES = 4 * 2**30  # limit of a decompressed pickle: forty times the size of a million trace entries
_BASE_COST = 8  # memory per byte: a reference in a list or on the stack, or 4 bytes per character of a non-ASCII string
_COSTS = {
    24: b"\x94qrhjNK)2\x88\x89",  # places on the stack and in a list, in the memo, or half an entry of a dictionary
    40: b"MJ\x8aILGF",  # a number
    72: b"\x8cXCUTBVS\x85\x86\x87",  # a string, bytes, a tuple
    104: b"]",  # a list with its first elements
    240: b"}(",  # a dictionary with its first entries; what follows a mark may become one
    1024: b"\x8f\x91",  # a set with its first elements
}
"""Maximum memory of an opcode's object in CPython, beyond ``_BASE_COST``. Such bytes within strings count as well, so
the estimate is an upper bound: for real snapshots, three to four times their memory."""
_ABOVE = 3
_MEMORY_PER_BYTE, _MEMORY_PER_PACKED_BYTE, _SPARE_MEMORY = 100, 400, 2**28
"""Real snapshots take 6 to 11 bytes of objects per byte, and gzip compresses them by a factor of 10 to 40."""
_MOST_EXPANSION, _SPARE_BYTES = 60, 2**25  # limit on a decompressed gzip file: bytes per byte, plus a constant
_GZIP = b"\x1f\x8b"
_CHUNK = 2**20
_DUMP = "write one with torch.cuda.memory._dump_snapshot(path)"
_TOO_MUCH = "refused: it asks for far more memory than its size justifies"


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise _WantsCodeError(f"{module_name}.{global_name}"[:80])

    def persistent_load(self, pid: object) -> NoReturn:
        del pid
        raise _WantsCodeError("a persistent object")


class _WantsCodeError(Exception):
    """The pickle names something that is not plain data."""


def granted_memory(path: Path) -> int:
    """Return the bytes of memory that a file's objects may take, by its size and the host's available memory."""
    by_size = _SPARE_MEMORY + path.stat().st_size * (_MEMORY_PER_PACKED_BYTE if _is_packed(path) else _MEMORY_PER_BYTE)
    return min(by_size, available_memory() // 2 or by_size)


def granted_bytes(path: Path) -> int:
    """Return the limit on a file's decompressed size, bytes."""
    return min(MOST_BYTES, path.stat().st_size * _MOST_EXPANSION + _SPARE_BYTES) if _is_packed(path) else MOST_BYTES


def _is_packed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == _GZIP


def estimate(part: bytes) -> int:
    """Return an upper bound on the memory of the objects of a pickle or a part of one (``_COSTS``), in bytes."""
    length = len(part)
    return _BASE_COST * length + sum(cost * (length - len(part.translate(None, of))) for cost, of in _COSTS.items())


def check_cost(path: Path, most_bytes: int = 0, most_memory: int = 0) -> None:
    """Read a whole pickle and estimate the memory of its objects before any is made.

    Limits are in bytes; 0: those of ``granted_bytes`` and ``granted_memory``. Raises ``SnapshotError`` above one,
    ``EOFError``, ``gzip.BadGzipFile`` or ``zlib.error`` for damaged gzip data.
    """
    most_memory = most_memory or granted_memory(path)
    cost = 0
    with _opened(path, most_bytes) as file:
        while part := file.read(_CHUNK):
            cost += estimate(part)
            if cost > _ABOVE * most_memory:
                above = f"or than half of what is available here: more than {most_memory / 2**30:.3g} GiB"
                raise SnapshotError(f"{path}: {_TOO_MUCH}, {above}")


def read_pickle(path: Path, most_bytes: int = 0, most_memory: int = 0) -> Any:
    """Return the content of a pickle of plain data, gzip-compressed or not; the caller checks its structure.

    A hostile file may still allocate much memory or exhaust the C stack, so this belongs in a separate process. Raises
    ``SnapshotError`` if it cannot be read, would run code, is truncated, too large, or not a pickle.
    """
    collecting = gc.isenabled()
    # A million dictionaries without a cycle: the collector would traverse them again and again.
    gc.disable()
    try:
        check_cost(path, most_bytes, most_memory)
        with _opened(path, most_bytes) as file:
            found = _PlainUnpickler(file).load()
            # gzip's checksum is checked only at the end of the file.
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
        raise SnapshotError(f"{path}: {_TOO_MUCH}") from None
    except SnapshotError:
        raise
    except Exception as error:
        # The unpickler raises almost any exception on bytes that are not a pickle.
        if "truncated" in str(error) or "ran out" in str(error).lower():
            raise SnapshotError(f"{path}: cut short: copy the file again") from None
        raise SnapshotError(f"{path}: not a memory snapshot (no pickle of plain data): {_DUMP}") from None
    finally:
        if collecting:
            gc.enable()


def _opened(path: Path, most_bytes: int) -> io.BufferedReader:
    """Open a file for reading in pieces: a copy of it in memory would double the cost."""
    with path.open("rb") as file:
        magic = file.read(2)
    if not magic:
        raise SnapshotError(f"{path}: empty: {_DUMP}")
    if magic == b"PK":
        raise SnapshotError(f"{path}: not a memory snapshot but a zip file (as torch.save writes): {_DUMP}")
    raw = gzip.GzipFile(path) if magic == _GZIP else path.open("rb", buffering=0)
    return io.BufferedReader(_Bounded(raw, path, most_bytes or granted_bytes(path)), _CHUNK)


class _Bounded(io.RawIOBase):
    """Reads a file's bytes up to a limit, beyond which it raises."""

    def __init__(self, file: io.FileIO | gzip.GzipFile, path: Path, most_bytes: int) -> None:
        self._file, self._path, self._most, self._read = file, path, most_bytes, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        count = self._file.readinto(buffer) or 0
        self._read += count
        if self._read > self._most:
            raise SnapshotError(f"{self._path}: refused: it unpacks to more than {self._most / 2**20:,.0f} MiB")
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


REFUSED = 3
_SPARE = 2**29
_MOST_MEMORY = 64 * 2**30


def main() -> int:
    """Read a snapshot and write its columns; a refusal is one line on stderr and status ``REFUSED``."""
    path = Path(sys.argv[1])
    # Nothing here is cyclic, and a collection over a million dictionaries takes as long as reading them.
    gc.disable()
    try:
        _limit_memory(path)
        columns = msgspec.msgpack.encode(compact(read_pickle(path), str(path)))
        with open(sys.stdout.fileno(), "wb", closefd=False) as out:
            out.write(columns)
    except (SnapshotError, OSError) as error:
        print(error, file=sys.stderr)
        return REFUSED
    except (MemoryError, RecursionError):
        print(f"{path}: {_TOO_MUCH}", file=sys.stderr)
        return REFUSED
    # A normal exit would first free a million dictionaries.
    os._exit(0)


def _limit_memory(path: Path) -> None:
    """Limit this process's memory by the file's size; without ``resource`` only the check of the cost applies."""
    try:
        import resource
    except ImportError:
        return
    # The estimate of the objects is an upper bound, but the columns and the interpreter add to it.
    most = min(_MOST_MEMORY, granted_memory(path) * 3 // 2 + _SPARE)
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        if hard == resource.RLIM_INFINITY or hard > most:
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


_PATIENCE_SECONDS = 600


def open_snapshot(path: str | Path, meanwhile: Callable[[], object] | None = None) -> Snapshot:
    """Return a PyTorch memory snapshot, packed by gzip or not, of PyTorch 2.1 and later, or raise ``SnapshotError``.

    ``meanwhile`` is called while a separate process reads the file.
    """
    path = Path(path)
    _check(path)
    command = [sys.executable, "-P", "-m", f"{__package__}.reader", str(path.absolute())]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as process:
        try:
            if meanwhile is not None:
                meanwhile()
            data, errors = process.communicate(timeout=_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            minutes = _PATIENCE_SECONDS // 60
            raise SnapshotError(f"{path}: not read within {minutes} minutes: record fewer entries") from None
        finally:
            process.kill()
    if process.returncode == REFUSED:
        text = sanitize(errors.decode(errors="replace").strip().splitlines()[-1])
        raise SnapshotError(text.replace(str(path.absolute()), str(path), 1))
    if process.returncode:
        raise SnapshotError(
            f"{path}: refused: reading it broke the reading process (status {process.returncode}); the file is damaged "
            "or malicious"
        )
    try:
        return msgspec.structs.replace(msgspec.msgpack.decode(data, type=Snapshot), path=str(path))
    except msgspec.MsgspecError as error:
        raise SnapshotError(f"{path}: refused: {error}; the file is damaged or malicious") from None


def _check(path: Path) -> None:
    if path.is_dir():
        raise SnapshotError(f"{path}: a directory: name a snapshot file in it")
    try:
        if path.exists() and not path.is_file():
            raise SnapshotError(f"{path}: not a regular file")
        with path.open("rb") as file:
            if not file.read(1):
                raise SnapshotError(f"{path}: empty: {_DUMP}")
    except FileNotFoundError:
        raise SnapshotError(f"{path}: no such file") from None
    except PermissionError:
        raise SnapshotError(f"{path}: no permission to read it: chmod or copy it") from None
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror or error}") from None


if __name__ == "__main__":
    sys.exit(main())
