"""The recording's table of jobs: a row for each ``job`` message."""

import json
import sqlite3
from typing import Any

from ..messages.jobs import Job
from .rows import pack_body

Row = tuple[Any, ...]


def job_row(seq: int, t: float, job: Job) -> Row:
    """Return a row of ``jobs``."""
    resident = max((phase.resident_peak or 0 for rank in job.ranks for phase in rank.phases), default=0)
    return (
        *(seq, t, job.number, job.state, job.started, job.ended, job.text, job.world_size, job.restart),
        *(json.dumps(job.argv), int(job.shown), job.steps, job.step, job.loss, job.step_us),
        *(job.allocated_peak, job.reserved_peak, resident or None, pack_body(job)),
    )


def job_seqs(connection: sqlite3.Connection, seq: int) -> list[int]:
    """Return the numbers, up to ``seq``, of each job's first row, first row as the stream's job, and last row."""
    query = """SELECT min(seq), min(CASE WHEN shown THEN seq END), max(seq) FROM jobs WHERE seq <= ? GROUP BY number"""
    return sorted({found for row in connection.execute(query, (seq,)) for found in row if found is not None})


def shown_since(connection: sqlite3.Connection, seq: int) -> int:
    """Return the number of the row at which the stream's job at ``seq`` began; 0 before any job, or with one job."""
    query = "SELECT min(seq) FROM jobs WHERE shown AND seq <= ? GROUP BY number ORDER BY 1 DESC LIMIT 2"
    rows = connection.execute(query, (seq,)).fetchall()
    return rows[0][0] if len(rows) > 1 else 0
