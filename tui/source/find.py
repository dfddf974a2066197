"""The recording that a word on the command line means."""

import os
from pathlib import Path

from ...protocol import run_store
from ...protocol.errors import RunNotFoundError
from ...protocol.rundir import RunDir

_SUFFIXES = (".sqlite", ".csv", ".tsv", ".jsonl", ".json", ".yaml", ".yml")
"""Of files that a word on the command line may name."""


def recording_file(name: str) -> Path | None:
    """Return the recording that a word names as a file or as a directory that holds one; None where it is neither."""
    path = Path(name)
    try:
        if path.is_dir():
            return RunDir(path).recording
        return path if os.path.lexists(path) else None
    except (OSError, ValueError):  # too long for a file's name
        return None


def find_recording(name: str) -> Path:
    """Find the recording that a file, a run directory or a run's name means.

    Raises:
        RunNotFoundError: it is neither, or several runs match.
    """
    found = recording_file(name)
    if found is not None:
        return found
    try:
        return run_store.find(name).recording
    except RunNotFoundError:
        if os.sep in name or Path(name).suffix.lower() in _SUFFIXES:  # meant as a file's name
            raise RunNotFoundError(f"{name}: no such file") from None
        raise
