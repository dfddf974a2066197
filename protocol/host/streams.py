"""Standard output and error of ftmon's own processes, which a full disk or a closed pipe must not end."""

import contextlib
import io
import os
import sys


class Unfailing(io.TextIOBase):
    """Text output that writes whole lines to a descriptor, and drops lines that cannot be written."""

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
        """Write the lines that are complete; return the text's length."""
        whole, newline, rest = (self._partial + text).rpartition("\n")
        self._partial = rest
        self._out(whole + newline)
        return len(text)

    def flush(self) -> None:
        """Write the incomplete line as well."""
        text, self._partial = self._partial, ""
        self._out(text)

    def _out(self, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._descriptor, data) :]


def never_fail() -> None:
    """Replace this process's standard output and error by ``Unfailing`` streams."""
    sys.stdout = Unfailing(1)
    sys.stderr = Unfailing(2)
