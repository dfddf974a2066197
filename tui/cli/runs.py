"""``ftmon ls``: the runs of this user, for people and as JSON."""

import shlex
import time
from argparse import Namespace

import msgspec

from ...protocol import rundir
from ...protocol.text import duration, gib, sanitize
from ..model.runs import RunEntry, RunList

_COMMAND_WIDTH = 60


def list_runs(arguments: Namespace) -> int:
    """Print the runs of this user, newest first."""
    entries = RunList().entries()
    if getattr(arguments, "json", False):
        print(msgspec.json.format(msgspec.json.encode(entries)).decode())
    elif not entries:
        print(f"no runs in {rundir.home() / 'runs'}: start one with 'ftmon demo' or 'ftmon run -- COMMAND'")
    else:
        width = max(len(found.id) for found in entries)
        print(f"{'RUN':<{width}}  STATE      STARTED           LASTED         STEP  RANKS    RECORDED  COMMAND")
        for found in entries:
            print(f"{found.id:<{width}}  {_line(found)}")
    return 0


def _line(found: RunEntry) -> str:
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.created))
    lasted = duration(round(found.duration_s(time.time())))
    size = gib(found.recording_bytes, 1) if found.recording_bytes else "-"
    command = sanitize(shlex.join(found.command))
    if len(command) > _COMMAND_WIDTH:
        command = command[: _COMMAND_WIDTH - 3] + "..."
    return (
        f"{found.state:<9}  {started}  {lasted:<9}  {found.step:>8,}  {found.ranks:>5}  {size:>10}  {command}".rstrip()
    )
