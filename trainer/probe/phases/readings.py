"""Memory figures of a step's marks, and the mark at which a step begins. Pure functions."""

from collections.abc import Callable
from typing import Any

from ..device.reading import Reading
from .marks import Mark


def first_of_step(marks: list[Mark]) -> int:
    """Return the index of a step's first mark, or of the end of start-up.

    Checkpoints saved or loaded during start-up are part of ``init``.
    """
    starts = [place for place, mark in enumerate(marks[:-1]) if mark.phase == "init"]
    for place in range(starts[-1] + 1 if starts else 0, len(marks)):
        if marks[place].phase:
            return place
    return 0


def lend_events(marks: list[Mark]) -> list[Mark]:
    """Give marks without figures the device event of the next mark: no kernel is launched in between."""
    found = list(marks)
    for place in range(len(found) - 2, -1, -1):
        if found[place].memory is None:
            found[place] = found[place]._replace(event=found[place + 1].event)
    return found


def readings(marks: list[Mark], read: Callable[[Any], Reading]) -> list[Reading]:
    """Return every mark's figures; a mark without figures has those of the next mark with figures.

    The peak since the mark before it belongs to the phase before it, not to the following one.
    """
    found: list[Reading] = []
    waiting = 0
    latest: Any = None
    for mark in marks:
        if mark.memory is None:
            waiting += 1
            continue
        reading = read(mark.memory)
        if mark.memory is latest:
            reading = reading.without_peaks()
        latest = mark.memory
        if waiting:
            found.append(reading)
            found.extend([reading.without_peaks()] * waiting)
            waiting = 0
        else:
            found.append(reading)
    return found
