"""The monitor's own troubles, and a run that ends before it began: dropped telemetry, no recording, no first step.

- **telemetry_lost**: the loss counters of a HubStats rose. Counted up with each rise, resolved after 60 s without.
- **not_recording**: HubStats says why nothing is recorded. Resolved when it no longer does.
- **no_step**: the job ended without any rank having finished an optimizer step.

The last two are for streams whose hub did not say so itself: an alert that stands already is left as it is.
"""

import msgspec

from ...control import HubStats, RunState
from ..findings import Finding
from ..findings.alert_store import RANKS_LISTED
from ..findings.finding import Matter, Resolution, resolved

QUIET_S = 60.0


class LossFacts(msgspec.Struct, frozen=True):
    """Messages that the hub has not received."""

    total: int
    new: int
    """Since the statistics before."""
    by_sender: dict[str, int]
    sources: tuple[str, ...]
    """The senders of the new ones."""


class RecordingFacts(msgspec.Struct, frozen=True):
    """Why nothing is recorded, and how many messages have been."""

    error: str
    recorded: int


class NoStepFacts(msgspec.Struct, frozen=True):
    """How a job without a step ended, and how many ranks it had."""

    exit_code: int | None
    ranks: int


class UnhookedFacts(msgspec.Struct, frozen=True):
    """A process with PyTorch that was started without ftmon's import hook."""

    pid: int
    pythonpath: str | None
    """The ``PYTHONPATH`` it was started with, which lacks the hook's folder; None: it had none."""


class HealthDetector:
    """Finds lost telemetry, a failing recording and a run without steps."""

    def __init__(self) -> None:
        self._lost: dict[str, int] = {}
        self._rose_at = 0.0

    def stats(self, t: float, stats: HubStats, known: bool) -> list[Finding]:
        """Take in the hub's own figures; ``known``: an alert about the recording stands."""
        return [*self._losses(t, stats), *self._recording(stats, known)]

    def ended(self, state: RunState, stepped: bool, ranks: int) -> list[Finding]:
        """Take in the end of the run."""
        if stepped or state.state not in ("finished", "failed"):
            return []
        facts = NoStepFacts(state.exit_code, ranks)
        return [Finding("no_step", facts, severity="warning" if state.state == "finished" else "error")]

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
