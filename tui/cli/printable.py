"""A terminal that is only written to: what a recording, a log line or a path could make it obey is taken out."""

import io
import sys
from typing import TextIO

from ...protocol.text import sanitize


class Printable(io.TextIOWrapper):
    """Text output that passes on printable characters, line ends, tabs, and blanks that wipe a line."""

    def write(self, text: str, /) -> int:
        """Write text, made harmless line by line; return its length."""
        if not text.isprintable() and text.strip("\r "):
            super().write("\n".join(sanitize(line, len(line) + 1) for line in text.split("\n")))
        else:
            super().write(text)
        return len(text)


def guard_terminal() -> None:
    """Put such a one in the place of standard output and error, where they are a terminal.

    Every command that prints makes what it shows harmless by itself; this holds for the one that forgot. Files and
    pipes get what they always got, and the app draws through streams of its own.
    """
    sys.stdout = _guarded(sys.stdout)
    sys.stderr = _guarded(sys.stderr)


def _guarded(stream: TextIO) -> TextIO:
    if type(stream) is not io.TextIOWrapper or not stream.isatty():
        return stream
    stream.flush()
    raw = io.FileIO(stream.fileno(), "wb", closefd=False)
    return Printable(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True)
