"""Finds the step of a rank's highest memory peak so far with a few small lookups in the pooled rows."""

import sqlite3

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
    pooled = "SELECT first_seq, last_seq FROM rollups WHERE level = ? AND rank = ? AND last_seq BETWEEN ? AND ?"
    best: tuple[int, int] | None = None

    def search(level: int, first: int, last: int) -> None:
        nonlocal best
        if first > last:
            return
        if level < 0:
            row = connection.execute(_HIGHEST_STEP, (rank, first, last)).fetchone()
            if row is not None and row[0] is not None and (best is None or row[0] > best[0]):
                best = row
            return
        whole = f"{pooled} AND first_seq >= ?"
        ends = connection.execute(
            f"SELECT min(first_seq), max(last_seq) FROM ({whole})", (level, rank, first, last, first)
        ).fetchone()
        if ends[0] is None:
            search(level - 1, first, last)
            return
        search(level - 1, first, ends[0] - 1)
        row = connection.execute(_HIGHEST_POOLED, (level, rank, ends[0], ends[1])).fetchone()
        if row is not None and (best is None or row[0] > best[0]):
            search(level - 1, row[1], row[2])
        search(level - 1, ends[1] + 1, last)

    search(len(ROLLUP_SIZES) - 1, since, seq)
    return best[1] if best is not None else None
