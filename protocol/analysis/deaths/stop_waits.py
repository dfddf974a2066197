"""A request to stop that waits: a script checks for one between its steps, and a rank is in an evaluation.

What is left of it is compared with the grace period, after which the rank is killed and loses what it has not saved.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from ...messages.telemetry import PAUSES, Activity, Checkpoint, Goodbye, Heartbeat, Plan, Step, StopAsked
from ...text import all_ranks, duration
from ..findings.finding import Detector, Finding, Handler, Kind, Shown
from ..words import Words

LATE_S = 3.0  # a step under way is reported if it has not ended by then
SPARE = 1.5  # factor of the proposed grace period
_ROUND_S = 30

_UNTIL = {"eval": "the evaluation", "checkpoint": "the checkpoint", "generate": "the rollout", "init": "start-up"}
_AT_ONCE = frozenset((*PAUSES, "generate", "init"))  # phases that last longer than a step


class StopFacts(msgspec.Struct, frozen=True):
    """A request to stop, and what a rank does first."""

    asked_by: str
    phase: str
    elapsed_s: float  # time since the beginning of the phase, at the request
    left_s: float | None  # until the phase ends, by its progress, or as long as the last one took; None: unknown
    save_s: float  # time of the latest checkpoint; 0: unknown
    grace_s: float  # time after which the rank is killed; 0: it is not
    saved_step: int  # step of the latest checkpoint, or of the one resumed from; 0: no checkpoint

    @property
    def is_short(self) -> bool:
        """Whether the grace period ends before the checkpoint is saved."""
        return bool(self.grace_s) and self.left_s is not None and self.left_s + self.save_s >= self.grace_s


def _words(facts: StopFacts, finding: Finding) -> Words:
    until = _UNTIL.get(facts.phase, "the step under way")
    left = "" if facts.left_s is None else f", about {duration(facts.left_s)} left"
    grace = f"{facts.grace_s:g} s"
    limit = f", but the grace is {grace}" if facts.is_short else f" (grace {grace})" if facts.grace_s else ""
    needed = (facts.left_s or 0.0) + facts.save_s
    proposed = _ROUND_S * (1 + int(SPARE * needed / _ROUND_S))
    saved = f"the last checkpoint is of step {facts.saved_step}" if facts.saved_step else "there is no checkpoint yet"
    lost = (
        f"It is killed before that, and the steps since are lost: {saved}."
        if facts.is_short
        else f"If it is killed before that, the steps since are lost: {saved}."
    )
    before = facts.phase == "init"
    if before:
        kept = f"; the checkpoint of step {facts.saved_step} is kept" if facts.saved_step else ""
        lost = f"No step is done, and nothing is lost{kept}."
    saving = f" Saving took {duration(facts.save_s)} the last time." if facts.save_s else ""
    return Words(
        "stop requested before the first step: nothing is lost"
        if before
        else f"stop requested at step {finding.step}: acts after {until}{left}{limit}",
        f"{facts.asked_by} reached {all_ranks(finding.ranks)} {duration(facts.elapsed_s)} into {until}; a script acts "
        f"on it between its steps.{saving} {lost}",
        f"Start the run with --stop-grace {proposed} (Kubernetes: terminationGracePeriodSeconds; SLURM: "
        f"--signal=TERM@{proposed}), or evaluate fewer rows."
        if facts.is_short
        else "",
        "The rank goes on, and acts on the request.",
    )


class StopWaits(Detector):
    """Follows each rank from a request to stop until it acts."""

    kinds: ClassVar[tuple[Kind, ...]] = (
        Kind(
            "stop_waits",
            StopFacts,
            _words,
            shown={
                "asked_by": Shown("asked by"),
                "elapsed_s": Shown("in this phase for", "s"),
                "grace_s": Shown("grace", "s"),
                "phase": Shown("in phase"),
                "saved_step": Shown("last checkpoint of step"),
                "left_s": Shown("left", "s"),
                "save_s": Shown("saving takes", "s"),
            },
            limits={"a step under way": f"not ended {LATE_S:g} s after the request"},
        ),
    )

    def __init__(self) -> None:
        self._asked: dict[int, StopAsked] = {}  # by rank that has not acted yet
        self._raised: set[int] = set()
        self._evaluation_s: dict[int, float] = {}
        self._ends_at: dict[int, float] = {}  # when a rank's activity will end, if it reports how much is done
        self._phases: dict[int, str] = {}
        self._saved_step, self._save_s = 0, 0.0

    def handlers(self) -> Mapping[type, Handler]:
        return {
            StopAsked: self.asked,
            Step: self.step,
            Heartbeat: self.beat,
            Plan: self.plan,
            Activity: self.activity,
            Checkpoint: self.checkpoint,
            Goodbye: lambda goodbye: self._acted(goodbye.rank),
        }

    def asked(self, asked: StopAsked) -> list[Finding]:
        """Process a request: what the rank does first is reported at once, unless it is a step."""
        self._asked[asked.rank] = asked
        return [self._raise(asked.rank, asked.phase, asked.time)] if asked.phase in _AT_ONCE else []

    def tick(self, now: float) -> Sequence[Finding]:
        """Report steps under way that do not end."""
        late = [rank for rank, asked in self._asked.items() if rank not in self._raised and now > asked.time + LATE_S]
        return [self._raise(rank, self._phases.get(rank, self._asked[rank].phase), now) for rank in late]

    def step(self, step: Step) -> list[Finding]:
        """Register the time of an evaluation, and the end of the step in which a rank was asked."""
        for record in step.phases:
            if record.name == "eval":
                self._evaluation_s[step.rank] = record.host_us / 1e6
        asked = self._asked.get(step.rank)
        return self._acted(step.rank) if asked is not None and step.step > asked.step else []

    def beat(self, beat: Heartbeat) -> None:
        if beat.phase != self._phases.get(beat.rank):
            self._ends_at.pop(beat.rank, None)
        self._phases[beat.rank] = beat.phase

    def plan(self, plan: Plan) -> None:
        """Register the step that a run was resumed from."""
        self._saved_step = max(self._saved_step, plan.first_step)

    def activity(self, activity: Activity) -> None:
        if activity.done and activity.total and not activity.over:
            left = activity.seconds * (activity.total - activity.done) / activity.done
            self._ends_at[activity.rank] = activity.time + left

    def checkpoint(self, checkpoint: Checkpoint) -> list[Finding]:
        """Register a checkpoint; one after the request is what it asked for."""
        self._saved_step, self._save_s = checkpoint.step, checkpoint.seconds
        asked = self._asked.get(checkpoint.rank)
        return self._acted(checkpoint.rank) if asked is not None and checkpoint.time > asked.time else []

    def rank_ended(self, rank: int) -> list[Finding]:
        """Forget a rank. What it did not say goodbye to stays reported: it was killed while it waited."""
        self._asked.pop(rank, None)
        return []

    def _acted(self, rank: int) -> list[Finding]:
        asked = self._asked.pop(rank, None)
        if asked is None or rank not in self._raised:
            return []
        self._raised.discard(rank)
        if self._raised:
            return []
        return [Finding("stop_waits", self._facts(asked, asked.phase, asked.time), step=asked.step).over()]

    def _raise(self, rank: int, phase: str, now: float) -> Finding:
        asked = self._asked[rank]
        state = "updated" if self._raised else "raised"
        self._raised.add(rank)
        facts = self._facts(asked, phase, now)
        severity = "warning" if facts.is_short else "info"
        return Finding("stop_waits", facts, state, severity, tuple(sorted(self._raised)), step=asked.step)

    def _facts(self, asked: StopAsked, phase: str, now: float) -> StopFacts:
        elapsed = max(0.0, now - asked.phase_started)
        usual = {"eval": self._evaluation_s.get(asked.rank, 0.0), "checkpoint": self._save_s}.get(phase, 0.0)
        left = usual - elapsed if usual > elapsed else None
        if asked.rank in self._ends_at:
            left = max(0.0, self._ends_at[asked.rank] - now)
        elif left is None and asked.done and asked.total:
            left = elapsed * (asked.total - asked.done) / asked.done
        return StopFacts(asked.by, phase, elapsed, left, self._save_s, asked.grace_s, self._saved_step)
