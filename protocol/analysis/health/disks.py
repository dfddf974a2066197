"""Disks about to fill: by free space, by its rate of decrease, and by the size of earlier bursts of writing.

A finding is about one volume of one host that the run writes to.

- *rate*: free space has decreased in each quarter of the last ``LEAST_S`` seconds or longer, and will be used up at
  that rate within ``HORIZON_S`` and within ``LOOKAHEAD`` times the duration of the decrease. A checkpoint being written
  does not count, unless it takes a third of the space that was free when it started. Neither do the first of several
  kept checkpoints: with fewer than ``FEWEST_BURSTS`` bursts, the rate is that of the latest burst.
- *next write*: at least two bursts of ``BURST_BYTES`` or more were written (a checkpoint, at ``BURST_PER_S`` or more
  without a pause of ``BURST_GAP_S``), and the free space ``SETTLED_S`` after the last is less than the largest burst.
- *low*: little space is free, regardless of the rate.

Resolved if none of these has held for ``CALM_S``.
"""

from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Literal

import msgspec

from ...messages.control import Severity
from ...messages.health import DiskSpace, Volume
from ...text import duration, gib, sanitize
from ..findings import Finding, State
from ..findings.detector import Detector, Handler
from ..findings.kind import Kind, Shown
from ..text.words import Words

KEPT_S = 900.0
LEAST_S = 8.0
FEWEST = 4
HORIZON_S = 1200.0
LOOKAHEAD = 2.0
LEAST_FALL = 8 * 2**20
BURST_BYTES = 256 * 2**20
BURST_PER_S = 2 * 2**20
"""Minimum decrease in bytes per second that is part of a burst; logs write less."""
BURST_GAP_S = 10.0
FEWEST_BURSTS = 5
SETTLED_S = 30.0
CALM_S = 20.0
LOW_SHARE = 0.02
LOW_BYTES = 2 * 2**30
NONE_BYTES = 64 * 2**20

Why = Literal["rate", "next write", "low"]


class DiskFacts(msgspec.Struct, frozen=True):
    """Free space of a volume, and its rate of decrease."""

    host: str
    path: str
    """The run's directory on it."""
    use: str
    """The directory's purpose: ``run directory``, ``output``, ``working directory``, ``TMPDIR``, ``/dev/shm``."""
    why: Why
    free_bytes: int
    total_bytes: int
    bytes_per_s: float = 0.0
    full_in_s: float | None = None
    burst_bytes: int = 0


def _disk(finding: Finding) -> Words:
    facts: DiskFacts = finding.facts
    left = f"{gib(facts.free_bytes)} of {gib(facts.total_bytes)} left"
    where = f"{sanitize(facts.path, 120)} ({facts.use}) on {facts.host}"
    if facts.why == "rate" and facts.full_in_s is not None:
        title = f"disk full in {duration(facts.full_in_s)} at {gib(facts.bytes_per_s * 60)}/min: {where}"
    elif facts.why == "next write":
        title = f"the next checkpoint will not fit, {left}: {where}"
    else:
        title = f"disk nearly full, {left}: {where}"
    burst = f" The largest single write was {gib(facts.burst_bytes)}, more than is left." if facts.burst_bytes else ""
    return Words(
        title,
        f"{left}.{burst} Most trainings end if a checkpoint or a log cannot be written.",
        "Free space there, keep fewer checkpoints (save_total_limit), or have them written elsewhere.",
        "There is enough free space again.",
    )


_SHOWN: dict[str, Shown] = {
    "use": Shown("used for"),
    "total_bytes": Shown("in total", "bytes"),
    "bytes_per_s": Shown("written", "bytes/s"),
    "burst_bytes": Shown("next checkpoint", "bytes"),
}


