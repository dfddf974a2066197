"""Robust statistics of a few recent values."""

from collections.abc import Sequence
from typing import NamedTuple

from ..health.recent import MAD_TO_SIGMA

FEW = 8
"""With fewer values than this the maximum counts as typical, because they show too little of the usual variation."""


class Usual(NamedTuple):
    """``typical``: the median, or the maximum of few values. ``middle``: the median. ``spread``: a robust sigma."""

    typical: int
    middle: int
    spread: float


def usual_of(values: Sequence[int]) -> Usual:
    """Return the statistics of recent values (any unit); zeros for an empty list."""
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        return Usual(0, 0, 0.0)
    middle = ordered[count // 2]
    deviations = sorted([abs(value - middle) for value in ordered])
    typical = ordered[-1] if count < FEW else middle
    return Usual(typical, middle, MAD_TO_SIGMA * deviations[count // 2])
