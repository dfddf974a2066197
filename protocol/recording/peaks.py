"""Finds the step of a rank's highest memory peak so far with a few small lookups in the pooled rows."""

import sqlite3

from .pooling import pieces
from .schema import ROLLUP_SIZES

_PEAK = "coalesce(resident_peak, allocated_peak)"
"""The figure whose peak is a true high-water mark: the resident set on the CPU, else the allocated memory."""

_HIGHEST_POOLED = f"""SELECT {_PEAK}, first_seq, last_seq FROM rollups
    WHERE level = ? AND rank = ? AND last_seq BETWEEN ? AND ? ORDER BY 1 DESC, last_seq LIMIT 1"""
_HIGHEST_STEP = f"SELECT {_PEAK}, seq FROM steps WHERE rank = ? AND seq BETWEEN ? AND ? ORDER BY 1 DESC, seq LIMIT 1"


def peak_seq(connection: sqlite3.Connection, rank: int, seq: int, since: int = 0) -> int | None:
    """Return the number of the first step, up to ``seq``, with the rank's highest peak; None if there are no steps.

    With ``since`` (the start of a job) only steps numbered from there on count. The pooled rows within the range are
    searched, and the single steps at its edges.
    """
    best: tuple[int, int] | None = None
    parts = list(pieces(connection, "rollups", rank, since, seq, len(ROLLUP_SIZES) - 1))[::-1]
    while parts:
        level, first, last = parts.pop()
        query, bind = (_HIGHEST_STEP, (rank,)) if level < 0 else (_HIGHEST_POOLED, (level, rank))
        row = connection.execute(query, (*bind, first, last)).fetchone()
        if row is None or row[0] is None or (best is not None and row[0] <= best[0]):
            continue
        if level < 0:
            best = row
        else:  # the rows of the level below cover the same steps
            parts.append((level - 1, row[1], row[2]))
    return best[1] if best is not None else None
