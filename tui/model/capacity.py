"""Judges whether a run fits: the highest peak over the ranks relative to their devices' capacity."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from .rank import RankModel

TIGHT_FRACTION = 0.92
"""Above this share of the device a run is called tight: fragmentation alone can then end it."""

STEADY_STEPS = 2
"""Steps after which a peak is representative: the first optimizer step creates Adam's states."""


class Fit(NamedTuple):
    """The verdict, and the rank nearest to its device's capacity."""

    verdict: Literal["unknown", "fits", "tight", "failed"]
    """``unknown``: too few steps, or no capacity; ``failed``: a rank ran out of memory."""
    rank: int | None = None
    capacity_bytes: int = 0


def fit(ranks: Iterable[RankModel]) -> Fit:
    """Judge whether the run fits, by the rank whose peak is the largest share of its device."""
    ranks = list(ranks)
    known = [(rank.peak.bytes / rank.capacity_bytes, rank) for rank in ranks if rank.peak and rank.capacity_bytes]
    fraction, nearest = max(known, key=lambda one: one[0], default=(0.0, None))
    where = (nearest.rank, nearest.capacity_bytes) if nearest is not None else (None, 0)
    if any(rank.oom is not None for rank in ranks):
        return Fit("failed", *where)
    if nearest is None or all(rank.step < STEADY_STEPS for rank in ranks):
        return Fit("unknown", *where)
    return Fit("tight" if fraction > TIGHT_FRACTION else "fits", *where)
