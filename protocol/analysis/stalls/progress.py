"""Tracks each rank's progress, and how long its current phase may last before a stall is suspected.

A rank is *stuck* if the hub has received no progress of its training thread (a step, a phase change, a collective) for
longer than ``limit``::

    limit(phase) = max(floor(phase), 5 x usual longest of that phase on that rank)

- The usual longest is a decaying maximum: ``m = max(min(d, max(2 m, 1 s)), 0.98 m)`` for each new duration ``d``, and
  ``m = d`` for the first. A single outlier at most doubles it, so a resolved stall does not disable the rule, and a few
  long durations in a row raise the limit.
- The first step does not count, because it compiles and warms up. Only until a later step has had a phase, twice its
  duration in the first step counts: an optimizer that computes for minutes does so in the second step too. This does
  not extend the short limit of a rank that sleeps.
- The floors are ``ROWS``: one column if the rank computes or its activity is unknown, a longer one while its process
  tree reads, writes, sends, receives or compiles (``working_limit``), and a short one if its training thread sleeps at
  one line and its process tree is idle (``asleep_limit``), which applies only while other ranks wait for it.

A stall is *suspected* after ``suspect_after`` seconds: then the ranks' stacks, processes and collectives are inspected,
without a verdict yet.

Time in which the hub itself did not run is discounted for all ranks (``shift``), except if a rank's heartbeats of that
time report no progress. A hub that is interrupted repeatedly thus still finds hung ranks, and no rank is blamed after
its whole host was suspended.

Durations of ordinary phases come from steps (mean of a phase's occurrences); those of eval, checkpoint, idle and data
also from heartbeats, as the time between the starts of two phases without a step in between.
"""

from typing import NamedTuple

from ...messages.telemetry import Heartbeat, Step

LIMIT_FACTOR = 5.0  # multiple of a phase's usual longest duration that exceeds its ordinary variation
FIRST_STEP_FACTOR = 2.0  # the same for a duration of the first step, which may include compilation and warm-up
EARLY_STEPS = 3  # steps whose durations include compilation, warm-up and the first touch of memory
REGULAR_STEPS = 10  # after so many the usual longest duration is known well enough for the limits of `asleep_s`
UNSETTLED_ASLEEP_S = {"idle": 8.0}
"""Lower bounds of ``asleep_s``, by phase, before ``REGULAR_STEPS`` steps have been seen; 5 s for the others. Between
steps a script's own pauses vary most."""
ALONE_ACTION_S = 300.0
"""No process is ended before its tree was idle for this many seconds if no other rank is known to wait for it, or if it
may go on by itself. Otherwise its phase's limit applies; in every case the verdict must have stood for
``--hang-grace``."""


class Row(NamedTuple):
    """Time limits of one phase, in seconds without progress of the training thread."""

    phase: str
    title: str
    computing_s: float  # limit if the rank computes, or if its activity is unknown
    working_s: float  # limit while its process tree reads, writes, sends, receives or compiles, or a child computes
    asleep_s: float  # limit if it sleeps at one line, its process tree is idle, and other ranks wait for it


ROWS = (
    Row("data", "data", 8.0, 60.0, 6.0),
    Row("forward", "forward", 8.0, 60.0, 4.0),
    Row("backward", "backward", 8.0, 60.0, 4.0),
    Row("optimizer", "optimizer", 8.0, 60.0, 4.0),
    Row("within step", "Python code within a step", 8.0, 60.0, 4.0),
    Row("idle", "Python code between steps", 300.0, 300.0, 6.0),
    Row("eval", "evaluation", 300.0, 300.0, 8.0),
    Row("generate", "generation", 300.0, 300.0, 8.0),
    Row("checkpoint", "checkpoint", 600.0, 600.0, 8.0),
    Row("early", "second and third step", 60.0, 60.0, 8.0),
    Row("first", "first step", 300.0, 300.0, 8.0),
    Row("init", "start-up", 300.0, 300.0, 20.0),
)
"""Lower bounds of the limits. ``early`` and ``first`` apply to every phase of those steps; ``init`` applies until the
first phase of the first step, also between phases before that, where scripts sleep to start ranks in turn."""

_BY_PHASE = {row.phase: row for row in ROWS}
_UNKNOWN = Row("", "", 60.0, 300.0, 10.0)


def row_of(phase: str, *, within_step: bool, steps_seen: int, has_stepped: bool) -> Row:
    """Return the applicable row: the phase's own, raised to the lower bounds of the first steps.

    ``within_step``: it is ``idle`` between phases of one step; ``has_stepped``: it has finished one, received or not.
    """
    row = _BY_PHASE.get("within step" if phase == "idle" and within_step else phase, _UNKNOWN)
    unsettled = UNSETTLED_ASLEEP_S.get(row.phase, 5.0) if steps_seen < REGULAR_STEPS else 0.0
    row = row._replace(asleep_s=max(row.asleep_s, unsettled))
    if not has_stepped:
        in_step = within_step or phase not in ("init", "idle")
        return _at_least(row, _BY_PHASE["first" if in_step else "init"])
    return _at_least(row, _BY_PHASE["early"]) if steps_seen < EARLY_STEPS else row


def action_patience(computing_s: float, *, awaited: bool, may_resume: bool) -> float:
    """Return for how many seconds a rank's process tree must have been idle before the run may be ended.

    With ``may_resume`` it waits for an answer from the network, or sleeps for a set time.
    """
    return computing_s if awaited and not may_resume else max(computing_s, ALONE_ACTION_S)


def _at_least(row: Row, floor: Row) -> Row:
    return Row(row.phase, row.title, *map(max, row[2:], floor[2:]))


