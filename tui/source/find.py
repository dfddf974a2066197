"""The recording that a word on the command line means."""

import os
from pathlib import Path

from ...protocol import run_store
from ...protocol.errors import RunNotFoundError
from ...protocol.rundir import RunDir


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
        # Meant as a file's name, it seems: opening it says that it is not there.
        if os.sep in name or Path(name).suffix == ".sqlite":
            return Path(name)
        raise
