"""``ftmon ls``: prints the runs of this user, as a table or as JSON."""

import shlex
import time
from argparse import Namespace

from ....protocol.run import run_store
from ....protocol.text import duration, gib, sanitize
from ...model.runs import RunEntry, RunList, recorded_entry
from ...source.find import recording_file
from ..output.printable import print_json

_COMMAND_WIDTH = 60


def list_runs(arguments: Namespace) -> int:
    """Print the runs of this user, newest first, or the runs of the named recordings.

    Raises:
        RecordingError: a named recording cannot be read.
        RunNotFoundError: a name is neither a file nor a run.
    """
    named: list[str] = getattr(arguments, "runs", [])
    entries = [_named(name) for name in named] if named else RunList().entries()
    if getattr(arguments, "json", False):
        print_json(entries)
    elif not entries:
        print(f"no runs in {run_store.home() / 'runs'}: start one with 'ftmon demo' or 'ftmon run -- COMMAND'")
    else:
        shown = [sanitize(found.id) for found in entries]
        width = max(map(len, shown))
        print(f"{'RUN':<{width}}  STATE      STARTED           LASTED         STEP  RANKS    RECORDED  COMMAND")
        for name, found in zip(shown, entries, strict=True):
            print(f"{name:<{width}}  {_line(found)}")
    return 0


def _named(name: str) -> RunEntry:
    recording = recording_file(name)
    return RunList().entry(run_store.find(name)) if recording is None else recorded_entry(recording)


def _line(found: RunEntry) -> str:
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.created))
    lasted = duration(round(found.duration_s(time.time())))
    size = gib(found.recording_bytes, 1) if found.recording_bytes else "-"
    command = sanitize(shlex.join(found.command))
    if len(command) > _COMMAND_WIDTH:
        command = command[: _COMMAND_WIDTH - 3] + "..."
    state = sanitize(found.condition, 20)
    return f"{state:<9}  {started}  {lasted:<9}  {found.step:>8,}  {found.ranks:>5}  {size:>10}  {command}".rstrip()
