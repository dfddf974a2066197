"""Starts ftmon's own processes, without the environment variables of any run."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, BinaryIO

from .environment import monitor_environment
from .rundir import RunDir

_HUB = "ftmon.trainer.hub"


def module_command(module: str, words: Sequence[str] = ()) -> list[str]:
    """Return the command that runs one of ftmon's modules with this Python."""
    # -P: modules in the user's working directory must not shadow the standard library's.
    return [sys.executable, "-P", "-m", module, *words]


def spawn_module(
    module: str,
    words: Sequence[str],
    *,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    pass_fds: Sequence[int] = (),
    environ: Mapping[str, str] = os.environ,
) -> "subprocess.Popen[bytes]":
    """Start one of ftmon's modules in a session of its own, which does not receive the terminal's signals.

    Args:
        module: its full name.
        words: its arguments.
        stdin: as for ``subprocess.Popen``, as are ``stdout``, ``stderr`` and ``pass_fds``.
        stdout: its output.
        stderr: its errors.
        pass_fds: descriptors that it inherits.
        environ: its environment; variables of a run are removed.

    Raises:
        OSError: the process cannot be created.
    """
    return subprocess.Popen(
        module_command(module, words),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        pass_fds=tuple(pass_fds),
        env=monitor_environment(environ),
    )


def spawn_hub(run: RunDir, log: BinaryIO) -> "subprocess.Popen[bytes]":
    """Start a hub; if several are started, the hub's lock lets only one run.

    Its only argument is the run directory, where it reads the run's options: launcher, rank and command line may each
    have to restart it.

    Args:
        run: the run directory.
        log: file for its output.

    Raises:
        OSError: the process cannot be created.
    """
    return spawn_module(_HUB, [str(run.path)], stdout=log, stderr=log)
