"""Preserves the script's view of its peak memory on the CPU: ``resource.getrusage`` stays as without ftmon.

The probe resets the kernel's resident high-water mark at every phase; ``ru_maxrss`` is that mark, so the highest one
ever reset is put back into the values that the script reads.
"""

import resource
from typing import Any

real_getrusage: Any = resource.getrusage
highest_kib = 0
"""The highest mark, KiB, that the probe has reset or the script has read so far."""


def note(peak_kib: int) -> None:
    """Record a high-water mark that is about to be reset."""
    global highest_kib
    if peak_kib > highest_kib:
        highest_kib = peak_kib


def forget() -> None:
    """In a fork, whose own mark begins with what is resident then: the marks were the parent's."""
    global highest_kib
    highest_kib = 0


def getrusage(who: int, /) -> Any:
    """As ``resource.getrusage``, with the true ``ru_maxrss`` of this process, which never falls."""
    usage = real_getrusage(who)
    if who != resource.RUSAGE_SELF:
        return usage
    if usage.ru_maxrss >= highest_kib:
        note(usage.ru_maxrss)
        return usage
    fields = list(usage)
    fields[2] = highest_kib
    return type(usage)(fields)


def install() -> None:
    """Replace ``resource.getrusage`` by the corrected function."""
    getrusage.__doc__ = real_getrusage.__doc__
    setattr(resource, "getrusage", getrusage)  # noqa: B010  (a C module: no declared attribute)
