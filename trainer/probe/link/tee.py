"""Sends the log lines of a rank that keeps its terminal (a bare ``ftmon.watch()``), which still prints them."""

import sys
import time
from collections.abc import Callable
from typing import Any, Literal

from ....protocol.messages.telemetry import LogLine

_LINE_LIMIT = 8192


class Tee:
    """Replaces ``sys.stdout`` or ``sys.stderr``: writes everything to the stream, and also sends whole lines."""

    def __init__(self, stream: Any, name: Literal["out", "err"], rank: int, send: Callable[[LogLine], None]) -> None:
        self._stream = stream
        self._name: Literal["out", "err"] = name
        self._rank = rank
        self._send = send
        self._partial = ""

    def write(self, text: str) -> int:
        """Write as the stream does."""
        written = self._stream.write(text)
        self._add(text)
        return written

    def writelines(self, lines: Any) -> None:
        """Write every line."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _add(self, text: str) -> None:
        # A progress bar returns with \\r; only its last state on a line is sent.
        *whole, rest = (self._partial + text).split("\n")
        self._partial = rest.rsplit("\r", 1)[-1][-_LINE_LIMIT:]
        for line in whole:
            self._send(
                LogLine(self._rank, time.time(), self._name, line.rstrip("\r").rsplit("\r", 1)[-1][:_LINE_LIMIT])
            )


def tee_output(rank: int, send: Callable[[LogLine], None]) -> None:
    """Also send everything this process prints through ``sys.stdout`` and ``sys.stderr``."""
    sys.stdout = Tee(sys.stdout, "out", rank, send)
    sys.stderr = Tee(sys.stderr, "err", rank, send)
