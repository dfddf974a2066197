"""What rank 0 leaves behind for the ranks that wait while it prepares the data: a folder, or an error."""

import os
import time
from pathlib import Path

import msgspec

from ....protocol.host.process import start_ticks

_POLL_SECONDS = 0.1


class Status(msgspec.Struct):
    """How rank 0 ended: the documents' folder, or the error."""

    folder: str = ""
    error: str = ""


def leave(path: Path, status: Status) -> None:
    """Write how rank 0 ended; complete or not at all."""
    scratch = path.with_suffix(".tmp")
    scratch.write_bytes(msgspec.json.encode(status))
    os.replace(scratch, path)


def wait(path: Path, first: int) -> Status:
    """Wait for rank 0, the process ``first``, for as long as it lives."""
    while True:
        alive = start_ticks(first) is not None
        try:
            return msgspec.json.decode(path.read_bytes(), type=Status)
        except FileNotFoundError:
            if not alive:
                return Status(error="rank 0 ended while it prepared the data")
        time.sleep(_POLL_SECONDS)
