"""Log lines of a rank that keeps its terminal (a bare ``ftmon.watch()``): printed as ever, and sent as well."""

import sys
import time
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .probe import Probe

_LINE_LIMIT = 8192


class Tee:
    """Stands in for ``sys.stdout`` or ``sys.stderr``: everything goes to the stream itself, whole lines also go out."""

    def __init__(self, stream: Any, name: Literal["out", "err"], probe: "Probe") -> None:
        self._stream = stream
        self._name: Literal["out", "err"] = name
        self._probe = probe
        self._partial = ""

    def write(self, text: str) -> int:
        """Write as the stream does."""
        written = self._stream.write(text)
        self._take(text)
        return written

    def writelines(self, lines: Any) -> None:
        """Write every line."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _take(self, text: str) -> None:
        # A progress bar goes back with \\r; only what stands at the end of a line is worth a line.
        *whole, rest = (self._partial + text).split("\n")
        self._partial = rest.rsplit("\r", 1)[-1][-_LINE_LIMIT:]
        for line in whole:
            self._probe.hand_over_line(self._name, line.rstrip("\r").rsplit("\r", 1)[-1][:_LINE_LIMIT], time.time())


def tee_output(probe: "Probe") -> None:
    """Have a probe send what this process prints through ``sys.stdout`` and ``sys.stderr``."""
    sys.stdout = Tee(sys.stdout, "out", probe)
    sys.stderr = Tee(sys.stderr, "err", probe)
