"""The largest length or batch that fits, by few calls of a predictor."""

from collections.abc import Callable
from itertools import count

import msgspec

_SECANTS = 4
"""Guesses by a straight line before the search halves."""


class Largest(msgspec.Struct, frozen=True):
    """The result of a search."""

    value: int | None
    """The largest that fits; None: not even the lowest does."""
    peak_bytes: float | None
    """Its peak."""
    at_the_end: bool
    """The highest value asked for fits: larger ones may, too."""
    tried: dict[int, float]
    """Peak bytes by value; of several searches together where they share it."""


def largest_that_fits(
    predict: Callable[[int], float],
    capacity_bytes: float,
    low: int,
    high: int,
    step: int = 1,
    tried: dict[int, float] | None = None,
) -> Largest:
    """Return the largest value between ``low`` and ``high`` whose peak is within the capacity.

    The peak must not fall as the value rises. The first guesses are where the line through the nearest two values
    meets the capacity, later ones the middle; the value above the result was tried.

    Args:
        predict: peak bytes at a value.
        capacity_bytes: what there is.
        low: lowest value.
        high: highest value.
        step: values are ``low`` and multiples of this above it.
        tried: peaks that are known already; those that are predicted are added.
    """
    tried = {} if tried is None else tried

    def peak(number: int) -> float:
        x = low + number * step
        if x not in tried:
            tried[x] = predict(x)
        return tried[x]

    fits, over = 0, (high - low) // step
    if peak(fits) > capacity_bytes:
        return Largest(None, None, False, tried)
    if peak(over) <= capacity_bytes:
        return Largest(low + over * step, peak(over), True, tried)
    for x, known in tried.items():
        number = (x - low) // step
        if fits < number < over and x == low + number * step:
            fits, over = (number, over) if known <= capacity_bytes else (fits, number)
    for turn in count():
        if over - fits <= 1:
            break
        guess = (fits + over) // 2
        if turn < _SECANTS:
            rise = (peak(over) - peak(fits)) / (over - fits)
            guess = min(max(fits + int((capacity_bytes - peak(fits)) / rise), fits + 1), over - 1)
        if peak(guess) > capacity_bytes:
            over = guess
            continue
        fits = guess
        if turn < _SECANTS and over - fits > 1 and peak(fits + 1) > capacity_bytes:
            over = fits + 1  # the curve is straight here: the value above settles the search
    value = low + fits * step
    return Largest(value, tried[value], False, tried)
