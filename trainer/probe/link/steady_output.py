"""Makes output to the run's log files safe: a full disk must not raise in the script.

Without ftmon the output would go to a terminal, a pipe or another file, so a full disk of the run must not affect the
script. Standard library only.
"""

import io
import os
import sys
from typing import Any

from .run_files import folder


class SteadyFile(io.FileIO):
    """A descriptor that accepts every write. Bytes that the disk refuses are lost."""

    def write(self, data: Any, /) -> int:
        """Write, or drop the data; return its length."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def steady_output() -> None:
    """Put a ``SteadyFile`` below ``sys.stdout`` and ``sys.stderr`` if they write to the launcher's log."""
    try:
        log = os.stat(os.path.join(folder(), "logs", "launcher.log"))
    except OSError:
        return
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            there = os.fstat(descriptor)
            if (there.st_dev, there.st_ino) == (log.st_dev, log.st_ino):
                make_steady(stream, descriptor)
        except (OSError, ValueError, AttributeError):  # closed, or None
            continue


def make_steady(stream: Any, descriptor: int) -> None:
    """Put a ``SteadyFile`` below a text stream that writes to ``descriptor``; other streams stay as they are.

    The stream stays the same object: loggers and progress bars keep references to it.
    """
    if type(stream) is not io.TextIOWrapper or stream.fileno() != descriptor:
        return
    stream.flush()
    raw: Any = SteadyFile(descriptor, "wb", closefd=False)
    raw.name = stream.name
    buffer = raw if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(raw)  # raw: python -u
    options: dict[str, Any] = {
        "encoding": stream.encoding,
        "errors": stream.errors,
        "line_buffering": stream.line_buffering,
        "write_through": stream.write_through,
    }
    io.TextIOWrapper.__init__(stream, buffer, **options)
