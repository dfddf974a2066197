"""Judges whether a run fits: the highest peak over the ranks relative to their devices' capacity."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .rank import RankModel

TIGHT_FRACTION = 0.92
"""Above this share of the device a run is called tight: fragmentation alone can then end it."""

STEADY_STEPS = 2
"""Steps after which a peak is representative: the first optimizer step creates Adam's states."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The rank nearest to its device's capacity."""

    verdict: Literal["unknown", "fits", "tight", "failed"]
    """``unknown``: too few steps, or no capacity; ``failed``: a rank ran out of memory."""
    rank: int | None = None
    peak_bytes: int = 0
    reserved_bytes: int = 0
    """Highest reserved bytes of that rank: what the device must provide."""
    capacity_bytes: int = 0
    phase: str = ""
    step: int = 0

    @property
    def free_bytes(self) -> int:
        """Device memory that the peak leaves free."""
        return self.capacity_bytes - self.peak_bytes

    @property
    def fraction(self) -> float:
        """The peak's share of the device; 0 when its capacity is unknown."""
        return self.peak_bytes / self.capacity_bytes if self.capacity_bytes else 0.0


def fit(ranks: Iterable[RankModel]) -> Fit:
    """Judge whether the run fits, by the rank whose peak is the largest share of its device."""
    found: Fit | None = None
    failed = steady = False
    for rank in ranks:
        failed = failed or rank.oom is not None
        steady = steady or rank.step >= STEADY_STEPS
        peak = rank.peak
        if peak is None or not rank.capacity_bytes:
            continue
        this = Fit("fits", rank.rank, peak.bytes, rank.reserved_peak, rank.capacity_bytes, peak.phase, peak.step)
        if found is None or this.fraction > found.fraction:
            found = this
    if found is None:
        return Fit("failed" if failed else "unknown")
    verdict: Literal["unknown", "fits", "tight", "failed"] = "fits"
    if failed:
        verdict = "failed"
    elif not steady:
        verdict = "unknown"
    elif found.fraction > TIGHT_FRACTION:
        verdict = "tight"
    return Fit(
        verdict, found.rank, found.peak_bytes, found.reserved_bytes, found.capacity_bytes, found.phase, found.step
    )
