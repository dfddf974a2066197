"""Alerts as places to go to."""

from ...protocol.control import Alert
from .history import History
from .transport import AlertMark

_LATEST_S = 60.0
"""How long after the time it speaks of an alert may have been raised."""

_FIRST_BATCH = 128
"""Frames searched at first; most alerts are raised within a second."""

_BATCH = 2048


def marks(history: History) -> list[AlertMark]:
    """List every alert of a recording, by time."""
    found = [AlertMark(each.time, each.severity, each.kind, each.id, each.title) for each in history.alerts()]
    return sorted(found, key=lambda mark: (mark.time, mark.alert_id))


def alert_time(history: History, mark: AlertMark) -> float:
    """Return when an alert was raised: hub time of its first message, which comes after the time it speaks of."""
    after = max(history.seq_at(mark.time) - 1, 0)
    batch = _FIRST_BATCH
    while frames := history.frames(after, batch, mark.time + _LATEST_S):
        for frame in frames:
            if isinstance(frame.message, Alert) and frame.message.id == mark.alert_id:
                return frame.t
        after = frames[-1].seq
        batch = min(2 * batch, _BATCH)
    return mark.time
