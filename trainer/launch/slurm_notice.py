"""Reads SLURM's notice of a cancelled job in the job's output."""

import os
from pathlib import Path

from ...protocol.analysis.deaths.slurm import cancelled

_ENOUGH_BYTES = 65_536


def cancelled_in(log: Path) -> str:
    """Return ``cancelled`` for the last 64 KiB of a file; empty also if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _ENOUGH_BYTES))
            return cancelled(file.read().decode("utf-8", "replace").splitlines())
    except OSError:
        return ""
