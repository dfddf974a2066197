"""Progress of each rank, and how long its present phase may last before a stall is suspected.

The rule, stated: a rank is *stuck* when the hub has seen no progress of its training thread (a step, a phase change, a
collective) for longer than ``limit``::

    limit(phase) = max(floor(phase), 5 x usual longest of that phase on that rank)

- The usual longest is a decaying maximum: ``m = max(min(d, max(2 m, 1 s)), 0.98 m)`` for each new duration ``d``, and
  ``m = d`` for the first. One outlier at most doubles it, so a stall that resolved does not disable the rule, and a few
  long ones in a row raise the limit. The first step does not count: it compiles and warms up.
- The floors are the table of ``protocol.analysis.stalls.patience``: one column where the rank computes or nothing is
  known of it, a longer one while its process tree reads, writes, sends, receives or compiles (``working_limit``), and a
  short one where its training thread sleeps at one line and nothing is under way (``asleep_limit``), which holds only
  while other ranks wait for it.

A stall is *suspected* after ``suspect_after`` seconds: then the ranks' stacks, processes and collectives are inspected,
without a verdict yet.

Time in which the hub itself did not run does not count against any rank (``shift``), except for heartbeats that a rank
sent meanwhile and that report no progress. So a hub that is interrupted again and again still finds who hangs, and no
rank is accused after its whole host slept.

Durations of ordinary phases come from steps (mean of a phase's occurrences); those of eval, checkpoint, idle and data
also from heartbeats, as the time from one phase's start to the next one's, where no step came in between.
"""

from ...telemetry import Heartbeat, PhaseRecord, Step
from .patience import EARLY_STEPS, LIMIT_FACTOR, Row, row_of

SUSPECT_S = 1.5
SUSPECT_LONG_S = 4.0
SUSPECT_FACTOR = 2.0
FORGET = 0.98
OUTLIER_FACTOR = 2.0
OUTLIER_FLOOR_S = 1.0
LONG_PHASES = ("init", "eval", "generate", "checkpoint")
"""Phases that may last long, and be spent in native code that holds Python's lock."""
WITNESS_S = 2.0
"""Two heartbeats in a row count for at most this much of the time between them; they come every second."""
SILENT_S = 5.0
"""A rank not heard from for this long is silent: its figures are old, and nothing is concluded from them alone."""


def _clipped(seconds: float, known: float) -> float:
    return min(seconds, max(OUTLIER_FACTOR * known, OUTLIER_FLOOR_S)) if known else seconds


