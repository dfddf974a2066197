"""The latest log lines of all ranks, bounded, with a filter."""

from collections import deque
from dataclasses import dataclass

from ...protocol.messages.telemetry import LogLine

CAPACITY = 10_000
LONGEST = 4_096
"""Maximum number of characters kept and shown per line."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A log line with its sequence number. Rank -1 is the launcher."""

    seq: int
    time: float
    rank: int
    stream: str
    text: str


class LogHistory:
    """A ring of log lines, oldest first."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._entries: deque[LogEntry] = deque(maxlen=capacity)
        self.ranks: set[int] = set()
        """Ranks that printed; -1 is the launcher."""
        self.version = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, seq: int, line: LogLine) -> None:
        """Add a line, dropping the oldest if the ring is full."""
        self._entries.append(LogEntry(seq, line.time, line.rank, line.stream, line.text[:LONGEST]))
        self.ranks.add(line.rank)
        self.version += 1

    def select(self, rank: int | None = None, text: str = "", limit: int | None = None) -> list[LogEntry]:
        """List the last ``limit`` lines of one rank, containing ``text`` in any case; oldest first."""
        wanted = text.casefold()
        found: list[LogEntry] = []
        for entry in reversed(self._entries):
            if rank is not None and entry.rank != rank:
                continue
            if wanted and wanted not in entry.text.casefold():
                continue
            found.append(entry)
            if limit is not None and len(found) >= limit:
                break
        found.reverse()
        return found
