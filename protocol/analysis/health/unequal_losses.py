"""Ranks with different losses for the same inputs: replicas whose parameters or computations differ.

Ranks send the loss of sampled batches with a fingerprint of the inputs (``BatchLoss``). Usually ranks have different
batches, and nothing is compared. Ranks with equal fingerprints in a step must have equal losses: a difference counts if
it is above ``precision`` (sent by the rank) of the larger of the loss and ``SHARE_OF_LARGEST`` of the largest loss so
far, because losses near zero are sums that cancel, and above ``LEAST``. Raised at the second consecutive such step;
resolved after ``EQUAL_CHECKS`` consecutive steps without one. Non-finite losses are left to ``nonfinite``.
"""

import math

import msgspec

from ...messages.health import BatchLoss
from ..findings import Finding
from .by_step import RanksByStep
from .recent import median

CHECKS = 2
EQUAL_CHECKS = 3
SHARE_OF_LARGEST = 0.01
LEAST = 1e-6
SHOWN = 8


class UnequalLossFacts(msgspec.Struct, frozen=True):
    """Ranks with the same inputs, and their losses."""

    step: int
    """The latest step at which they differed."""
    first_step: int
    ranks: tuple[int, ...]
    """Ranks with the same inputs."""
    losses: tuple[tuple[int, float], ...]
    """Ranks and losses, the most different first; at most ``SHOWN``."""
    odd_ranks: tuple[int, ...]
    """Ranks that differ from the majority; empty: no majority."""
    difference: float
    """Difference of the highest and the lowest loss, relative to the loss."""
    precision: float


class UnequalLosses:
    """Compares the losses of ranks that had the same inputs."""

    def __init__(self) -> None:
        self._steps = RanksByStep[BatchLoss]()
        self._largest = 0.0
        self._differing = self._equal = 0
        self._first = 0
        self._facts: UnequalLossFacts | None = None

    def batch_loss(self, message: BatchLoss) -> list[Finding]:
        """Add one rank's loss of one step; compare the losses once all ranks have sent theirs."""
        if math.isfinite(message.loss):
            self._largest = max(self._largest, abs(message.loss))
        losses = self._steps.add(message.step, message.rank, message)
        return self._compare(message.step, losses) if losses is not None else []

    def drop(self, rank: int) -> None:
        """Stop waiting for a rank that ended."""
        self._steps.drop(rank)

    def reset(self) -> list[Finding]:
        """Reset; return the resolved finding, if any."""
        facts = self._facts
        self.__init__()
        return [_finding(facts, "resolved", None)] if facts is not None else []

    def _compare(self, step: int, losses: dict[int, BatchLoss]) -> list[Finding]:
        alike: dict[str, dict[int, BatchLoss]] = {}
        for rank, found in sorted(losses.items()):
            if math.isfinite(found.loss):
                alike.setdefault(found.inputs, {})[rank] = found
        groups = [group for group in alike.values() if len(group) > 1]
        if not groups:
            return []
        worst = max((self._judge(step, group) for group in groups), key=lambda facts: facts.difference)
        if not worst.ranks:
            return self._alike(step)
        self._equal = 0
        self._differing += 1
        if self._differing == 1:
            self._first = step
        if self._differing < CHECKS:
            return []
        state = "raised" if self._facts is None else "updated"
        self._facts = msgspec.structs.replace(worst, first_step=self._first)
        return [_finding(self._facts, state, step)]

    def _judge(self, step: int, group: dict[int, BatchLoss]) -> UnequalLossFacts:
        """Return the difference of one group's losses; without ranks if it does not count."""
        losses = {rank: found.loss for rank, found in group.items()}
        precision = max(found.precision for found in group.values())
        level = max(abs(loss) for loss in losses.values())
        limit = precision * max(level, SHARE_OF_LARGEST * self._largest) + LEAST
        spread = max(losses.values()) - min(losses.values())
        if spread <= limit:
            return UnequalLossFacts(step, step, (), (), (), 0.0, precision)
        middle = median(losses.values())
        away = {rank: abs(loss - middle) for rank, loss in losses.items()}
        odd = tuple(rank for rank, by in away.items() if by > limit / 2)
        ordered = sorted(losses.items(), key=lambda one: (-away[one[0]], one[0]))[:SHOWN]
        is_majority = len(odd) * 2 < len(losses)
        return UnequalLossFacts(
            step, step, tuple(losses), tuple(ordered), odd if is_majority else (), spread / level, precision
        )

    def _alike(self, step: int) -> list[Finding]:
        self._equal += 1
        self._differing = 0
        facts = self._facts
        if facts is None or self._equal < EQUAL_CHECKS:
            return []
        self._facts = None
        return [_finding(facts, "resolved", step)]


def _finding(facts: UnequalLossFacts, state: str, step: int | None) -> Finding:
    return Finding("unequal_losses", facts, state, "warning", facts.odd_ranks or facts.ranks, step=step)  # type: ignore[arg-type]
