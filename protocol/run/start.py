"""Starts ftmon's other processes: hubs, and the process that creates a run and its launcher.

The latter is ``python -m ftmon.trainer.launch.start`` for a script, and ``python -m ftmon.trainer.recipe.start`` for a
configuration. It reads a request to start a run, one JSON object, from its standard input, prints one JSON line,
``{"run": "<run directory>"}``, and exits with status 0; for a refusal it prints text to standard error and exits with
another status.
"""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, BinaryIO, Literal

import msgspec

from ..errors import UsageError
from ..host.process import ProcessId
from .environment import monitor_environment
from .notices import Notify
from .rundir import ExitFile, RunDir, RunOptions, home

UNTIE = b"u"  # sent once by the command to the launcher, when the run may outlive the command


class LauncherMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of a launcher to the command that started it, a line of JSON."""

    launcher: ProcessId | None = None
    end: ExitFile | None = None


class CommandEnd:
    """The command's end of the line to the run's launcher: a socket pair that only these two hold.

    It needs no disk, so the command receives the job's end even if the run directory is full, read-only or removed; and
    either end detects at once that the other process is gone, also after SIGKILL. Until ``UNTIE`` is sent, the loss of
    the connection counts as a request to end the run. No method raises or blocks.
    """

    def __init__(self) -> None:
        self._socket, self.other = socket.socketpair()
        self._socket.setblocking(False)
        self._text = b""
        self.launcher: ProcessId | None = None  # the launcher's process; None: not reported yet
        self.end: ExitFile | None = None  # how the job ended; None: not reported yet
        self.closed = False  # the launcher is gone

    @property
    def launchers_end(self) -> int:
        """The descriptor for the launcher to inherit."""
        return self.other.fileno()

    def fileno(self) -> int:
        """Return the command's own descriptor, for ``select``."""
        return self._socket.fileno()

    def untie(self) -> None:
        """Let the run outlive this process."""
        with contextlib.suppress(OSError):
            self._socket.send(UNTIE)

    def read(self) -> None:
        """Read the launcher's messages."""
        while not self.closed:
            try:
                data = self._socket.recv(65_536)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            self.closed = not data
            self._text += data
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError, ValueError):
                word = msgspec.json.decode(line, type=LauncherMessage)
                self.launcher = word.launcher or self.launcher
                self.end = word.end or self.end


class LauncherEnd:
    """The launcher's end of the line."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._socket.setblocking(False)
        self._untied = False
        self.open = True

    def fileno(self) -> int:
        """Return the descriptor, for ``select``."""
        return self._socket.fileno()

    def send(self, word: LauncherMessage) -> None:
        """Send a message; it is dropped if the command is gone."""
        with contextlib.suppress(OSError):
            self._socket.send(msgspec.json.encode(word) + b"\n", socket.MSG_NOSIGNAL)

    def lost(self) -> bool:
        """Read the line; return whether the command that the run was tied to is gone."""
        try:
            data = self._socket.recv(4096)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        self._untied = self._untied or UNTIE in data
        self.open = bool(data)
        return not self.open and not self._untied


def module_command(module: str, words: Sequence[str] = ()) -> list[str]:
    """Return the command that runs one of ftmon's modules with this Python."""
    # -P: modules in the user's working directory must not shadow the standard library's.
    return [sys.executable, "-P", "-m", module, *words]


