"""Finds the times of alerts, to seek to them."""

from collections.abc import Iterable

from ...protocol.messages.control import Alert
from .history import History
from .transport import AlertMark

_LATEST_S = 60.0
"""Maximum seconds between an alert's own time and its first message."""

_FIRST_BATCH = 128
"""Frames searched at first; most alerts are raised within a second."""

_BATCH = 2048


def marks(alerts: Iterable[Alert]) -> list[AlertMark]:
    """Return the marks of alerts, by time."""
    found = [AlertMark(each.time, each.severity, each.kind, each.id, each.title) for each in alerts]
    return sorted(found, key=lambda mark: (mark.time, mark.alert_id))


def alert_time(history: History, mark: AlertMark) -> float:
    """Return the hub time of an alert's first message, which is later than the alert's own time."""
    after = max(history.seq_at(mark.time) - 1, 0)
    batch = _FIRST_BATCH
    while frames := history.frames(after, batch, mark.time + _LATEST_S):
        for frame in frames:
            if isinstance(frame.message, Alert) and frame.message.id == mark.alert_id:
                return frame.t
        after = frames[-1].seq
        batch = min(2 * batch, _BATCH)
    return mark.time
