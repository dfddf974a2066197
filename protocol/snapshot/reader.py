"""Opens a snapshot file: a separate process unpickles it and returns columns."""

import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from ..text import sanitize
from .child import REFUSED
from .errors import SnapshotError
from .model import Snapshot, StackColumns

_PATIENCE_SECONDS = 600
_LARGEST_PART = 2**36

T = TypeVar("T")


def open_snapshot(path: str | Path) -> Snapshot:
    """Return a PyTorch memory snapshot, gzip-compressed or not, of PyTorch 2.1 and later.

    Raises:
        SnapshotError: the file cannot be read; the text is one line.
    """
    with SnapshotReading(Path(path)) as reading:
        return reading.snapshot().with_stacks(reading.stacks())


class SnapshotReading:
    """A snapshot file that a separate process reads: its columns first, then its stacks.

    Raises:
        SnapshotError: the file cannot be read; the text is one line.
    """

    def __init__(self, path: Path) -> None:
        _check(path)
        self._path = path
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the rest, in __exit__)
        command = [sys.executable, "-P", "-m", f"{__package__}.child", str(path.absolute())]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors)
        self._late = False
        self._timer = threading.Timer(_PATIENCE_SECONDS, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> "SnapshotReading":
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._process.kill()
        self._process.wait()
        self._out.close()
        self._errors.close()

    def snapshot(self) -> Snapshot:
        """Wait for the snapshot without its stacks, and return it."""
        return msgspec.structs.replace(self._part(Snapshot), path=str(self._path))

    def stacks(self) -> StackColumns:
        """Wait for the stacks, and return them."""
        return self._part(StackColumns)

    @property
    def _out(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _give_up(self) -> None:
        self._late = True
        self._process.kill()

    def _part(self, kind: type[T]) -> T:
        length = int.from_bytes(self._out.read(8), "little")
        data = self._out.read(length) if 0 < length < _LARGEST_PART else b""
        if not data or len(data) < length:
            raise self._refusal()
        try:
            return msgspec.msgpack.decode(data, type=kind)
        except msgspec.MsgspecError as error:
            raise SnapshotError(f"{self._path}: refused: {error}; the file is damaged or malicious") from None

    def _refusal(self) -> SnapshotError:
        """Return the error for the end of the reading process."""
        path, status = self._path, self._process.wait()
        if self._late:
            return SnapshotError(f"{path}: not read within {_PATIENCE_SECONDS // 60} minutes: record fewer entries")
        if status == REFUSED:
            self._errors.seek(0)
            text = sanitize(self._errors.read(1 << 16).decode(errors="replace").strip().splitlines()[-1])
            return SnapshotError(text.replace(str(path.absolute()), str(path), 1))
        return SnapshotError(
            f"{path}: refused: reading it broke the reading process (status {status}); the file is damaged or malicious"
        )


def _check(path: Path) -> None:
    if path.is_dir():
        raise SnapshotError(f"{path}: a directory: name a snapshot file in it")
    try:
        if path.exists() and not path.is_file():
            raise SnapshotError(f"{path}: not a regular file")
        with path.open("rb") as file:
            if not file.read(1):
                raise SnapshotError(f"{path}: empty: write a snapshot with torch.cuda.memory._dump_snapshot(path)")
    except FileNotFoundError:
        raise SnapshotError(f"{path}: no such file") from None
    except PermissionError:
        raise SnapshotError(f"{path}: no permission to read it: chmod or copy it") from None
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror or error}") from None