class _Volume:
    def __init__(self) -> None:
        self.samples: deque[tuple[float, int]] = deque()
        self.facts: DiskFacts | None = None
        self.severity: Severity = "warning"
        self.calm_since: float | None = None
        self.sent = 0.0
        self.bursts: list[int] = []
        self.burst_from: int | None = None
        self.fell_at = 0.0

    def add(self, t: float, free: int) -> None:
        since, before = self.samples[-1] if self.samples else (t, free)
        self.samples.append((t, free))
        while self.samples[0][0] < t - KEPT_S:
            self.samples.popleft()
        if before - free > BURST_PER_S * (t - since):
            if self.burst_from is None:
                self.burst_from = before
            self.fell_at = t
        elif self.burst_from is not None and t - self.fell_at > BURST_GAP_S:
            written = self.burst_from - min(one for at, one in self.samples if at >= self.fell_at)
            self.burst_from = None
            if written >= BURST_BYTES:
                self.bursts = [*self.bursts[-3:], written]

    def falling(self) -> tuple[float, float] | None:
        """Return the current decrease of free space as (bytes per second, duration in seconds); None: no decrease."""
        samples = self.samples
        if len(samples) < FEWEST:
            return None
        last_t, last = samples[-1]
        start = len(samples) - 1
        highest = last
        # Search back for the start of the decrease; pauses, and rises by up to a tenth, do not end it.
        for at in range(len(samples) - 2, -1, -1):
            free = samples[at][1]
            if free < highest - (highest - last) // 10 - 2**20:
                break
            if free > highest:
                highest, start = free, at
        bursts, latest = self._bursts(start)
        if 1 < bursts < FEWEST_BURSTS:
            start = latest  # decreases before a pause are not part of the current rate
        begun, top = samples[start]
        lasted = last_t - begun
        if lasted < LEAST_S or top - last < LEAST_FALL or len(samples) - start < FEWEST:
            return None
        edges = [self._at(begun + lasted * share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
        if any(later >= earlier for earlier, later in pairwise(edges)):
            return None
        return (top - last) / lasted, lasted

    def _bursts(self, start: int) -> tuple[int, int]:
        """Return the number of bursts since the sample ``start``, and the index of the latest burst's first sample.

        A decrease at most of the samples is one burst. Between bursts little is written for ``BURST_GAP_S``.
        """
        samples = list(self.samples)[start:]
        drops = [before[1] - after[1] for before, after in pairwise(samples)]
        if not drops:
            return 0, start
        least = sum(drops) / len(drops) / 4
        falls = [drop > least for drop in drops]
        if 2 * sum(falls) >= len(falls):
            return 1, start
        bursts, latest, fell_at = 0, start, samples[0][0] - 2 * BURST_GAP_S
        for at, is_falling in enumerate(falls):
            if is_falling:
                if samples[at][0] - fell_at > BURST_GAP_S:
                    bursts, latest = bursts + 1, start + at
                fell_at = samples[at + 1][0]
        return bursts, latest

    def _at(self, t: float) -> int:
        return min(self.samples, key=lambda one: abs(one[0] - t))[1]


class Disks(Detector):
    """Judges every volume of every host of a run."""

    kinds = (
        Kind(
            "disk_filling",
            DiskFacts,
            _disk,
            shown=_SHOWN,
            limits={
                "full at the present rate": f"within {HORIZON_S / 60:g} min",
                "free": f"below {LOW_SHARE:.0%} and {gib(LOW_BYTES, 0)}",
            },
        ),
    )

    def __init__(self) -> None:
        self._volumes: dict[tuple[str, str], _Volume] = {}

    def handlers(self) -> Mapping[type, Handler]:
        """Return the method for each type of message."""
        return {DiskSpace: self.space}

    def space(self, message: DiskSpace) -> list[Finding]:
        """Process one measurement of a host's volumes."""
        found: list[Finding] = []
        for one in message.volumes:
            volume = self._volumes.setdefault((message.host, one.path), _Volume())
            volume.add(message.time, one.free_bytes)
            found += self._judge(message, one, volume)
        return found

    def _judge(self, message: DiskSpace, one: Volume, volume: _Volume) -> list[Finding]:
        facts = _facts(message, one, volume)
        t = message.time
        if facts is None:
            return self._calm(t, volume)
        volume.calm_since = None
        gone = one.free_bytes < min(NONE_BYTES, one.total_bytes // 100)
        soon = facts.full_in_s is not None and facts.full_in_s < 120
        severity: Severity = "error" if gone or soon or volume.severity == "error" else "warning"
        fresh, worse = volume.facts is None, severity != volume.severity
        volume.severity = severity
        if not fresh and not worse and t - volume.sent < 30:
            return []
        volume.facts, volume.sent = facts, t
        return [_finding(facts, "raised" if fresh else "updated", severity)]

    def _calm(self, t: float, volume: _Volume) -> list[Finding]:
        if volume.facts is None:
            return []
        if volume.calm_since is None:
            volume.calm_since = t
        if t - volume.calm_since < CALM_S:
            return []
        facts, volume.facts = volume.facts, None
        severity, volume.severity = volume.severity, "warning"
        return [_finding(facts, "resolved", severity)]


def _facts(message: DiskSpace, one: Volume, volume: _Volume) -> DiskFacts | None:
    free = one.free_bytes
    fall = volume.falling()
    rate = fall[0] if fall is not None else 0.0
    full_in = free / rate if rate > 0 else None

    def made(why: Why, burst: int = 0) -> DiskFacts:
        return DiskFacts(message.host, one.path, one.use, why, free, one.total_bytes, rate, full_in, burst)

    if fall is not None and full_in is not None and full_in < min(HORIZON_S, LOOKAHEAD * fall[1]):
        return made("rate")
    if free < min(LOW_BYTES, LOW_SHARE * one.total_bytes):
        return made("low")
    settled = message.time - volume.fell_at > SETTLED_S
    if len(volume.bursts) >= 2 and settled and free < max(volume.bursts):
        return made("next write", max(volume.bursts))
    return None


def _finding(facts: DiskFacts, state: State, severity: Severity) -> Finding:
    return Finding("disk_filling", facts, state, severity, key=f"{facts.host}:{facts.path}")
