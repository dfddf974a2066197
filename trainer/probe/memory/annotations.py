"""Writes the phases of the last steps into memory snapshots, as annotations that PyTorch's own viewer shows too.

PyTorch keeps named spans beside its trace (``external_annotations``: a start and an end, each with a device and a time
in microseconds since 1970). A snapshot is a plain dictionary before it is pickled, so ftmon adds its steps and phases
to that list: ``ftmon step 12``, ``ftmon forward``. Only the publisher thread spends time on it.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ....protocol.snapshot.model import OWN_SPAN
from ..phases.marks import Mark, wall_offset_ns

_STEPS = 256
"""Number of steps kept: more than any recording of the allocator covers."""

_Begun = tuple[str, int]
"""A phase, and when it began (``time.perf_counter_ns``)."""


class PhaseMarks:
    """The phases of the last finished steps. ``note`` is for one thread, the rest for any."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, list[_Begun]]] = deque(maxlen=_STEPS)

    def note(self, step: int, marks: Sequence[Mark]) -> None:
        """Record a finished step; its last mark is its end."""
        self._steps.append((step, _begun(marks)))

    def annotate(self, found: dict[str, Any], device: int, step: int, marks: Sequence[Mark]) -> None:
        """Add the phases to a snapshot, those of the step under way last."""
        offset_ns = wall_offset_ns()
        now = time.perf_counter_ns()
        steps = [*self._steps, (step, [*_begun(marks), ("", now)])]
        spans = found.setdefault("external_annotations", [])
        for number, begun in steps:
            for name, begin, end in _spans(number, begun):
                for stage, at in (("START", begin), ("END", end)):
                    time_us = (at + offset_ns) // 1000
                    spans.append({"name": OWN_SPAN + name, "stage": stage, "device": device, "time_us": time_us})


def _begun(marks: Iterable[Mark]) -> list[_Begun]:
    return [(mark.phase, mark.ns) for mark in marks]


def _spans(step: int, begun: list[_Begun]) -> Iterator[tuple[str, int, int]]:
    """Yield the step, then its phases: name, begin, end. A mark without a phase continues the previous one."""
    if len(begun) < 2:
        return
    yield f"step {step}", begun[0][1], begun[-1][1]
    name, since = begun[0]
    for phase, ns in begun[1:-1]:
        if phase and phase != name:
            yield name, since, ns
            name, since = phase, ns
    yield name, since, begun[-1][1]
