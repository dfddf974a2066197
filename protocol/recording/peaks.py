"""The step of a rank's highest memory peak so far, found through the pooled rows in a few small lookups."""

import sqlite3

from .schema import ROLLUP_SIZES

_PEAK = "coalesce(resident_peak, allocated_peak)"
"""The figure whose peak is a true high-water mark: the resident set on the CPU, else what is allocated."""

_HIGHEST_POOLED = f"""SELECT {_PEAK}, first_seq, last_seq FROM rollups
    WHERE level = ? AND rank = ? AND last_seq BETWEEN ? AND ? ORDER BY 1 DESC, last_seq LIMIT 1"""
_HIGHEST_STEP = f"SELECT {_PEAK}, seq FROM steps WHERE rank = ? AND seq BETWEEN ? AND ? ORDER BY 1 DESC, seq LIMIT 1"
_LAST_POOLED = "SELECT max(last_seq) FROM rollups WHERE level = ? AND rank = ? AND last_seq <= ?"


def peak_seq(connection: sqlite3.Connection, rank: int, seq: int) -> int | None:
    """Give the number of the first step with a rank's highest peak among those up to ``seq``; None without any."""
    best, found, level, first, last = -1, -1, -1, 0, seq
    begin = 0
    for pooled in reversed(range(len(ROLLUP_SIZES))):
        row = connection.execute(_HIGHEST_POOLED, (pooled, rank, begin, seq)).fetchone()
        if row is not None and row[0] > best:
            best, first, last = row
            level = pooled
        covered = connection.execute(_LAST_POOLED, (pooled, rank, seq)).fetchone()[0]
        begin = max(begin, (covered or 0) + 1)
    row = connection.execute(_HIGHEST_STEP, (rank, begin, seq)).fetchone()
    if row is not None and row[0] > best:
        return row[1]
    if best < 0:
        return None
    for pooled in reversed(range(level)):
        row = connection.execute(_HIGHEST_POOLED, (pooled, rank, first, last)).fetchone()
        if row is not None and row[0] == best:
            first, last = row[1:]
    row = connection.execute(_HIGHEST_STEP, (rank, first, last)).fetchone()
    found = row[1] if row is not None else found
    return found if found >= 0 else None
