"""Finds out-of-memory errors in reports of failed allocations and in exceptions."""

from typing import Literal

import msgspec

from ...messages.oom import OomReport
from ...messages.telemetry import Failure, Step
from ..findings import Finding
from ..findings.finding import Condition, Resolution, added, resolved

OOM_WORDS = ("outofmemoryerror", "out of memory", "can't allocate memory", "cannot allocate memory", "memoryerror")
TRACEBACK_LIMIT = 8000


class Uncaught(msgspec.Struct, frozen=True):
    """An out-of-memory exception that ended a script; also added to the report of the same error."""

    error: str
    traceback: str


class Released(msgspec.Struct, frozen=True):
    """Added later: a rank held at its error was released."""


def is_oom(error: str) -> bool:
    """Return whether an exception's text is an out-of-memory error (CUDA's, the CPU allocator's or Python's own)."""
    lowered = error.lower()
    return any(words in lowered for words in OOM_WORDS)


class OomDetector:
    """Finds ranks that are out of memory; a later step of the rank resolves the finding."""

    def __init__(self) -> None:
        self._standing: dict[int, tuple[Condition, int]] = {}
        """By rank that ran out of memory: its finding, and the step in which it happened."""
        self._held: set[int] = set()

    def oom(self, report: OomReport) -> list[Finding]:
        """Process the report of one failed allocation; the report has the finding's facts."""
        return self._found("oom", report.rank, report.step, report.phase, report)

    def held(self, rank: int, held: bool) -> list[Finding]:
        """Record that a rank is held at its out-of-memory error, or was released."""
        condition = self.standing(rank)
        if held:
            self._held.add(rank)
        if condition is None or held or rank not in self._held:
            return []
        self._held.discard(rank)
        return [added(condition, Released())]

    def failure(self, failure: Failure) -> list[Finding] | None:
        """Return the finding of an out-of-memory failure; None for other failures."""
        if not is_oom(failure.error):
            return None
        facts = Uncaught(failure.error, failure.traceback[-TRACEBACK_LIMIT:])
        condition = self.standing(failure.rank)
        if condition is not None:
            return [added(condition, facts)]
        return self._found("oom_failure", failure.rank, failure.step, failure.phase, facts)

    def step(self, step: Step) -> list[Finding]:
        """Resolve the finding of a rank that makes a step: its script caught the error and continued."""
        if not self._standing:
            return []
        known = self._standing.get(step.rank)
        # Steps from before the error may arrive later, because they wait for their device times.
        if known is None or step.step < known[1]:
            return []
        del self._standing[step.rank]
        return [resolved(known[0], Resolution("caught", step.step))]

    def standing(self, rank: int) -> Condition | None:
        """Return the finding of a rank that is out of memory, or None."""
        known = self._standing.get(rank)
        return known[0] if known is not None else None

    def restore(self, finding: Finding) -> None:
        """Restore a finding from the recording."""
        if finding.rank is not None and finding.state != "resolved":
            self._standing[finding.rank] = finding.condition, finding.step or 0

    def _found(
        self, kind: Literal["oom", "oom_failure"], rank: int, step: int, phase: str, facts: OomReport | Uncaught
    ) -> list[Finding]:
        finding = Finding(kind, facts, severity="error", ranks=(rank,), step=step, rank=rank, phase=phase)
        self._standing[rank] = finding.condition, step
        return [finding]
