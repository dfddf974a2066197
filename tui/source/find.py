"""Finds the recording that a command-line argument refers to."""

import os
from pathlib import Path

from ...protocol.errors import RunNotFoundError
from ...protocol.run import run_store
from ...protocol.run.rundir import RunDir

_SUFFIXES = (".sqlite", ".csv", ".tsv", ".jsonl", ".json", ".yaml", ".yml")
"""Suffixes of files that a command-line argument may name."""


def recording_file(name: str) -> Path | None:
    """Return the recording for the path of a file or of a run directory; None if it is neither."""
    path = Path(name)
    try:
        if os.path.isdir(path):
            found = RunDir(path).recording
            return found if name and (found.exists() or (path / "run.json").exists()) else None
        return path if os.path.lexists(path) else None
    except (OSError, ValueError):  # too long for a file's name
        return None


def find_recording(name: str) -> Path:
    """Return the recording of a file, a run directory or a run's name.

    Raises:
        RunNotFoundError: it is neither, or several runs match.
    """
    found = recording_file(name)
    if found is not None:
        return found
    try:
        return run_store.find(name).recording
    except RunNotFoundError:
        if os.path.isdir(name):
            raise RunNotFoundError(
                f"{name}: no recording in this folder; 'ftmon ls' lists the runs there are"
            ) from None
        if os.sep in name or Path(name).suffix.lower() in _SUFFIXES:  # meant as a file's name
            raise RunNotFoundError(f"{name}: no such file") from None
        raise


def find_run(name: str) -> RunDir | None:
    """Return the run of a run directory or of a run's name; None for a recording on its own.

    Raises:
        RunNotFoundError: it is neither, or several runs match.
    """
    recording = find_recording(name)
    alone = recording == Path(name) or not (recording.parent / "run.json").exists()
    return None if alone else RunDir(os.path.abspath(recording.parent))
