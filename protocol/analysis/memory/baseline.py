"""Usual value of a few recent ones: robust against outliers."""

from collections.abc import Sequence
from typing import NamedTuple

from ..health.recent import MAD_TO_SIGMA

FEW = 8
"""With fewer values than this the largest stands for the usual one: too little is known to call anything unusual."""


class Usual(NamedTuple):
    """``typical``: the median, or the maximum of few values. ``middle``: the median. ``spread``: a robust sigma."""

    typical: int
    middle: int
    spread: float


def usual_of(values: Sequence[int]) -> Usual:
    """Describe recent values (any unit); zeros for none."""
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        return Usual(0, 0, 0.0)
    middle = ordered[count // 2]
    deviations = sorted([abs(value - middle) for value in ordered])
    typical = ordered[-1] if count < FEW else middle
    return Usual(typical, middle, MAD_TO_SIGMA * deviations[count // 2])
