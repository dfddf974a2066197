"""Replicas that differ: ranks that should hold the same parameters but do not.

Ranks report checksums of a few parameters at the same steps (``Checksum``): the sum in double precision and the norm.
Equal parameters have equal sums up to rounding; ranks are compared parameter by parameter at the same step. A
difference counts from ``SAME`` of the norm on. From ``SERIOUS`` on it is an error; smaller ones are a drift in the last
bits, as caused by GPUs of different kinds or non-deterministic optimizers. Raised at the second check with a
difference. Resolved after ``EQUAL_CHECKS`` consecutive checks without one, once all parameters that differed are equal.
"""

import msgspec

from ...messages.health import Checksum, ParameterSum
from ..findings import Finding
from .by_step import RanksByStep

SAME = 1e-9
SERIOUS = 1e-4
CHECKS = 2
EQUAL_CHECKS = 3


class ReplicaFacts(msgspec.Struct, frozen=True):
    """The parameter that differs most, the ranks, and the size of the difference."""

    parameter: str
    """The parameter with the largest difference."""
    difference: float
    """Difference of its sums in units of its norm: about the relative size of the deviation."""
    odd_ranks: tuple[int, ...]
    """Ranks that differ from the most common value; empty: no majority."""
    first_step: int
    parameters: int
    """Number of ``checked`` parameters that differed at the latest check."""
    checked: int
    ranks_total: int


class Replicas:
    """Compares the checksums of all ranks."""

    def __init__(self) -> None:
        self._checks = RanksByStep[dict[str, ParameterSum]]()
        self._differing = self._equal = 0
        self._first = 0
        self._wanted: set[str] = set()
        """Parameters that differed and have not been equal since."""
        self._facts: ReplicaFacts | None = None
        self._severity = "warning"

    def checksum(self, message: Checksum) -> list[Finding]:
        """Add one rank's checksums of one step; compare them once all ranks have sent theirs."""
        sums = self._checks.add(message.step, message.rank, {one.name: one for one in message.parameters})
        return self._compare(message.step, sums) if sums is not None else []

    def drop(self, rank: int) -> None:
        """Stop waiting for a rank that ended."""
        self._checks.drop(rank)

    def reset(self) -> list[Finding]:
        """Reset; return the resolved finding, if any."""
        facts, severity = self._facts, self._severity
        self.__init__()
        return [_finding(facts, "resolved", severity, None)] if facts is not None else []

    def _compare(self, step: int, sums: dict[int, dict[str, ParameterSum]]) -> list[Finding]:
        ranks = sorted(sums)
        common = [name for name in sums[ranks[0]] if all(name in sums[rank] for rank in ranks)]
        worst, largest, differing = "", 0.0, 0
        for name in common:
            by = _difference([sums[rank][name] for rank in ranks])
            if by > SAME:
                differing += 1
                self._wanted.add(name)
            else:
                self._wanted.discard(name)
            if by > largest:
                worst, largest = name, by
        if not common:
            return []
        if largest <= SAME:
            return self._alike(step)
        self._equal = 0
        self._differing += 1
        if self._differing == 1:
            self._first = step
        if self._differing < CHECKS:
            return []
        odd = _odd({rank: sums[rank][worst] for rank in ranks})
        state = "raised" if self._facts is None else "updated"
        self._facts = ReplicaFacts(worst, largest, odd, self._first, differing, len(common), len(ranks))
        self._severity = "error" if largest >= SERIOUS or self._severity == "error" else "warning"
        return [_finding(self._facts, state, self._severity, step)]

    def _alike(self, step: int) -> list[Finding]:
        self._equal += 1
        if self._facts is None:
            if not self._wanted:
                self._differing = 0
            return []
        if self._equal < EQUAL_CHECKS or self._wanted:
            return []
        facts, severity = self._facts, self._severity
        self._facts, self._differing, self._severity = None, 0, "warning"
        return [_finding(facts, "resolved", severity, step)]


def _difference(sums: list[ParameterSum]) -> float:
    values = [one.total for one in sums]
    if any(value != value for value in values):  # NaN on all ranks is not a difference; NaN on some is
        return 0.0 if all(value != value for value in values) else 1.0
    low, high = min(values), max(values)
    norm = max(one.norm for one in sums)
    if high == low:
        return 0.0
    apart = max(one.norm for one in sums) - min(one.norm for one in sums)
    return max(high - low, apart) / norm if norm > 0 else 1.0


def _odd(sums: dict[int, ParameterSum]) -> tuple[int, ...]:
    ways: dict[float, list[int]] = {}
    for rank, one in sums.items():
        ways.setdefault(one.total, []).append(rank)
    ordered = sorted(ways.values(), key=len)
    if len(ordered) < 2 or len(ordered[-1]) * 2 <= len(sums):
        return ()
    return tuple(sorted(rank for ranks in ordered[:-1] for rank in ranks))


def _finding(facts: ReplicaFacts, state: str, severity: str, step: int | None) -> Finding:
    return Finding("replica_divergence", facts, state, severity, facts.odd_ranks, step=step)  # type: ignore[arg-type]