def bytecode_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep the libraries' bytecode where it is not kept beside them.

    Installed without it (as by uv), read-only or with PYTHONDONTWRITEBYTECODE, as in many containers, they are compiled
    at each start: 5 s.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or "PYTHONPYCACHEPREFIX" in base:
        return {}
    may_write = not base.get("PYTHONDONTWRITEBYTECODE") and os.access(os.path.dirname(spec.origin), os.W_OK)
    kept = may_write or os.path.exists(importlib.util.cache_from_source(spec.origin))
    return {} if kept else {"PYTHONPYCACHEPREFIX": str(home() / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}


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

    Variables of a run are removed from ``environ``. Raises ``OSError`` if the process cannot be created.
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
    have to restart it. Raises ``OSError`` if the process cannot be created.
    """
    return spawn_module("ftmon.trainer.hub", [str(run.path)], stdout=log, stderr=log)


def spawn_exporter(target: str, run: RunDir, log: BinaryIO) -> "subprocess.Popen[bytes]":
    """Start the process that sends a run to ``targets.METRICS`` or one of ``targets.REPORT_TARGETS``.

    It ends with the run. Raises ``OSError`` if the process cannot be created.
    """
    return spawn_module("ftmon.trainer.exporters", [str(run.path), target], stdout=log, stderr=log)


class StartRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run to start."""

    kind: Literal["run", "train", "demo"]
    name: str = ""  # name of the run; empty: that of the script or the configuration
    options: RunOptions = RunOptions()
    notify: Notify | None = None  # targets of notifications of the run's events
    command: list[str] = []  # for `run`: the script's command
    config: str = ""  # for `train`: the configuration file, or its first `key.sub=value`
    given: list[str] = []  # for `train`, instead of `config`: a model and data, for which all else is chosen
    measure: bool = True  # for `train`: whether the best of what is chosen are measured on GPUs before
    price: float | None = None  # of one GPU for one hour, for the cost of what is chosen
    resume: str = ""
    """For ``train``, instead of ``config``: the directory of the run whose configuration and checkpoint are used."""
    overrides: list[str] = []  # for `train` and `demo`: `key.sub=value` pairs that override the configuration
    fault: str | None = None  # for `demo`, like `steps` and `ranks`: a fault to inject
    steps: int | None = None
    ranks: int | None = None
    line: int | None = None
    """Inherited descriptor: the launcher's end of the socket pair to the requesting process; None: no process waits for
    the run.
    """
    stdin: int | None = None  # inherited descriptor that becomes the job's standard input; None: no standard input
    progress: int | None = None
    """Inherited descriptor for lines about a choice (``auto``) and its progress; None: they are not shown."""


def spawn_start(
    request: StartRequest,
    line: CommandEnd | None = None,
    *,
    stdin: int | None = None,
    progress: int | None = None,
    environ: Mapping[str, str],
) -> tuple["subprocess.Popen[bytes]", bytes]:
    """Start the process that starts a run; return it, and the input to pass to its ``communicate``.

    ``line`` is the requesting process's end of the socket pair to the run's launcher; None: no process waits for the
    run. The descriptor ``stdin`` becomes the job's standard input, ``progress`` receives lines about a choice;
    ``environ``, without the variables of a run, is its environment. Raises ``UsageError`` if an argument is not UTF-8,
    ``OSError`` if the process cannot be created.
    """
    # A copy: the process's own descriptor 0 is the pipe with the request.
    input_copy = os.dup(stdin) if stdin is not None else None
    shown = os.dup(progress) if progress is not None else None
    try:
        inherited = [each for each in (line and line.launchers_end, input_copy, shown) if each is not None]
        line_end = line and line.launchers_end
        request = msgspec.structs.replace(request, line=line_end, stdin=input_copy, progress=shown)
        try:
            written = msgspec.json.encode(request)
        except UnicodeEncodeError:
            raise UsageError("the command has a word that is not UTF-8; rename that file") from None
        process = spawn_module(
            f"ftmon.trainer.{'launch' if request.kind == 'run' else 'recipe'}.start",
            [],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=inherited,
            environ=environ,
        )
    finally:
        for copy in (input_copy, shown):
            if copy is not None:
                os.close(copy)
    if line is not None:
        line.other.close()
    return process, written


def started_run(output: bytes) -> RunDir | None:
    """Return the run in the output of the process that starts runs; None if it printed none."""
    for line in reversed(output.splitlines()):
        try:
            return RunDir(msgspec.json.decode(line, type=dict[str, str])["run"])
        except (msgspec.MsgspecError, KeyError):
            continue  # a line that an imported library printed
    return None


def print_started(run: RunDir) -> None:
    """Print the line that ``started_run`` reads."""
    print(msgspec.json.encode({"run": str(run.path)}).decode(), flush=True)


def read_request(file: IO[bytes]) -> StartRequest:
    """Read a request from a file, up to its end; raise ``UsageError`` if it is invalid."""
    try:
        request = msgspec.json.decode(file.read(), type=StartRequest)
    except (msgspec.MsgspecError, ValueError) as error:
        raise UsageError(f"standard input must be a request to start a run, in JSON: {error}") from None
    for descriptor in (request.line, request.stdin, request.progress):
        if descriptor is not None:
            try:
                os.fstat(descriptor)
            except OSError:
                raise UsageError(f"standard input names descriptor {descriptor}, which is not open") from None
    return request
