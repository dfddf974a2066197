"""A console session with one rank: typed code, its output, and the input history."""

import codeop
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from ...protocol.messages.control import Accepted, Result
from ...protocol.text import sanitize

MOST_LINES = 5000
"""Maximum number of output lines kept; the oldest are dropped first."""

Kind = Literal["in", "out", "error", "note"]


class SentCommand(Protocol):
    """A sent command and its answers, once received."""

    @property
    def accepted(self) -> Accepted | None: ...  # noqa: D102
    @property
    def result(self) -> Result | None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class ConsoleLine:
    """One line of the session, safe for a terminal."""

    kind: Kind
    text: str


class ConsoleSession:
    """The session with one rank. A rank's output is untrusted and is sanitized here, line by line."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lines: list[ConsoleLine] = []
        self.place = ""
        """The frame the console is in, by the rank's last answer."""
        self.history: list[str] = []
        self.version = 0
        self._waiting: dict[str, float] = {}
        """Commands without a result, and when they were sent."""
        self._from_history: int | None = None
        self._draft = ""

    @property
    def waiting_since(self) -> float:
        """When the code was sent whose result is pending; 0 if none is."""
        return min(self._waiting.values(), default=0.0)

    def sent(self, number: str, code: str, now: float) -> None:
        """Record that code was sent as a command."""
        self.history = [one for one in self.history if one != code] + [code]
        self._from_history = None
        for index, line in enumerate(code.splitlines()):
            self._add("in", ("... " if index else ">>> ") + line)
        self._waiting[number] = now

    def note(self, text: str, kind: Kind = "note") -> None:
        """Add a line to the session that is not from the rank."""
        for line in text.splitlines():
            self._add(kind, line)

    def receive(self, commands: Mapping[str, SentCommand]) -> None:
        """Add new answers."""
        for number in list(self._waiting):
            record = commands.get(number)
            if record is None:
                continue
            if record.result is not None:
                del self._waiting[number]
                self._show(record.result)
            elif record.accepted is not None and not record.accepted.ok:
                del self._waiting[number]
                self.note(f"refused: {record.accepted.text}", "error")

    def _show(self, result: Result) -> None:
        output, failed = (result.data.get(name) for name in ("output", "error"))
        output, failed = (value if isinstance(value, str) else "" for value in (output, failed))
        for line in output.splitlines():
            self._add("out", line)
        # A traceback in the output ends with the error already.
        if failed and failed not in output:
            self.note(failed, "error")
        if not result.ok:
            self.note(result.text or "failed", "error")
        elif not output and not failed:
            self.note("(no output)")
        place = result.data.get("place")
        if isinstance(place, str):
            self.place = sanitize(place, 300)
        self.version += 1

    def _add(self, kind: Kind, text: str) -> None:
        self.lines.append(ConsoleLine(kind, sanitize(text)))
        if len(self.lines) > MOST_LINES:
            del self.lines[: len(self.lines) - MOST_LINES]
        self.version += 1

    def recall(self, direction: int, now: str) -> str:
        """Return the previous (-1) or next (1) entry of the input history; the current input follows the newest."""
        if not self.history:
            return now
        if self._from_history is None:
            if direction > 0:
                return now
            self._draft, self._from_history = now, len(self.history)
        self._from_history = max(0, self._from_history + direction)
        if self._from_history >= len(self.history):
            self._from_history = None
            return self._draft
        return self.history[self._from_history]


def is_complete(code: str) -> bool:
    """Return whether Python would run this now, outside brackets and blocks; code with errors counts as complete.

    The code is compiled here and never run; the rank compiles it again.
    """
    try:
        return codeop.compile_command(code, "<console>", "single") is not None
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
        return True
