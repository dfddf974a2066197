"""Two small tables that index the messages which explain memory: marks of the phases' peaks, and explanations.

``marks`` has the steps in which a phase reached a new highest peak with batches of that size. ``explained`` has the
stream numbers of the compositions with a rank's highest peak so far, and of the causes of transients. Both are derived
from the stream, and made again if they were lost.
"""

import json
import sqlite3
from collections.abc import Callable
from typing import Any

import msgspec

from ..messages.bounds import MAX_RANKS
from ..messages.jobs import Job
from ..messages.memory import Cause, Composition
from ..messages.telemetry import Step
from ..messages.wire import Message
from .jobs import shown_since
from .phase_peaks import PeakMark, PhasePeaks

Row = tuple[Any, ...]


MARK_LIMIT = 100_000
"""Maximum number of marks read."""


class Marks:
    """Derives the rows of both tables from the stream; ``emit(table, row)`` is called for each row."""

    def __init__(self, emit: Callable[[str, Row], None]) -> None:
        self._emit = emit
        self._peaks: dict[int, PhasePeaks] = {}
        self._composed: dict[int, int] = {}
        """Highest analysed peak of each rank, bytes."""
        self._job = 0

    def load(self, connection: sqlite3.Connection) -> None:
        """Continue where an earlier writer of this file ended."""
        since = shown_since(connection, 1 << 62)
        for mark in read_marks(connection, since):
            self._of(mark.rank).put(mark)
        highest = "SELECT rank, max(bytes) FROM explained WHERE kind = 'composition' AND seq >= ? GROUP BY rank"
        self._composed = dict(connection.execute(highest, (since,)).fetchall())
        last = "SELECT number FROM jobs WHERE shown ORDER BY seq DESC LIMIT 1"
        self._job = next((number for (number,) in connection.execute(last)), 0)

    def step(self, seq: int, step: Step) -> None:
        """Add a step."""
        for mark in self._of(step.rank).see(step):
            shape = json.dumps(mark.shape) if mark.shape else None
            self._emit("marks", (mark.rank, seq, mark.step, mark.phase, mark.bytes, shape))

    def message(self, seq: int, message: Message) -> None:
        """Add any other message; most are ignored."""
        if isinstance(message, Cause):
            row = (seq, "cause", message.rank, message.step, message.phase, message.transient_bytes)
            self._emit("explained", row)
        elif isinstance(message, Composition):
            top = message.peak_phase
            if top is not None and top.peak_bytes > self._composed.get(message.rank, 0):
                self._composed[message.rank] = top.peak_bytes
                row = (seq, "composition", message.rank, message.step, top.name, top.peak_bytes)
                self._emit("explained", row)

    def job(self, job: Job) -> None:
        """Reset with each new job in the stream: its peaks are compared only with its own."""
        if job.shown and not job.is_over and job.number != self._job:
            self._job = job.number
            self._peaks.clear()
            self._composed.clear()

    def _of(self, rank: int) -> PhasePeaks:
        found = self._peaks.get(rank)
        if found is None:
            found = self._peaks[rank] = PhasePeaks()
        return found


def read_marks(connection: sqlite3.Connection, first: int = 0, last: int = 1 << 62) -> list[PeakMark]:
    """Read the marks set between two stream numbers, by rank and then in the order they were set."""
    query = f"""SELECT rank, step, phase, bytes, shape FROM marks WHERE seq BETWEEN ? AND ?
        ORDER BY rank, seq LIMIT {MARK_LIMIT}"""
    return [
        PeakMark(rank, step, phase, size, _shape(shape))
        for rank, step, phase, size, shape in connection.execute(query, (first, last))
        if rank.__class__ is int and 0 <= rank < MAX_RANKS
    ]


def explained_seqs(connection: sqlite3.Connection, seq: int, first: int = 0) -> list[int]:
    """Return the numbers of each rank's composition with the highest peak and of the last cause of each of its phases.

    Only the numbers from ``first`` to ``seq`` are searched.
    """
    query = """SELECT max(seq) FROM explained WHERE seq BETWEEN ? AND ?
        GROUP BY kind, rank, CASE kind WHEN 'cause' THEN phase END"""
    return [found for (found,) in connection.execute(query, (first, seq))]


def _shape(text: str | None) -> list[int]:
    try:
        return msgspec.json.decode(text, type=list[int]) if text else []
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return []
