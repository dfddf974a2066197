"""At which line a straggler spends its excess, from samples of its training thread's stack."""

from collections import Counter
from collections.abc import Sequence

from .python_stacks import Place

SAMPLES = 10
FEWEST = 3
_WAITING = ("collective", "exiting")
_IN_BACKWARD = ("backward",)


def usual_place(places: Sequence[Place], slow_at: str, share: float) -> str:
    """Return the line where the thread was seen most, outside of collectives; empty where no line stands out.

    Args:
        places: of the samples, taken at moments that are independent of the steps.
        slow_at: the phase it is slow at: a sample inside ``backward`` is no evidence for another phase.
        share: of a step, the excess: a line that holds it is seen in about as many samples.
    """
    other = () if slow_at in ("backward", "everywhere") else _IN_BACKWARD
    seen = Counter(place.text for place in places if place.text and place.doing not in (*_WAITING, *other))
    if not seen:
        return ""
    text, count = seen.most_common(1)[0]
    return text if count >= max(FEWEST, 0.5 * share * len(places)) else ""
