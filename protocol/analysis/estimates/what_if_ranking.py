"""Ranks predicted configurations (what-if), the cheapest fitting one first."""

from collections.abc import Iterable

import msgspec


class Option(msgspec.Struct, frozen=True):
    """A configuration with its predicted figures."""

    name: str
    """Display name of the change: ``checkpointing``, ``ZeRO 3``."""
    peak_bytes: int
    """Highest use of the device, which decides whether it fits: reserved memory and memory outside PyTorch."""
    step_seconds: float
    samples_per_step: int = 1
    gpus: int = 1
    host_bytes: int = 0
    change: str = ""
    """The keys to set."""
    refused: str = ""
    """Why it could not be predicted (its figures are then invalid); empty otherwise."""


class Ranked(msgspec.Struct, frozen=True):
    """An option compared with the current configuration."""

    option: Option
    fits: bool
    lacking_bytes: int
    """Bytes missing on the device and on the host; 0: it fits."""
    saved_bytes: int
    """Bytes less than the current configuration; negative: more."""
    slower: float
    """Time per sample relative to the current configuration; 1: equal."""
    cost_per_sample: float | None
    """Price of the GPU time of a sample; None without a price."""


def rank(
    base: Option,
    options: Iterable[Option],
    capacity_bytes: int,
    host_capacity_bytes: int | None = None,
    price_per_gpu_hour: float | None = None,
) -> list[Ranked]:
    """Rank options: fitting ones by GPU time per sample, then the others by missing bytes, then refused ones.

    The cost is proportional to the GPU time per sample, so the order does not depend on the price.

    Args:
        base: the current configuration; in the result only if it is among the options.
        host_capacity_bytes: memory of the host; None: unknown, any use fits.
    """
    known = [_judge(base, one, capacity_bytes, host_capacity_bytes, price_per_gpu_hour) for one in options]
    return sorted(known, key=_order)


def _judge(base: Option, one: Option, capacity: int, host_capacity: int | None, price: float | None) -> Ranked:
    lacking = max(0, one.peak_bytes - capacity) + max(0, one.host_bytes - (host_capacity or one.host_bytes))
    gpu_seconds = _gpu_seconds(one)
    return Ranked(
        one,
        not one.refused and not lacking,
        lacking,
        base.peak_bytes - one.peak_bytes,
        gpu_seconds / _gpu_seconds(base) if _gpu_seconds(base) else 1.0,
        None if price is None else gpu_seconds / 3600 * price,
    )


def _gpu_seconds(one: Option) -> float:
    return one.step_seconds * one.gpus / max(1, one.samples_per_step)


def _order(one: Ranked) -> tuple[int, float, int]:
    if one.option.refused:
        return 2, 0.0, 0
    if one.fits:
        return 0, _gpu_seconds(one.option), one.option.peak_bytes
    return 1, float(one.lacking_bytes), one.option.peak_bytes
