"""The monitor's own faults: dropped telemetry, no recording.

- **telemetry_lost**: the loss counters of a HubStats rose. The count is incremented with each rise; resolved after 60 s
  without one.
- **not_recording**: HubStats has a reason why nothing is recorded. Resolved if it has none; not raised if an alert of
  the kind ``disk`` is active.
"""

from typing import Any

import msgspec

from ...messages.control import HubStats
from ...text import counted
from ..findings import Finding
from ..findings.alert_store import RANKS_LISTED
from ..findings.finding import Condition, Resolution, resolved
from ..findings.kind import Kind, Shown
from ..text.words import Words

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
            return [resolved(Condition("telemetry_lost"), Resolution("calm"))] if t - self._rose_at > QUIET_S else []
        self._rose_at = t
        by_sender = dict(list(stats.lost.items())[:RANKS_LISTED])
        return [Finding("telemetry_lost", LossFacts(sum(stats.lost.values()), new, by_sender, tuple(rose)))]

    def _recording(self, stats: HubStats, known: bool) -> list[Finding]:
        if not stats.recording_error:
            return [resolved(Condition("not_recording"), Resolution("resumed"))]
        facts = RecordingFacts(stats.recording_error, stats.recorded)
        return [] if known else [Finding("not_recording", facts, severity="error")]


def _lost(finding: Finding) -> Words:
    """Return the text for telemetry messages that did not reach the hub."""
    facts: LossFacts = finding.facts
    names = ", ".join(sorted(map(_sender, facts.sources))[:4]) + (" ..." if len(facts.sources) > 4 else "")
    return Words(
        f"{counted(facts.total, 'message')} of telemetry lost, {facts.new} just now from {names}",
        "Charts and tables have gaps; the training is not affected. A probe drops messages instead of waiting when "
        "the hub is down for long or cannot keep up.",
    )


def _not_recording(finding: Finding) -> Words:
    """Return the text for a recording that cannot be written."""
    facts: RecordingFacts = finding.facts
    return Words(
        f"not recording: {facts.error}",
        "The training and the live view continue, but the recording will lack this part of the run.",
        "Free space on that disk; recording resumes by itself.",
    )


def _sender(source: str) -> str:
    """Shorten a probe's identity, ``rank-3-4711-123456``, to ``rank 3``."""
    parts = source.split("-")
    return f"rank {parts[1]}" if len(parts) == 4 and parts[0] == "rank" else source


def _lost_evidence(finding: Finding) -> dict[str, Any]:
    facts: LossFacts = finding.facts
    return {"total": facts.total, "new": facts.new, "by_sender": facts.by_sender}


_SHOWN: dict[str, Shown] = {
    "total": Shown("lost in total"),
    "new": Shown("newly lost"),
    "by_sender": Shown("lost by sender"),
    "sources": Shown("senders"),
    "recorded": Shown("messages recorded"),
}

KINDS = (
    Kind(
        "telemetry_lost",
        LossFacts,
        _lost,
        "dropped",
        "lost",
        evidence=_lost_evidence,
        shown=_SHOWN,
        resolved={"calm": "None lost since."},
        limits={"time without a loss that resolves it": f"{QUIET_S:g} s"},
        counted=True,
    ),
    Kind(
        "not_recording",
        RecordingFacts,
        _not_recording,
        "disk",
        "recording",
        resolved={"resumed": "Recording again."},
    ),
)
