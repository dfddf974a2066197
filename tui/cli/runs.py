"""``ftmon ls``: the runs of this user, for people and as JSON."""

import shlex
import time
from argparse import Namespace

import msgspec

from ...protocol import rundir
from ...protocol.errors import FtmonError, RecordingError
from ...protocol.recording.reader import Reader
from ...protocol.recording.results import RecordingInfo
from ...protocol.rundir import RunDir
from ...protocol.text import gib, sanitize


class RunEntry(msgspec.Struct, frozen=True):
    """One line of ``ftmon ls``."""

    id: str
    name: str
    kind: str
    state: str
    live: bool
    """A hub of it lives on this host."""
    created: float
    host: str
    command: list[str]
    ranks: int
    step: int
    exit_code: int | None
    recording: str
    recording_bytes: int
    problem: str
    """Why its recording cannot be read; empty when it can."""


def entry(run: RunDir) -> RunEntry:
    """Describe a run from its directory and its recording.

    Raises:
        RunDirError: it has no readable ``run.json``.
    """
    content = run.read_run()
    end = run.read_exit()
    live = run.living_hub() is not None
    info, problem = _info(run)
    recorded = info.state if info else ""
    state = end.state if end else (recorded or "starting") if live else "lost" if recorded in _OPEN_STATES else recorded
    return RunEntry(
        run.id,
        content.name,
        content.kind,
        state,
        live,
        content.created,
        content.host,
        content.command,
        len(info.ranks) if info else 0,
        info.last_step if info else 0,
        end.exit_code if end else info.exit_code if info else None,
        str(run.recording),
        run.recording.stat().st_size if run.recording.exists() else 0,
        problem,
    )


_OPEN_STATES = ("", "starting", "training", "stopping")
"""States of a run that nobody has seen end; without a hub it is ``lost``: ended unseen, or waiting for a new hub."""


def _info(run: RunDir) -> tuple[RecordingInfo | None, str]:
    try:
        reader = Reader(run.recording)
    except RecordingError as error:
        return None, str(error)
    try:
        return reader.info(), ""
    except RecordingError as error:
        return None, str(error)
    finally:
        reader.close()


def list_runs(arguments: Namespace) -> int:
    """Print the runs of this user, newest first."""
    entries: list[RunEntry] = []
    for run in rundir.all_runs():
        try:
            entries.append(entry(run))
        except FtmonError:
            continue  # made or removed at this moment
    if getattr(arguments, "json", False):
        print(msgspec.json.format(msgspec.json.encode(entries)).decode())
        return 0
    if not entries:
        print(f"no runs in {rundir.home() / 'runs'}: start one with 'ftmon demo' or 'ftmon run -- COMMAND'")
        return 0
    width = max(len(found.id) for found in entries)
    print(f"{'RUN':<{width}}  {'STATE':<9}  {'STARTED':<16}  {'STEP':>8}  {'RANKS':>5}  {'RECORDED':>10}  COMMAND")
    for found in entries:
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.created))
        size = gib(found.recording_bytes, 1) if found.recording_bytes else "-"
        command = sanitize(shlex.join(found.command))
        print(
            f"{found.id:<{width}}  {found.state:<9}  {started:<16}  {found.step:>8,}  {found.ranks:>5}  {size:>10}  "
            f"{command if len(command) <= 60 else command[:57] + '...'}"
        )
    return 0
