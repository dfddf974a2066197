"""The largest length or batch that fits, of several capacities at once, by few rounds of dry runs."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

import msgspec

_PROBES = 4
"""Values of the first round: both ends, and others between them that rise by one factor."""
_LINES = 3
"""Rounds after which the intervals are halved, too."""


class Need(NamedTuple):
    """Memory that a value needs."""

    peak_bytes: float
    fits: Sequence[bool]
    """Whether it fits, by capacity."""


class Largest(msgspec.Struct, frozen=True):
    """The result for one capacity."""

    value: int | None
    """The largest that fits; no smaller value was found that does not. None: the lowest does not fit."""
    above: int | None
    """The smallest value known not to fit; None: the highest one fits."""


def round_numbers(most: int, step: int = 1) -> list[int]:
    """Return multiples of ``step`` up to ``most``, large ones at most 0.8 % apart: of eight binary digits."""
    found = [number << shift for shift in range(most.bit_length()) for number in range(128 if shift else 1, 256)]
    return sorted({*(step * number for number in found if step * number <= most), most // step * step or step})


def largest_that_fit(
    values: Sequence[int],
    capacities: Sequence[float],
    run: Callable[[list[int]], Sequence[Need]],
    confirm: Sequence[float] = (),
) -> list[Largest]:
    """Return the largest of some rising values that fits, by capacity.

    A round runs several values at once: for each capacity the two around the place where the line through the nearest
    known peaks meets it. Whether a value fits may disagree with its peak near a capacity, and need not be monotone: the
    result is below the lowest value that was found not to fit.

    Args:
        values: rising, above 0.
        capacities: in bytes.
        run: tells what values take, which are given in rising order, each once.
        confirm: shares of a result that must fit, too.
    """
    known: dict[int, Need] = {}
    wanted = set(_probes(values))
    for turn in count():
        if not wanted:
            break
        asked = sorted(wanted)
        known.update(zip(asked, run([values[index] for index in asked]), strict=True))
        rising = sorted(known)
        brackets = [_bracket(values, known, rising, number) for number in range(len(capacities))]
        wanted = {
            index
            for bracket, capacity in zip(brackets, capacities, strict=True)
            for index in _next(values, known, bracket, capacity, halve=turn >= _LINES)
            or _unconfirmed(values, known, bracket, confirm)
        }
    return [_found(values, _bracket(values, known, sorted(known), number)) for number in range(len(capacities))]


def _probes(values: Sequence[int]) -> list[int]:
    last = len(values) - 1
    ratio = values[last] / values[0]
    between = (values[0] * ratio ** (number / (_PROBES - 1)) for number in range(1, _PROBES - 1))
    return [0, *(bisect_left(values, value, 0, last) for value in between), last]


def _bracket(values: Sequence[int], known: dict[int, Need], rising: list[int], number: int) -> tuple[int, int]:
    """Return the largest index that fits with none below it that does not (or -1), and the first that does not."""
    above = next((index for index in rising if not known[index].fits[number]), len(values))
    return max((index for index in rising if index < above), default=-1), above


def _next(
    values: Sequence[int], known: dict[int, Need], bracket: tuple[int, int], capacity: float, halve: bool
) -> set[int]:
    """Return what to run next for one capacity; nothing where it is settled."""
    low, high = bracket
    if low < 0 or high == len(values) or high - low <= 1:
        return set()  # both ends are always known
    rise = (known[high].peak_bytes - known[low].peak_bytes) / (values[high] - values[low])
    target = values[low] + (capacity - known[low].peak_bytes) / rise if rise > 0 else values[low]
    first = bisect_right(values, target, low, high) - 1
    # Where a curve bends, or peaks and verdicts disagree, lines come near from one side, and slowly.
    wanted = (first, first + 1, (low + high) // 2) if halve else (first, first + 1)
    return {min(max(index, low + 1), high - 1) for index in wanted}


def _unconfirmed(
    values: Sequence[int], known: dict[int, Need], bracket: tuple[int, int], confirm: Sequence[float]
) -> set[int]:
    if bracket[0] < 0:
        return set()
    places = (bisect_left(values, values[bracket[0]] * share) for share in confirm)
    return {place for place in places if place not in known}


def _found(values: Sequence[int], bracket: tuple[int, int]) -> Largest:
    low, high = bracket
    return Largest(values[low] if low >= 0 else None, values[high] if high < len(values) else None)
