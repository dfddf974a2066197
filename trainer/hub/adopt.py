"""Taking over a run that an earlier hub recorded."""

import contextlib
import sys
import time
from pathlib import Path

from ...protocol.errors import FtmonError, RecordingError
from ...protocol.recording.reader import Reader
from ...protocol.recording.writer import Writer
from ...protocol.rundir import RunDir, RunFile
from ...protocol.wire import Frame

_FINAL_STATES = ("finished", "failed", "stopped")


def read_history(run: RunDir) -> list[Frame]:
    """Read what an earlier hub of this run recorded: frames that give the state it was in. Empty: there was none."""
    if not run.recording.exists():
        return []
    try:
        reader = Reader(run.recording)
        try:
            return list(reader.state_at(time.time() + 86_400))
        finally:
            reader.close()
    except FtmonError as error:
        print(error, file=sys.stderr)
        return []


def open_recording(run: RunDir, file: RunFile) -> tuple[Writer, str]:
    """Open the recording; one that cannot be continued is moved aside, and the words for that are returned."""
    try:
        return Writer(run.recording, file), ""
    except RecordingError as error:
        aside = run.recording.with_name(f"recording.damaged-{time.time_ns()}.sqlite")
        run.recording.rename(aside)
        for suffix in ("-wal", "-shm"):
            with contextlib.suppress(OSError):
                Path(f"{run.recording}{suffix}").unlink()
        return Writer(run.recording, file), f"{error}. It was moved to {aside.name}; a new one was begun."


def already_over(run: RunDir) -> bool:
    """Tell whether the run has ended and its recording says so: then there is nothing for a hub to do."""
    if run.read_exit() is None:
        return False
    try:
        reader = Reader(run.recording)
        try:
            return reader.info().state in _FINAL_STATES
        finally:
            reader.close()
    except FtmonError:
        return False
