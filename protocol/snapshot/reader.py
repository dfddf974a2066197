"""Opening a snapshot file: unpickled in a process of its own, taken over as columns."""

import subprocess
import sys
from pathlib import Path

import msgspec

from ..text import sanitize
from .child import REFUSED
from .errors import SnapshotError
from .model import Snapshot

_PATIENCE_SECONDS = 600


def open_snapshot(path: str | Path) -> Snapshot:
    """Read a PyTorch memory snapshot, gzip-compressed or not, of PyTorch 2.1 up to today.

    Raises:
        SnapshotError: one line that says what is wrong with the file.
    """
    path = Path(path)
    _check(path)
    command = [sys.executable, "-P", "-m", f"{__package__}.child", str(path.absolute())]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise SnapshotError(
            f"{path}: not read within {_PATIENCE_SECONDS // 60} minutes: record fewer entries"
        ) from None
    if done.returncode == REFUSED:
        text = sanitize(done.stderr.decode(errors="replace").strip().splitlines()[-1])
        raise SnapshotError(text.replace(str(path.absolute()), str(path), 1))
    if done.returncode:
        raise SnapshotError(
            f"{path}: refused: reading it broke the reading process (status {done.returncode}); "
            "the file is damaged or made to do that"
        )
    snapshot = msgspec.msgpack.decode(done.stdout, type=Snapshot)
    return msgspec.structs.replace(snapshot, path=str(path))


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
