"""Checkpoints that could not be written: the run continues, and its progress since the last complete one is not saved.

Raised at the first failure, updated at each further one, resolved by the next complete checkpoint.
"""

import msgspec

from ...messages.telemetry import Checkpoint, CheckpointFailed
from ...text import sanitize
from ..findings import Finding, State
from ..findings.kind import Kind, Shown
from ..text.words import Words


class CheckpointFacts(msgspec.Struct, frozen=True):
    """The failures, and the newest complete checkpoint."""

    path: str
    """The intended path of the latest failed one."""
    error: str
    first_step: int
    """Step of the first failed one."""
    step: int
    """Step of the latest failed one."""
    failures: int
    """Number of consecutive failures."""
    kept: str
    """The newest complete checkpoint; empty: none."""


class Checkpoints:
    """Judges the checkpoints of one job."""

    def __init__(self) -> None:
        self._facts: CheckpointFacts | None = None

    def failed(self, message: CheckpointFailed) -> list[Finding]:
        """Process a failed checkpoint."""
        before = self._facts
        self._facts = CheckpointFacts(
            message.path,
            message.error,
            before.first_step if before is not None else message.step,
            message.step,
            before.failures + 1 if before is not None else 1,
            message.kept,
        )
        return [_finding(self._facts, "raised" if before is None else "updated")]

    def complete(self, message: Checkpoint) -> list[Finding]:
        """Process a complete checkpoint."""
        del message
        return self.reset()

    def reset(self) -> list[Finding]:
        """Reset for another job; return the resolved finding, if any."""
        facts, self._facts = self._facts, None
        return [_finding(facts, "resolved")] if facts is not None else []


def _finding(facts: CheckpointFacts, state: State) -> Finding:
    return Finding("checkpoint_failed", facts, state, "error", step=facts.step)


def _checkpoint(finding: Finding) -> Words:
    facts: CheckpointFacts = finding.facts
    error, path = sanitize(facts.error, 120), sanitize(facts.path, 160)
    again = f"{facts.failures} checkpoints in a row" if facts.failures > 1 else "a checkpoint"
    kept = f"The newest complete one is {sanitize(facts.kept, 160)}." if facts.kept else "There is no complete one."
    return Words(
        f"{again} could not be written, at step {facts.step}: {error}",
        f"{path}: {error}. Training continues. {kept} What was trained since then is lost if the run ends now.",
        "Free space on that disk, or make its folder writable again; the next checkpoint is tried as planned.",
        "A later checkpoint is complete.",
    )


_SHOWN: dict[str, Shown] = {
    "kept": Shown("what is kept"),
}

KINDS = (Kind("checkpoint_failed", CheckpointFacts, _checkpoint, shown=_SHOWN, lasting=True),)
