"""What the commands share to reach a run: processes of the training side, commands to its hub, its recording.

The command line imports nothing of the trainer; it starts ``python -m ftmon.trainer...`` and reads one line of JSON.
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from ...protocol.errors import FtmonError, HubError, UsageError
from ...protocol.host.process import is_alive
from ...protocol.messages import wire
from ...protocol.messages.control import Accepted, Result, Verb
from ...protocol.run.rundir import HubFile, RunDir
from ...protocol.run.start import (
    CommandEnd,
    StartRequest,
    bytecode_environment,
    module_command,
    spawn_hub,
    spawn_start,
    started_run,
)
from ...protocol.text import sanitize
from .set_up import INSTALL, missing_training_packages

if TYPE_CHECKING:
    from ...protocol.recording.reader import Reader

_T = TypeVar("_T")

ACCEPT_SECONDS = 10.0
RESULT_SECONDS = 120.0  # time limit of a result: an escalating kill waits after INT and TERM


def ask(
    hub: HubFile,
    verb: Verb,
    *,
    on_accepted: Callable[[str], None] = lambda text: None,
    result_seconds: float = RESULT_SECONDS,
) -> Result:
    """Send a command to a living hub and wait for its result; ``on_accepted`` is called with the hub's text.

    Raises ``UsageError`` if it has text that is not UTF-8, ``HubError`` if the hub refused, or did not answer in time.
    """
    import zmq  # ls, which imports this module, needs none

    from ...protocol.link.sockets import peer_socket

    command = verb.command(secrets.token_hex(8))
    try:
        msgspec.msgpack.encode(command)  # as it is: wire.encode replaces what is not UTF-8
    except UnicodeEncodeError:
        raise UsageError(f"{command.verb}: what is sent to the run must be UTF-8") from None
    message = wire.encode("cli", 1, time.time(), command)
    context: zmq.Context[Any] = zmq.Context()
    socket = peer_socket(context, "control")
    try:
        socket.connect(hub.addresses["control"])
        socket.send_multipart(message)
        deadline = time.monotonic() + ACCEPT_SECONDS
        accepted = False
        while (left := deadline - time.monotonic()) > 0:
            if not socket.poll(round(left * 1000) or 1):
                break
            answer = wire.decode_answer(socket.recv_multipart())
            if isinstance(answer, Accepted) and answer.id == command.id:
                if not answer.ok:
                    raise HubError(answer.text)
                on_accepted(answer.text)
                accepted = True
                deadline = time.monotonic() + result_seconds
            elif isinstance(answer, Result) and answer.id == command.id:
                return answer
    finally:
        socket.close()
        context.term()
    waited = result_seconds if accepted else ACCEPT_SECONDS
    raise HubError(f"the hub (pid {hub.process.pid}) gave no {'result' if accepted else 'answer'} in {waited:.0f} s")


_END_SECONDS = 10.0  # for each of the launcher's three ways to end a run
_POLL_SECONDS = 0.1


def end_at_once(run: RunDir) -> None:
    """End a run through its launcher, which needs no hub, by INT, TERM, then KILL; wait for the end."""
    # The launcher escalates: the second INT ends the whole run by TERM, the third by KILL.
    for _ in range(3):
        launcher = run.read_run().launcher
        if launcher is None or not is_alive(launcher):
            return
        os.kill(launcher.pid, signal.SIGINT)
        if wait_for_end(run, _END_SECONDS):
            return


def wait_for_end(run: RunDir, seconds: float) -> bool:
    """Wait until the launcher has written the job's end; return False at the time limit."""
    return _found(run.read_exit, seconds) is not None


def _found(find: Callable[[], _T | None], seconds: float) -> _T | None:
    deadline = time.monotonic() + seconds
    while (found := find()) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return found


def check_rank(ranks: Collection[int], rank: int | None) -> None:
    """Raise ``UsageError`` if a run has no such rank; None is any."""
    if rank is not None and rank not in ranks:
        known = f"{min(ranks)} to {max(ranks)}" if ranks else "none yet"
        raise UsageError(f"no rank {rank} in this run; its ranks: {known}")


@contextmanager
def opened(path: Path) -> "Generator[Reader, None, None]":
    """Open a recording for one command; at the end report omitted messages, if any, in a line on standard error.

    Raises ``RecordingError`` if it is not a recording, or cannot be read.
    """
    from ...protocol.recording.reader import Reader

    with Reader(path, once=True) as reader:
        yield reader
        if reader.left_out:
            print(f"ftmon: {path}: {reader.left_out}", file=sys.stderr)


SCRIPT = "ftmon.trainer.launch.start"
_HUB_SECONDS = 60.0
_LAUNCHER_SECONDS = 5.0
_SILENT_SECONDS = 2.0  # time after which a terminal shows that a start is still under way
_PREFIX_COLUMNS = 10  # `launcher| ` before each line of output
_MOST_LINES = 100  # maximum number of output lines kept of a process that could not start a run