SUSPECT_S = 1.5
SUSPECT_LONG_S = 4.0
SUSPECT_FACTOR = 2.0
FORGET = 0.98
OUTLIER_FACTOR = 2.0
OUTLIER_FLOOR_S = 1.0
LONG_PHASES = ("init", "eval", "generate", "checkpoint")  # phases that may take long in native code that holds the GIL
WITNESS_S = 2.0  # maximum seconds without progress that two consecutive heartbeats prove; they are sent every second
SILENT_S = 5.0  # a rank without messages for this many seconds is silent: its outdated figures alone are no evidence


def _clipped(seconds: float, known: float) -> float:
    return min(seconds, max(OUTLIER_FACTOR * known, OUTLIER_FLOOR_S)) if known else seconds


class RankProgress:
    """One rank's progress as received by the hub. Times are seconds on the hub's clock."""

    def __init__(self, now: float) -> None:
        self.last_message_at = self.moved_at = now
        self.latest = Heartbeat(0, 1, "init", 0.0, -1, 0.0)
        self.step = 1  # number of the unfinished step
        self.steps_seen = 0
        self.step_seconds = 0.0  # host time of the last finished step; 0 before the first
        self.has_stepped = False
        self.peer_steps = 0
        """Lower bound of the finished steps of a silent rank, from collectives of later steps in which other ranks met
        it; 0 for a rank that reports itself."""
        self.phase = "init"
        self.phase_started = 0.0
        """Start of the phase in the latest heartbeat; 0 after a later step, since then its end is unknown."""
        self.per_step_collectives = -1  # collectives of the last finished step; -1 before one was seen
        self.usual_max: dict[str, float] = {}  # usual longest duration of each phase, seconds, without the first step's
        self.first_step: dict[str, float] = {}
        """Duration of each phase in the first step that the hub received, in seconds."""
        self._stood = 0.0  # seconds without progress since the last progress, as proven by the rank's own heartbeats
        self._unforgiven = 0.0  # time of its last progress before any time was discounted; 0: none was discounted since

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
        usual = self.usual_max if self.steps_seen > 1 else self.first_step
        for phase in step.phases:
            entered += phase.collectives
            name = phase.name
            seconds = phase.host_us * 1e-6
            if phase.count > 1:
                seconds /= phase.count
            known = usual.get(name, 0.0)
            # The ordinary cases, a duration below the decaying maximum or a short one, cost a few comparisons.
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
        if beat.progress != self.latest.progress:
            if beat.phase_started > self.phase_started > 0.0:
                self._learn(self.phase, beat.phase_started - self.phase_started)
            self.moved(t)
        else:
            self._stands(t, beat.time)
        self.latest, self.step, self.phase, self.phase_started = beat, beat.step, beat.phase, beat.phase_started

    def _learn(self, phase: str, seconds: float) -> None:
        # Heartbeats are sampled, so the difference may include short phases; for long phases, which only
        # heartbeats report, and for gaps between steps, that is precise enough and makes the limit longer.
        if phase in ("forward", "backward", "optimizer", "init") or not self.has_stepped:
            return
        known = self.usual_max.get(phase, 0.0)
        self.usual_max[phase] = max(_clipped(seconds, known), known * FORGET)

    def _row(self) -> Row:
        return row_of(
            "" if self._phase_is_stale() else self.phase,
            within_step=bool(self.latest.micro_step),
            steps_seen=max(self.steps_seen, self.peer_steps),
            has_stepped=self.has_stepped or self.peer_steps > 0,
        )

    def _phase_is_stale(self) -> bool:
        """Return whether the rank became silent, and has left the phase with a long limit that it last reported.

        Native code that holds the GIL right after the start keeps the rank from sending its finished steps.
        """
        if not self.peer_steps or self.latest.micro_step or self.phase not in ("init", "idle"):
            return False
        return self.phase_started == 0.0 or self.peer_steps > self.steps_seen

    def _learned(self) -> float:
        return LIMIT_FACTOR * self.usual_max.get(self.phase, 0.0)

    def _expected(self) -> float:
        return self._learned() or FIRST_STEP_FACTOR * self.first_step.get(self.phase, 0.0)

    def limit(self) -> float:
        """Return the limit of this rank's current phase, in seconds without progress."""
        return max(self._row().computing_s, self._expected())

    def working_limit(self) -> float:
        """Return the limit for a rank whose process tree works, in seconds."""
        return max(self._row().working_s, self._expected())

    def asleep_limit(self) -> float:
        """Return the limit for a rank found asleep while others wait for it, in seconds."""
        return max(self._row().asleep_s, self._learned())

    def suspect_after(self) -> float:
        """Return the seconds without progress after which the ranks are inspected."""
        ordinary = self.steps_seen >= EARLY_STEPS and self.phase not in LONG_PHASES
        floor = SUSPECT_S if ordinary else SUSPECT_LONG_S
        return max(floor, SUSPECT_FACTOR * self.usual_max.get(self.phase, 0.0))

    def age(self, now: float) -> float:
        """Return the seconds since its last progress; never negative."""
        return max(0.0, now - self.moved_at)

    def silence(self, now: float) -> float:
        """Return the seconds since its last message; never negative."""
        return max(0.0, now - self.last_message_at)

    def moved(self, t: float) -> None:
        """Record progress at ``t``, or discount the time before it."""
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
        before = self.latest.time
        self._stood += min(max(0.0, sent - before), WITNESS_S) if before else 0.0
        if self._unforgiven:
            self.moved_at = max(self._unforgiven, min(self.moved_at, t - self._stood))
