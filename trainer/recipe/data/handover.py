"""Passes rank 0's result of preparing the data, a folder or an error, to the ranks that wait for it."""

import os
import time
from pathlib import Path

import msgspec

from ....protocol.host.process import start_ticks

_POLL_SECONDS = 0.1


class Status(msgspec.Struct):
    """Result of rank 0: the documents' folder, or the error."""

    folder: str = ""
    error: str = ""


def leave(path: Path, status: Status) -> None:
    """Write the result of rank 0 atomically."""
    scratch = path.with_suffix(".tmp")
    scratch.write_bytes(msgspec.json.encode(status))
    os.replace(scratch, path)


def wait(path: Path, first: int) -> Status:
    """Wait for the result of rank 0, the process ``first``, as long as it lives; return it."""
    while True:
        alive = start_ticks(first) is not None
        try:
            return msgspec.json.decode(path.read_bytes(), type=Status)
        except FileNotFoundError:
            if not alive:
                return Status(error="rank 0 ended while it prepared the data")
        time.sleep(_POLL_SECONDS)
