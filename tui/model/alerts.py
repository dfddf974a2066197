"""The alerts of a run, by id: a later message of the same id replaces the earlier one."""

from collections.abc import Iterator

from ...protocol.messages.control import Alert, Severity

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
        found: dict[Severity, int] = {"info": 0, "warning": 0, "error": 0}
        for alert in self._by_id.values():
            if alert.resolved is None:
                found[alert.severity] += 1
        return found
