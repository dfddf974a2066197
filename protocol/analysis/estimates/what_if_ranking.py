"""What-if: predicted configurations, ranked with the cheapest fitting one first."""

from collections.abc import Iterable

import msgspec


class Option(msgspec.Struct, frozen=True):
    """A configuration with its predicted figures."""

    name: str
    """Display name of the change: ``checkpointing``, ``ZeRO 3``."""
    peak_bytes: int
    """Highest use of the device that decides whether it fits: reserved and what is beside it."""
    step_seconds: float
    samples_per_step: int = 1
    gpus: int = 1
    host_bytes: int = 0
    change: str = ""
    """The keys to set."""
    refused: str = ""
    """Why it could not be predicted; its figures do not count then."""


class Ranked(msgspec.Struct, frozen=True):
    """An option beside the configuration as it is."""

    option: Option
    fits: bool
    lacking_bytes: int
    """What is missing on the device and on the host; 0 where it fits."""
    saved_bytes: int
    """Less than the configuration as it is; negative: more."""
    slower: float
    """Time a sample over that of the configuration as it is, 1 for as fast."""
    cost_per_sample: float | None
    """Price of the GPU time of a sample; None without a price."""


def rank(
    base: Option,
    options: Iterable[Option],
    capacity_bytes: int,
    host_capacity_bytes: int | None = None,
    price_per_gpu_hour: float | None = None,
) -> list[Ranked]:
    """Rank options: those that fit by GPU time a sample, then the others by missing bytes, then refused ones.

    GPU time a sample is what is paid for, so the order does not depend on the price.

    Args:
        base: the configuration as it is; not in the result unless it is among the options.
        options: to rank.
        capacity_bytes: of the device.
        host_capacity_bytes: of the host; None: not known, any host use fits.
        price_per_gpu_hour: in any currency.
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
