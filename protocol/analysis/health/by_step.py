"""One value of each rank by step, until every rank has reported the step."""

from typing import Generic, TypeVar

KEPT = 16
"""Number of steps kept for late ranks."""

Value = TypeVar("Value")


class RanksByStep(Generic[Value]):
    """Collects one value per rank; a step is complete when all known ranks, at least two, have reported it."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, Value]] = {}
        self._ranks: set[int] = set()

    def add(self, step: int, rank: int, value: Value) -> dict[int, Value] | None:
        """Add a rank's value; return all values of the step, by rank, once it is complete, else None."""
        self._ranks.add(rank)
        values = self._steps.setdefault(step, {})
        values[rank] = value
        while len(self._steps) > KEPT:
            self._steps.pop(min(self._steps))
        if len(values) < max(2, len(self._ranks)):
            return None
        return self._steps.pop(step, None)

    def drop(self, rank: int) -> None:
        """Expect no more values of a rank."""
        self._ranks.discard(rank)
