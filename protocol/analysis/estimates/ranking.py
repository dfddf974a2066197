"""Ranks predicted configurations (what-if), and finds the largest length or batch that fits in few dry runs."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import NamedTuple

import msgspec

_PROBES = 4  # number of values in the first round: both ends, and values in geometric progression between them
_LINES = 3  # number of rounds after which the intervals are also halved


class Need(NamedTuple):
    """Memory needed by a value."""

    peak_bytes: float
    fits: Sequence[bool]  # whether it fits, by capacity


class Largest(msgspec.Struct, frozen=True):
    """The result for one capacity."""

    value: int | None  # the largest that fits, below the first one found not to fit. None: the lowest does not fit
    above: int | None  # the smallest value known not to fit; None: the highest one fits


def round_numbers(most: int, step: int = 1) -> list[int]:
    """Return multiples of ``step`` up to ``most``; large ones have eight binary digits, so at most 0.8 % apart."""
    found = [number << shift for shift in range(most.bit_length()) for number in range(128 if shift else 1, 256)]
    return sorted({*(step * number for number in found if step * number <= most), most // step * step or step})


def largest_that_fit(
    values: Sequence[int],
    capacities: Sequence[float],
    run: Callable[[list[int]], Sequence[Need]],
    confirm: Sequence[float] = (),
) -> list[Largest]:
    """Return the largest of some ascending values that fits, for each capacity.

    A round runs several values at once: for each capacity the two around the crossing of the capacity with the line
    through the nearest known peaks. Whether a value fits may contradict its peak near a capacity, and need not be
    monotone: the result is below the lowest value that was found not to fit. ``run`` returns the needs of values,
    passed in ascending order, each once; ``confirm``: shares of a result that must fit too.
    """
    known: dict[int, Need] = {}
    wanted = set(_probes(values))
    brackets: list[tuple[int, int]] = []
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
    return [
        Largest(values[low] if low >= 0 else None, values[high] if high < len(values) else None)
        for low, high in brackets
    ]


def _probes(values: Sequence[int]) -> list[int]:
    last = len(values) - 1
    ratio = values[last] / values[0]
    between = (values[0] * ratio ** (number / (_PROBES - 1)) for number in range(1, _PROBES - 1))
    return [0, *(bisect_left(values, value, 0, last) for value in between), last]


def _bracket(values: Sequence[int], known: dict[int, Need], rising: list[int], number: int) -> tuple[int, int]:
    """Return the first index that does not fit, and before it the largest index known to fit (or -1): low, high."""
    above = next((index for index in rising if not known[index].fits[number]), len(values))
    return max((index for index in rising if index < above), default=-1), above


def _next(
    values: Sequence[int], known: dict[int, Need], bracket: tuple[int, int], capacity: float, halve: bool
) -> set[int]:
    """Return the indices to run next for one capacity; empty if the result is known."""
    low, high = bracket
    if low < 0 or high == len(values) or high - low <= 1:
        return set()  # both ends are always known
    rise = (known[high].peak_bytes - known[low].peak_bytes) / (values[high] - values[low])
    target = values[low] + (capacity - known[low].peak_bytes) / rise if rise > 0 else values[low]
    first = bisect_right(values, target, low, high) - 1
    # If a curve bends, or peaks and results disagree, lines converge slowly and from one side.
    wanted = (first, first + 1, (low + high) // 2) if halve else (first, first + 1)
    return {min(max(index, low + 1), high - 1) for index in wanted}


def _unconfirmed(
    values: Sequence[int], known: dict[int, Need], bracket: tuple[int, int], confirm: Sequence[float]
) -> set[int]:
    if bracket[0] < 0:
        return set()
    places = (bisect_left(values, values[bracket[0]] * share) for share in confirm)
    return {place for place in places if place not in known}


class Option(msgspec.Struct, frozen=True):
    """A configuration with its predicted figures."""

    name: str  # display name of the change: `checkpointing`, `ZeRO 3`
    peak_bytes: int  # highest use of the device, which decides: reserved memory and memory outside PyTorch
    step_seconds: float
    samples_per_step: int = 1
    gpus: int = 1
    host_bytes: int = 0
    change: str = ""  # the keys to set
    refused: str = ""  # why it could not be predicted (its figures are then invalid); empty otherwise


class Ranked(msgspec.Struct, frozen=True):
    """An option compared with the current configuration."""

    option: Option
    fits: bool
    lacking_bytes: int  # bytes missing on the device; 0: it fits
    saved_bytes: int  # bytes less than the current configuration; negative: more
    slower: float  # time per sample relative to the current configuration; 1: equal


def rank(base: Option, options: Iterable[Option], capacity_bytes: int) -> list[Ranked]:
    """Rank options: fitting ones by GPU time per sample, then the others by missing bytes, then refused ones.

    The cost is proportional to the GPU time per sample, so the order does not depend on the price. ``base``: the
    current configuration; in the result only if it is among the options.
    """
    return sorted((_judge(base, one, capacity_bytes) for one in options), key=_order)


def _judge(base: Option, one: Option, capacity: int) -> Ranked:
    lacking = max(0, one.peak_bytes - capacity)
    slower = _gpu_seconds(one) / _gpu_seconds(base) if _gpu_seconds(base) else 1.0
    return Ranked(one, not one.refused and not lacking, lacking, base.peak_bytes - one.peak_bytes, slower)


def _gpu_seconds(one: Option) -> float:
    return one.step_seconds * one.gpus / max(1, one.samples_per_step)


def _order(one: Ranked) -> tuple[int, float, int]:
    if one.option.refused:
        return 2, 0.0, 0
    if one.fits:
        return 0, _gpu_seconds(one.option), one.option.peak_bytes
    return 1, float(one.lacking_bytes), one.option.peak_bytes
