"""Checkpoints that could not be written: the run continues, and what it does since the last complete one is not safe.

Raised at the first that failed, updated at each further one, resolved by the next that is complete.
"""

import msgspec

from ...messages.telemetry import Checkpoint, CheckpointFailed
from ..findings import Finding


class CheckpointFacts(msgspec.Struct, frozen=True):
    """What failed, and what there is to go on from."""

    path: str
    """Where the latest that failed would have been."""
    error: str
    first_step: int
    """Step of the first that failed."""
    step: int
    """Step of the latest that failed."""
    failures: int
    """That failed in a row."""
    kept: str
    """The newest complete one; empty: there is none."""


class Checkpoints:
    """Judges the checkpoints of one job."""

    def __init__(self) -> None:
        self._facts: CheckpointFacts | None = None

    def failed(self, message: CheckpointFailed) -> list[Finding]:
        """Take in a checkpoint that failed."""
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
        """Take in a complete checkpoint."""
        del message
        return self.reset()

    def reset(self) -> list[Finding]:
        """Forget everything: another job begins. Returns the end of what stood."""
        facts, self._facts = self._facts, None
        return [_finding(facts, "resolved")] if facts is not None else []


def _finding(facts: CheckpointFacts, state: str) -> Finding:
    return Finding("checkpoint_failed", facts, state, "error", step=facts.step)  # type: ignore[arg-type]
