"""Standard output and error of the monitor's own processes: a full disk or a reader that left must not end them."""

import contextlib
import io
import os
import sys


class Unfailing(io.TextIOBase):
    """Text output that writes whole lines to a descriptor, and drops those that cannot be written."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._partial = ""

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str, /) -> int:
        """Write the lines that are whole now; return the text's length."""
        whole, newline, rest = (self._partial + text).rpartition("\n")
        self._partial = rest
        self._out(whole + newline)
        return len(text)

    def flush(self) -> None:
        """Write the line that has not ended yet too."""
        text, self._partial = self._partial, ""
        self._out(text)

    def _out(self, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._descriptor, data) :]


def never_fail() -> None:
    """Put such streams in the place of this process's standard output and error."""
    sys.stdout = Unfailing(1)
    sys.stderr = Unfailing(2)