class RankProgress:
    """One rank's progress as the hub saw it. Times are seconds on the hub's clock."""

    __slots__ = (
        "_last_beat",
        "_stood",
        "_unforgiven",
        "collective",
        "collectives",
        "group",
        "group_sequence",
        "has_stepped",
        "last_collective",
        "last_message_at",
        "micro_step",
        "moved_at",
        "peer_steps",
        "per_step_collectives",
        "phase",
        "phase_started",
        "progress",
        "size",
        "step",
        "step_collectives",
        "step_seconds",
        "steps_seen",
        "usual_max",
    )

    def __init__(self, now: float) -> None:
        self.last_message_at = now
        self.moved_at = now
        self.progress = -1
        self.step = 1
        """The step in the making."""
        self.steps_seen = 0
        self.step_seconds = 0.0
        """Host time of the last finished step; 0 before the first."""
        self.has_stepped = False
        self.peer_steps = 0
        """Steps that a silent rank has finished at least, because it was met in later ones by the ranks that wait for
        it; 0 for a rank that speaks for itself."""
        self.phase = "init"
        self.phase_started = 0.0
        """Start of the phase in the latest heartbeat; 0 once a step came after it: its end is unknown."""
        self.micro_step = 0
        self.collective = ""
        self.last_collective = ""
        self.collectives = 0
        self.step_collectives = 0
        self.group = ""
        self.group_sequence = 0
        self.size = 0
        self.per_step_collectives = -1
        """Collectives of the last finished step; -1 before one was seen."""
        self.usual_max: dict[str, float] = {}
        self._last_beat = 0.0
        """When the latest heartbeat was sent, on the rank's clock."""
        self._stood = 0.0
        """Seconds without progress, as the rank's own heartbeats witness since it moved."""
        self._unforgiven = 0.0
        """When it was seen to move last, before any time was forgiven; 0: none was since."""

    def step_done(self, t: float, step: Step) -> None:
        """Process a finished step that the hub received at ``t``."""
        self.moved(t)
        self.has_stepped = True
        self.steps_seen += 1
        self.phase_started = 0.0
        self.step_seconds = step.host_us * 1e-6
        if step.step >= self.step:
            self.step = step.step + 1
        entered = 0
        # Into the bin with what the first step teaches.
        usual = self.usual_max if self.steps_seen > 1 else {}
        phase: PhaseRecord
        for phase in step.phases:
            entered += phase.collectives
            name = phase.name
            seconds = phase.host_us * 1e-6
            if phase.count > 1:
                seconds /= phase.count
            known = usual.get(name, 0.0)
            # The ordinary cases, a duration below the forgetting maximum or a short one, cost a few comparisons.
            decayed = known * FORGET
            if seconds <= decayed:
                usual[name] = decayed
            elif seconds <= known or seconds <= OUTLIER_FLOOR_S:
                usual[name] = seconds
            else:
                usual[name] = _clipped(seconds, known)
        self.per_step_collectives = entered

    def beat(self, t: float, beat: Heartbeat) -> None:
        """Process a heartbeat that the hub received at ``t``."""
        self.last_message_at = t
        if beat.progress != self.progress:
            if beat.phase_started > self.phase_started > 0.0:
                self._learn(self.phase, beat.phase_started - self.phase_started)
            self.progress = beat.progress
            self.moved(t)
        else:
            self._stands(t, beat.time)
        self._last_beat = beat.time
        self.step = beat.step
        self.phase = beat.phase
        self.phase_started = beat.phase_started
        self.micro_step = beat.micro_step
        self.collective = beat.collective
        self.last_collective = beat.last_collective
        self.collectives = beat.collectives
        self.step_collectives = beat.step_collectives
        self.group = beat.group
        self.group_sequence = beat.group_sequence
        self.size = beat.size

    def _learn(self, phase: str, seconds: float) -> None:
        # Heartbeats are sampled, so the difference may hold short phases in between; for the long ones that only
        # heartbeats tell of (and for gaps between steps) that is close enough, and it errs towards patience.
        if phase in ("forward", "backward", "optimizer", "init") or not self.has_stepped:
            return
        known = self.usual_max.get(phase, 0.0)
        self.usual_max[phase] = max(_clipped(seconds, known), known * FORGET)

    def _row(self) -> Row:
        return row_of(
            "" if self._phase_is_stale() else self.phase,
            within_step=bool(self.micro_step),
            steps_seen=max(self.steps_seen, self.peer_steps),
            has_stepped=self.has_stepped or self.peer_steps > 0,
        )

    def _phase_is_stale(self) -> bool:
        """Return whether the rank went silent, and has left the phase with a long limit in which it was last heard.

        Native code that holds Python's lock right after the start keeps the rank from sending its finished steps.
        """
        if not self.peer_steps or self.micro_step or self.phase not in ("init", "idle"):
            return False
        return self.phase_started == 0.0 or self.peer_steps > self.steps_seen

    def _learned(self) -> float:
        return LIMIT_FACTOR * self.usual_max.get(self.phase, 0.0)

    def limit(self) -> float:
        """Return how many seconds without progress this rank's present phase allows (the rule of this module)."""
        return max(self._row().computing_s, self._learned())

    def working_limit(self) -> float:
        """Return the same for a rank whose process tree was found at work."""
        return max(self._row().working_s, self._learned())

    def asleep_limit(self) -> float:
        """Return the same for a rank that was found asleep while others wait for it."""
        return max(self._row().asleep_s, self._learned())

    def suspect_after(self) -> float:
        """Return the seconds without progress after which the ranks are inspected."""
        ordinary = self.steps_seen >= EARLY_STEPS and self.phase not in LONG_PHASES
        floor = SUSPECT_S if ordinary else SUSPECT_LONG_S
        return max(floor, SUSPECT_FACTOR * self.usual_max.get(self.phase, 0.0))

    def age(self, now: float) -> float:
        """Return the seconds since progress was last seen; never negative."""
        return max(0.0, now - self.moved_at)

    def silence(self, now: float) -> float:
        """Return the seconds since anything was heard; never negative."""
        return max(0.0, now - self.last_message_at)

    def moved(self, t: float) -> None:
        """Note progress at ``t``, or forgive what was before."""
        self.last_message_at = self.moved_at = t
        self._stood = self._unforgiven = 0.0
        self.peer_steps = 0

    def shift(self, seconds: float, now: float) -> None:
        """Discount ``seconds`` up to ``now`` during which the hub did not run (it was frozen, or the clock jumped)."""
        self.last_message_at = min(now, self.last_message_at + seconds)
        if seconds < 0.0:
            self.moved_at += seconds
            return
        self._unforgiven = self._unforgiven or self.moved_at
        self.moved_at = max(self.moved_at, min(self.moved_at + seconds, now - self._stood))

    def _stands(self, t: float, sent: float) -> None:
        """Record that the rank had made no progress when it sent a heartbeat, at ``sent`` on its clock."""
        self._stood += min(max(0.0, sent - self._last_beat), WITNESS_S) if self._last_beat else 0.0
        if self._unforgiven:
            self.moved_at = max(self._unforgiven, min(self.moved_at, t - self._stood))
