"""Request to start a run: one JSON object on the standard input of the process that creates the run and its launcher.

That process is ``python -m ftmon.trainer.launch.start`` for a script, and ``python -m ftmon.trainer.recipe.start`` for
a configuration. It prints one JSON line, ``{"run": "<run directory>"}``, and exits with status 0; for a refusal it
prints text to standard error and exits with another status.
"""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Literal

import msgspec

from ..errors import UsageError
from .notices import Notify
from .run_options import RunOptions
from .rundir import RunDir
from .spawn import spawn_module
from .starter import CommandEnd

_SCRIPT = "ftmon.trainer.launch.start"
_RECIPE = "ftmon.trainer.recipe.start"


class StartRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run to start."""

    kind: Literal["run", "train", "demo"]
    name: str = ""
    """Name of the run; empty: that of the script or the configuration."""
    options: RunOptions = RunOptions()
    notify: Notify | None = None
    """Targets of notifications of the run's events."""
    command: list[str] = []
    """For ``run``: the script's command."""
    config: str = ""
    """For ``train``: the configuration file, or its first ``key.sub=value``."""
    resume: str = ""
    """For ``train``, instead of ``config``: the directory of the run whose configuration and checkpoint are used."""
    overrides: list[str] = []
    """For ``train`` and ``demo``: ``key.sub=value`` pairs that override the configuration."""
    fault: str | None = None
    """For ``demo``, like ``steps`` and ``ranks``: a fault to inject."""
    steps: int | None = None
    ranks: int | None = None
    line: int | None = None
    """Inherited descriptor: the launcher's end of the socket pair to the requesting process; None: no process waits for
    the run.
    """
    stdin: int | None = None
    """Inherited descriptor that becomes the job's standard input; None: no standard input."""


class _Started(msgspec.Struct):
    run: str


def spawn_start(
    request: StartRequest, line: CommandEnd | None = None, *, stdin: int | None = None, environ: Mapping[str, str]
) -> tuple["subprocess.Popen[bytes]", bytes]:
    """Start the process that starts a run; return it, and the input to pass to its ``communicate``.

    Args:
        request: what to start.
        line: the requesting process's end of the socket pair to the run's launcher; None: no process waits for the run.
        stdin: descriptor that becomes the job's standard input.
        environ: the environment of the job; variables of a run are removed.

    Raises:
        UsageError: the request cannot be encoded: an argument is not UTF-8.
        OSError: the process cannot be created.
    """
    # A copy: the process's own descriptor 0 is the pipe with the request.
    input_copy = os.dup(stdin) if stdin is not None else None
    try:
        inherited = [each for each in (line and line.launchers_end, input_copy) if each is not None]
        request = msgspec.structs.replace(request, line=line and line.launchers_end, stdin=input_copy)
        try:
            written = msgspec.json.encode(request)
        except UnicodeEncodeError:
            raise UsageError("the command has a word that is not UTF-8; rename that file") from None
        process = spawn_module(
            _SCRIPT if request.kind == "run" else _RECIPE,
            [],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=inherited,
            environ=environ,
        )
    finally:
        if input_copy is not None:
            os.close(input_copy)
    if line is not None:
        line.handed_over()
    return process, written


def started_run(output: bytes) -> RunDir | None:
    """Return the run in the output of the process that starts runs; None if it printed none."""
    for line in reversed(output.splitlines()):
        try:
            return RunDir(Path(msgspec.json.decode(line, type=_Started).run))
        except msgspec.MsgspecError:
            continue  # a line that an imported library printed
    return None


def print_started(run: RunDir) -> None:
    """Print the line that ``started_run`` reads."""
    print(msgspec.json.encode(_Started(str(run.path))).decode(), flush=True)


def read_request(file: IO[bytes]) -> StartRequest:
    """Read a request from a file, up to its end.

    Raises:
        UsageError: it is not a valid request.
    """
    try:
        request = msgspec.json.decode(file.read(), type=StartRequest)
    except (msgspec.MsgspecError, ValueError) as error:
        raise UsageError(f"standard input must be a request to start a run, in JSON: {error}") from None
    for descriptor in (request.line, request.stdin):
        if descriptor is not None:
            try:
                os.fstat(descriptor)
            except OSError:
                raise UsageError(f"standard input names descriptor {descriptor}, which is not open") from None
    return request