class StartFailedError(FtmonError):
    """The process that should start a run ended without one."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.exit_status = status

    def __str__(self) -> str:
        return "\n".join(sanitize(line) for line in str(self.args[0]).splitlines()[-_MOST_LINES:])


def require_training() -> None:
    """Raise ``UsageError``, with the installation command, without the packages that training needs."""
    if missing := missing_training_packages():
        raise UsageError(f"training needs {', '.join(missing)}, not installed here: {INSTALL}")


def start_run(request: StartRequest, line: CommandEnd | None = None, *, stdin: bool = False) -> RunDir:
    """Start a run in a separate process, and return the run.

    The process does not receive the terminal's Ctrl-C, so that an interrupt never leaves an orphaned run: this command
    waits for the process, and ends its run. ``line``: this command's end of the connection to the run's launcher; None:
    no process waits for the run. ``stdin``: whether the job reads this command's standard input. Raises
    ``StartFailedError``, with its output, if the process refused.
    """
    environment = _with_own_programs() | (_window() if line is not None else {})
    stderr: object = sys.stderr  # None if the command was started without one
    progress = 2 if request.kind == "train" and stderr is not None else None
    process, written = spawn_start(request, line, stdin=0 if stdin else None, progress=progress, environ=environment)
    try:
        try:
            output, errors = process.communicate(written, timeout=_SILENT_SECONDS)
        except subprocess.TimeoutExpired:
            if sys.stderr.isatty():
                print("ftmon: checking the configuration, model and data of the run ...", file=sys.stderr, flush=True)
            output, errors = process.communicate()
    except KeyboardInterrupt:
        _give_up(process)
    if process.returncode:
        words = errors.decode(errors="replace").strip()
        raise StartFailedError(words or "the run was not started", max(process.returncode, 1))
    return _started(output)


def _window() -> dict[str, str]:
    """Return variables with the terminal's size minus the lines' prefix, for progress bars; else empty."""
    try:
        columns, lines = os.get_terminal_size(1)
    except OSError:
        return {}
    found = {"COLUMNS": str(max(20, columns - _PREFIX_COLUMNS)), "LINES": str(lines)}
    return {name: value for name, value in found.items() if columns and name not in os.environ}


def become(module: str, words: Sequence[str], *, ends_at_once: bool = False) -> NoReturn:
    """Replace this process by ``python -m module words``, which keeps its exit status, signals and terminal.

    ``ends_at_once``: whether ctrl-c ends it silently; otherwise the module handles it.
    """
    sys.stdout.flush()
    if ends_at_once:
        module, words = "ftmon.trainer.foreground", [module, *words]
    command = module_command(module, words)
    bytecode = {} if module == SCRIPT else bytecode_environment(os.environ)  # not for the user's own processes
    os.execve(command[0], command, _with_own_programs() | bytecode)


def words_of(arguments: Namespace, names: Sequence[str]) -> list[str]:
    """Return the named arguments that were given, as options of another process."""
    words: list[str] = []
    for name in names:
        given, option = getattr(arguments, name), f"--{name.replace('_', '-')}"
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value is not False:
                words.append(option if value is True else f"{option}={value}")
    return words


def _with_own_programs() -> dict[str, str]:
    """Return the environment with this Python's programs (``deepspeed``, ``ninja``) at the end of PATH.

    Then ``.venv/bin/ftmon run -- deepspeed ...`` works without activating the environment.
    """
    path = os.pathsep.join(filter(None, (os.environ.get("PATH"), os.path.dirname(sys.executable))))
    return {**os.environ, "PATH": path}


def _give_up(process: "subprocess.Popen[bytes]") -> NoReturn:
    process.terminate()
    output, _ = process.communicate()
    if process.returncode == 0:
        end_at_once(_started(output))
    raise KeyboardInterrupt


def _started(output: bytes) -> RunDir:
    run = started_run(output)
    if run is None:
        raise StartFailedError("the trainer did not report which run it started", 1)
    return run


def living_hub(run: RunDir) -> HubFile:
    """Return the run's living hub, after starting a new one if it is gone.

    Raises ``HubError`` if none started in time (its log has the reason), ``RunDirError`` if others could have made the
    run's directory, or can read it.
    """
    run.check()
    content = run.read_run()
    if content.host != socket.gethostname():
        raise HubError(f"{run.id} runs on {content.host}: give this command there, or attach to its --listen address")
    launcher = content.launcher
    restarts = launcher is not None and is_alive(launcher)  # the launcher restarts the hub itself
    found = _found(run.living_hub, _LAUNCHER_SECONDS if restarts else 0.0)
    if found is None:
        with (run.logs / "hub.log").open("ab") as log:
            spawn_hub(run, log)
        found = _found(run.living_hub, _HUB_SECONDS)
    if found is None:
        raise HubError(f"{run.id}: its hub is gone and a new one did not start: see {run.logs / 'hub.log'}")
    return found
