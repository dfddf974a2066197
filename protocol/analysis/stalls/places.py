"""Finds the line at which a straggler spends its excess time, from samples of its training thread's stack."""

from collections import Counter
from collections.abc import Sequence

from .python_stacks import Place

SAMPLES = 10
FEWEST = 3
_WAITING = ("collective", "exiting")
_IN_BACKWARD = ("backward",)


def usual_place(places: Sequence[Place], slow_at: str, share: float) -> str:
    """Return the most frequent line of the samples outside collectives; empty if none stands out.

    Args:
        places: positions of the samples, which are taken independently of the steps.
        slow_at: the slow phase: a sample inside ``backward`` is not evidence for another phase.
        share: the excess as a share of a step: the responsible line is in about that share of the samples.
    """
    other = () if slow_at in ("backward", "everywhere") else _IN_BACKWARD
    seen = Counter(place.text for place in places if place.text and place.doing not in (*_WAITING, *other))
    if not seen:
        return ""
    text, count = seen.most_common(1)[0]
    return text if count >= max(FEWEST, 0.5 * share * len(places)) else ""
