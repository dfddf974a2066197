"""The monitor's own faults: dropped telemetry, no recording.

- **telemetry_lost**: the loss counters of a HubStats rose. The count is incremented with each rise; resolved after 60 s
  without one.
- **not_recording**: HubStats has a reason why nothing is recorded. Resolved if it has none; not raised if an alert of
  the kind ``disk`` is active.
"""

import msgspec

from ...messages.control import HubStats
from ..findings import Finding
from ..findings.alert_store import RANKS_LISTED
from ..findings.finding import Matter, Resolution, resolved

QUIET_S = 60.0


class LossFacts(msgspec.Struct, frozen=True):
    """Messages that the hub has not received."""

    total: int
    new: int
    """Messages lost since the previous statistics."""
    by_sender: dict[str, int]
    sources: tuple[str, ...]
    """The senders of these."""


class RecordingFacts(msgspec.Struct, frozen=True):
    """Why nothing is recorded, and the number of messages recorded so far."""

    error: str
    recorded: int


class HealthDetector:
    """Finds lost telemetry and a failing recording."""

    def __init__(self) -> None:
        self._lost: dict[str, int] = {}
        self._rose_at = 0.0

    def stats(self, t: float, stats: HubStats, known: bool) -> list[Finding]:
        """Process the hub's own figures; ``known``: whether an alert about the recording is active."""
        return [*self._losses(t, stats), *self._recording(stats, known)]

    def observe(self, stats: HubStats) -> None:
        """Restore the hub's figures from the recording, so that earlier losses are not reported again."""
        self._lost = dict(stats.lost)

    def _losses(self, t: float, stats: HubStats) -> list[Finding]:
        rose = {source: count for source, count in stats.lost.items() if count > self._lost.get(source, 0)}
        new = sum(count - self._lost.get(source, 0) for source, count in rose.items())
        self._lost = dict(stats.lost)
        if not new:
            return [resolved(Matter("telemetry_lost"), Resolution("calm"))] if t - self._rose_at > QUIET_S else []
        self._rose_at = t
        by_sender = dict(list(stats.lost.items())[:RANKS_LISTED])
        return [Finding("telemetry_lost", LossFacts(sum(stats.lost.values()), new, by_sender, tuple(rose)))]

    def _recording(self, stats: HubStats, known: bool) -> list[Finding]:
        if not stats.recording_error:
            return [resolved(Matter("not_recording"), Resolution("resumed"))]
        facts = RecordingFacts(stats.recording_error, stats.recorded)
        return [] if known else [Finding("not_recording", facts, severity="error")]
