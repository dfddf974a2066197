"""Bands over the entries of a trace: ftmon's steps and phases, named spans, user metadata."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from ...protocol.analysis.allocator.snapshot.allocations import columns
from ...protocol.analysis.allocator.snapshot.replay import Replay
from ...protocol.messages.telemetry import PHASES
from ...protocol.snapshot.model import OWN_SPAN, Annotation

MOST_BANDS = 20_000
"""Maximum number of bands per row; a profiler may record more annotations than a screen can show."""


class Band(NamedTuple):
    """A part of the trace, from the state after entry ``first`` to that after ``last``."""

    first: int
    last: int
    name: str
    phase: str = ""
    """Name of the phase, if it is one of ftmon's."""


def bands_of(replay: Replay) -> list[list[Band]]:
    """List the bands of a device, the row of phases first; empty rows are omitted.

    Only the outermost of nested spans are drawn; the text names all at the cursor.
    """
    spans = [span for span in replay.snapshot.annotations if span.device == replay.device]
    own = [span for span in spans if span.name.startswith(OWN_SPAN)]
    phases = [span for span in own if span.name.removeprefix(OWN_SPAN) in PHASES]
    steps = [span for span in own if span.name.removeprefix(OWN_SPAN) not in PHASES]
    others = [span for span in spans if not span.name.startswith(OWN_SPAN)]
    rows = [_row(replay, phases), _row(replay, steps), _row(replay, _outermost(others)), _notes(replay)]
    return [row for row in rows if row]


def _row(replay: Replay, spans: Iterable[Annotation]) -> list[Band]:
    """Convert times into entries; spans outside the trace are omitted."""
    times = columns(replay.trace.times, "q")
    if not replay.entries or not times[0]:
        return []
    found: list[Band] = []
    for span in spans:
        first, last = bisect_left(times, span.begin_us), bisect_right(times, span.end_us) - 1
        if first <= last:
            name = span.name.removeprefix(OWN_SPAN)
            found.append(Band(first, last, name, name if name in PHASES and name != span.name else ""))
    return found[:MOST_BANDS]


def _outermost(spans: list[Annotation]) -> list[Annotation]:
    """Return the spans that are not inside another; if one contains all others, those directly inside it."""
    # Sorted by beginning, longer ones first: if the first one ends last, it contains all others.
    furthest = max((span.end_us for span in spans[1:]), default=0)
    first = 0
    while first < len(spans) - 1 and spans[first].end_us >= furthest:
        first += 1
    found: list[Annotation] = []
    for span in spans[first:]:
        if not found or span.end_us > found[-1].end_us:
            found.append(span)
    return found


def _notes(replay: Replay) -> list[Band]:
    """Join neighbouring entries with the same user metadata."""
    notes = replay.snapshot.notes
    if len(notes) < 2:
        return []
    found: list[Band] = []
    at = 0
    for note, run in groupby(columns(replay.trace.notes, "I")):
        length = sum(1 for _ in run)
        if note:
            found.append(Band(at, at + length - 1, notes[note]))
        at += length
    return found[:MOST_BANDS]
