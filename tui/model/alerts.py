"""The alerts of a run, by id, and the latest log lines of its ranks."""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from ...protocol.messages.control import Alert, Severity
from ...protocol.messages.telemetry import LogLine

CAPACITY = 2_000
"""Maximum number of alerts kept, then the least recently updated one is dropped; the hub raises at most 40 a minute."""

SEVERITIES: dict[Severity, int] = {"info": 0, "warning": 1, "error": 2}


class AlertHistory:
    """The latest state of all alerts of a run."""

    def __init__(self) -> None:
        self._by_id: dict[int, Alert] = {}
        self.version = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Alert]:
        return iter(self._by_id.values())

    def put(self, alert: Alert) -> None:
        """Add an alert, or replace the one with its id."""
        self._by_id.pop(alert.id, None)  # the order is that of the last updates
        if len(self._by_id) >= CAPACITY:
            del self._by_id[next(iter(self._by_id))]
        self._by_id[alert.id] = alert
        self.version += 1

    def unresolved(self) -> list[Alert]:
        """List the unresolved alerts by severity, then the newest first."""
        standing = [alert for alert in self._by_id.values() if alert.resolved is None]
        return sorted(standing, key=lambda alert: (SEVERITIES[alert.severity], alert.time, alert.id), reverse=True)

    def counts(self) -> dict[Severity, int]:
        """Count the unresolved alerts by severity."""
        standing = Counter(alert.severity for alert in self._by_id.values() if alert.resolved is None)
        return {severity: standing[severity] for severity in SEVERITIES}


LOG_CAPACITY = 10_000
LONGEST = 4_096  # maximum number of characters kept and shown per line


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

    def __init__(self) -> None:
        self._entries: deque[LogEntry] = deque(maxlen=LOG_CAPACITY)
        self.ranks: set[int] = set()
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
        found = (
            entry
            for entry in reversed(self._entries)
            if (rank is None or entry.rank == rank) and (not wanted or wanted in entry.text.casefold())
        )
        return [*islice(found, limit)][::-1]
