"""Starting processes of the training side: a run, and a new hub for a run whose hub is gone.

The command line imports nothing of the trainer; it starts ``python -m ftmon.trainer...`` and reads one line of JSON.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from ...protocol.errors import FtmonError, HubError, UsageError
from ...protocol.process import is_alive
from ...protocol.rundir import RUN_ENV, HubFile, RunDir
from .doctor import INSTALL, missing_training_packages

RECIPE = "ftmon.trainer.recipe.start"
SCRIPT = "ftmon.trainer.start"

# -P: modules in the person's working directory must not shadow the standard library's.
_PYTHON = (sys.executable, "-P", "-m")
_HUB_SECONDS = 15.0
_LAUNCHER_SECONDS = 5.0
_POLL_SECONDS = 0.05


class _Started(msgspec.Struct):
    run: str


class StartFailedError(FtmonError):
    """The process that was to start a run ended without one."""

    def __init__(self, text: str, status: int) -> None:
        """Keep the process's own words, and its exit status as the command's."""
        super().__init__(text)
        self.exit_status = status


def require_training() -> None:
    """Refuse to train where the training packages are missing.

    Raises:
        UsageError: they are; the message says how to install them.
    """
    if missing := missing_training_packages():
        raise UsageError(f"training needs {', '.join(missing)}, not installed here: {INSTALL}")


def start_run(module: str, words: Sequence[str]) -> RunDir:
    """Run ``python -m module words`` and return the run that it started.

    The process is out of reach of the terminal's Ctrl-C, so that an interrupt never leaves a run that nobody knows
    of: it is waited for, and what it started is ended.

    Raises:
        StartFailedError: it refused; the text is its own words.
    """
    process = subprocess.Popen(
        [*_PYTHON, module, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=_with_own_programs(),
    )
    try:
        output, errors = process.communicate()
    except KeyboardInterrupt:
        _give_up(process)
    if process.returncode:
        words_of_it = errors.decode(errors="replace").strip()
        raise StartFailedError(words_of_it or "the run was not started", max(process.returncode, 1))
    return _started_run(output)


def become(module: str, words: Sequence[str]) -> NoReturn:
    """Become ``python -m module words``: its exit status, its signals and its terminal are this command's."""
    sys.stdout.flush()
    os.execve(sys.executable, [*_PYTHON, module, *words], _with_own_programs())


def _with_own_programs() -> dict[str, str]:
    """Return the environment with the programs beside this Python (``deepspeed``, ``ninja``) findable, last.

    ``.venv/bin/ftmon run -- deepspeed ...`` works then without activating the environment.
    """
    path = os.pathsep.join(filter(None, (os.environ.get("PATH"), os.path.dirname(sys.executable))))
    return {**os.environ, "PATH": path}


def _give_up(process: "subprocess.Popen[bytes]") -> NoReturn:
    """End a start that was interrupted, and what it has started already."""
    from .act import end_at_once

    process.terminate()
    output, _ = process.communicate()
    if process.returncode == 0:
        end_at_once(_started_run(output))
    raise KeyboardInterrupt


def _started_run(output: bytes) -> RunDir:
    for line in reversed(output.splitlines()):
        try:
            return RunDir(Path(msgspec.json.decode(line, type=_Started).run))
        except msgspec.MsgspecError:
            continue  # a line that an imported library printed
    raise StartFailedError("the trainer did not say which run it started", 1)


def print_config() -> int:
    """Let the trainer print its commented default configuration; return its exit status."""
    return subprocess.run([*_PYTHON, RECIPE, "print-config"], stdin=subprocess.DEVNULL, check=False).returncode


def living_hub(run: RunDir) -> HubFile:
    """Return the run's living hub, starting a new one first when it is gone.

    Raises:
        HubError: no hub came up in time; its log says why.
        RunDirError: others could have made the run's directory, or can read it.
    """
    run.check()
    content = run.read_run()
    if content.host != socket.gethostname():
        raise HubError(f"{run.id} runs on {content.host}: give this command there, or attach to its --listen address")
    launcher = content.launcher
    if launcher is not None and is_alive(launcher):  # it keeps a hub alive: let it do so
        found = _wait_for_hub(run, _LAUNCHER_SECONDS)
        if found is not None:
            return found
    found = run.living_hub()
    if found is None:
        _spawn_hub(run)
        found = _wait_for_hub(run, _HUB_SECONDS)
    if found is None:
        raise HubError(f"{run.id}: its hub is gone and a new one did not start: see {run.logs / 'hub.log'}")
    return found


def _wait_for_hub(run: RunDir, seconds: float) -> HubFile | None:
    deadline = time.monotonic() + seconds
    while (found := run.living_hub()) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return found


def _spawn_hub(run: RunDir) -> None:
    """Start a hub; should another start at the same time, the hub's lock lets only one of them live."""
    # A hub must not carry the mark of a run: whoever ends that run would take it for one of its ranks.
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("FTMON_RANK") and key != RUN_ENV
    }
    with (run.logs / "hub.log").open("ab") as output:
        subprocess.Popen(
            [*_PYTHON, "ftmon.trainer.hub", str(run.path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=environment,
        )
