"""SLURM's notice in a job's output that it ends the job: cancelled by a person, or out of time.

The line is slurmstepd's (``_handle_signal_container`` of its ``req.c``), passed on by srun; old ones name no node::

    slurmstepd: error: *** STEP 5.0 ON node1 CANCELLED AT 2026-11-21T12:00:00 DUE TO TIME LIMIT ***

Without a reason it is a person's ``scancel``, or srun ending the other tasks after one has failed; then srun has
reported that task before. A failed node is no request, and is ignored here.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

_CANCELLED = re.compile(
    r"\*\*\* (?:JOB|STEP) \S+ (?:ON \S+ )?CANCELLED AT \S+(?: DUE TO (TIME LIMIT|PREEMPTION|JOB REQUEUE))? \*\*\*"
)
_TROUBLE = re.compile(
    r"srun: error: \S+: tasks? [\d,-]+: |srun: .*Terminating |slurmstepd\S*: error: .*(?:oom[_-]kill|memory limit)",
    re.IGNORECASE,
)
_ENOUGH_BYTES = 65_536


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
    """Return the reason why SLURM ended the job that wrote these lines (see ``SlurmWords.read``); empty: it did not."""
    words = SlurmWords()
    return next(filter(None, map(words.read, lines)), "")


def cancelled_in(log: Path) -> str:
    """Return the same of the end of a file, its last 64 KiB; empty also where it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _ENOUGH_BYTES))
            return cancelled(file.read().decode("utf-8", "replace").splitlines())
    except OSError:
        return ""
