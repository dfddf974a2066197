"""Finds SLURM's notice in a job's output that the job was cancelled or reached its time limit.

slurmstepd writes the line (``_handle_signal_container`` of its ``req.c``), and srun forwards it; old versions name no
node::

    slurmstepd: error: *** STEP 5.0 ON node1 CANCELLED AT 2026-11-21T12:00:00 DUE TO TIME LIMIT ***

Without a reason it is a user's ``scancel``, or srun ending the other tasks after a failure that it has reported
before. A failed node is not a request to end, and is ignored here.
"""

import re
from collections.abc import Iterable

_CANCELLED = re.compile(
    r"\*\*\* (?:JOB|STEP) \S+ (?:ON \S+ )?CANCELLED AT \S+(?: DUE TO (TIME LIMIT|PREEMPTION|JOB REQUEUE))? \*\*\*"
)
_TROUBLE = re.compile(
    r"srun: error: \S+: tasks? [\d,-]+: |srun: .*Terminating |slurmstepd\S*: error: .*(?:oom[_-]kill|memory limit)",
    re.IGNORECASE,
)


class SlurmWords:
    """Reads a job's output line by line."""

    def __init__(self) -> None:
        self._trouble = False

    def read(self, line: str) -> str:
        """Return ``cancelled by SLURM: time limit`` if ``line`` reports that; else an empty string."""
        if "srun: " not in line and "slurmstepd" not in line:
            return ""
        found = _CANCELLED.search(line)
        if found is None:
            self._trouble = self._trouble or bool(_TROUBLE.search(line))
            return ""
        if found[1]:
            return f"cancelled by SLURM: {found[1].lower()}"
        return "" if self._trouble else "cancelled by SLURM"


def cancelled(lines: Iterable[str]) -> str:
    """Return why SLURM ended the job that wrote these lines (see ``SlurmWords.read``); empty if it did not."""
    words = SlurmWords()
    return next(filter(None, map(words.read, lines)), "")
