"""A rank's files of its run on this host: their directory and agent, its output in log files, the run's options.

Importing this takes the standard library only: every rank does so before any other import.
"""

import fcntl
import io
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ....protocol.run.environment import JOIN_ENV, PLACE_ENV, RUN_ENV
from ..guard import log_error

if TYPE_CHECKING:
    from ....protocol.messages.telemetry import LogLine
    from ....protocol.run.rundir import RunOptions


_agent: "subprocess.Popen[bytes] | None" = None
_failed = False


def folder() -> str:
    """Return the directory with this host's logs and sockets of the run; empty when there is no run."""
    return os.environ.get(PLACE_ENV) or os.environ.get(RUN_ENV, "")


def settle() -> None:
    """Check whether the hub is on this host; if not, make a directory and start an agent for this host.

    Raises OSError or ValueError (the run's file cannot be read, or is damaged), and FtmonError (the directory is open
    to others).
    """
    path = os.environ.get(JOIN_ENV)
    if not path or PLACE_ENV in os.environ:
        return
    with open(path, "rb") as file:
        join: dict[str, Any] = json.load(file)
    if _is_here(join):
        return
    os.environ[PLACE_ENV] = str(_make(str(join["run"]), str(join["id"])))
    start_agent()


def tend() -> None:
    """Restart this host's agent if it has died; costs nothing on the hub's host, and little elsewhere.

    If it cannot be started, the rank's log says so once, until an attempt succeeds.
    """
    global _failed
    if PLACE_ENV not in os.environ:
        return
    try:
        start_agent()
        _failed = False
    except OSError as error:
        if not _failed:
            log_error("this host's agent cannot be started", error)
        _failed = True


def start_agent() -> None:
    """Start this host's agent unless it lives: the agent holds a lock, and the rank that acquires it starts one."""
    global _agent
    if _agent is not None:
        _agent.poll()  # the agent daemonizes at once; this reaps the process that did
    place = os.environ.get(PLACE_ENV)
    if not place:
        return
    from ....protocol.run.rundir import RunDir

    lock = RunDir(place).socket_dir / "agent.lock"
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _agent = _spawn(place, descriptor)
    except BlockingIOError:
        return  # it lives
    finally:
        os.close(descriptor)


def _spawn(place: str, descriptor: int) -> "subprocess.Popen[bytes]":
    """Start the agent; it inherits the lock, so that no other rank starts a second one meanwhile."""
    from ....protocol.run.start import spawn_module

    words = [place, os.environ.get(JOIN_ENV, ""), str(descriptor)]
    with open(os.path.join(place, "logs", "agent.log"), "ab") as log:
        return spawn_module("ftmon.trainer.agent", words, stdout=log, stderr=log, pass_fds=(descriptor,))


def _is_here(join: dict[str, Any]) -> bool:
    """Return whether this is the hub's host: containers share a boot id, and cloud images a host name, but not both."""
    if join.get("host") != socket.gethostname():
        return False
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return join.get("boot_id") in ("", boot)


def _make(run: str, identifier: str) -> Path:
    """Make this host's directory: in the run's if that exists or can be made, else in the user's own."""
    from ....protocol.run.rundir import RunDir, home

    problem: OSError | None = None
    for base in (Path(run), home() / "runs" / re.sub(r"[^A-Za-z0-9._-]+", "-", identifier)):
        place = RunDir(base).of_host(socket.gethostname())
        try:
            for folder in (base, place.path.parent, place.path, place.logs, place.snapshots):
                _make_private(folder)
        except OSError as error:
            problem = problem or error
            continue
        RunDir(base).check()
        place.check()
        return place.path
    assert problem is not None
    raise problem


def _make_private(path: Path) -> None:
    if not path.parent.is_dir():
        _make_private(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


class SteadyFile(io.FileIO):
    """A descriptor that accepts every write. Bytes that the disk refuses are lost.

    Without ftmon the output would go elsewhere, so a full disk of the run must not raise in the script.
    """

    def write(self, data: Any, /) -> int:
        """Write, or drop the data; return its length."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def steady_output() -> None:
    """Put a ``SteadyFile`` below ``sys.stdout`` and ``sys.stderr`` if they write to the launcher's log."""
    try:
        log = os.stat(os.path.join(folder(), "logs", "launcher.log"))
    except OSError:
        return
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            there = os.fstat(descriptor)
            if (there.st_dev, there.st_ino) == (log.st_dev, log.st_ino):
                make_steady(stream, descriptor)
        except (OSError, ValueError, AttributeError):  # closed, or None
            continue


def make_steady(stream: Any, descriptor: int) -> None:
    """Put a ``SteadyFile`` below a text stream that writes to ``descriptor``; other streams stay as they are.

    The stream stays the same object: loggers and progress bars keep references to it.
    """
    if type(stream) is not io.TextIOWrapper or stream.fileno() != descriptor:
        return
    stream.flush()
    raw: Any = SteadyFile(descriptor, "wb", closefd=False)
    raw.name = stream.name
    buffer = raw if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(raw)  # raw: python -u
    names = ("encoding", "errors", "line_buffering", "write_through")
    io.TextIOWrapper.__init__(stream, buffer, **{name: getattr(stream, name) for name in names})


_LINE_LIMIT = 8192


class Tee:
    """Replaces ``sys.stdout`` or ``sys.stderr``: writes everything to the stream, and also sends whole lines.

    It is for a rank that keeps its terminal (a bare ``ftmon.watch()``).
    """

    def __init__(self, stream: Any, name: Literal["out", "err"], rank: int, send: "Callable[[LogLine], None]") -> None:
        self._stream, self._rank, self._send = stream, rank, send
        self._name: Literal["out", "err"] = name
        self._partial = ""

    def write(self, text: str) -> int:
        """Write as the stream does."""
        written = self._stream.write(text)
        self._add(text)
        return written

    def writelines(self, lines: Any) -> None:
        """Write every line."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _add(self, text: str) -> None:
        # A progress bar returns with \\r; only its last state on a line is sent.
        from ....protocol.messages.telemetry import LogLine

        *whole, rest = (self._partial + text).split("\n")
        self._partial = rest.rsplit("\r", 1)[-1][-_LINE_LIMIT:]
        for line in whole:
            last = line.rstrip("\r").rsplit("\r", 1)[-1][:_LINE_LIMIT]
            self._send(LogLine(self._rank, time.time(), self._name, last))


def tee_output(rank: int, send: "Callable[[LogLine], None]") -> None:
    """Also send everything this process prints through ``sys.stdout`` and ``sys.stderr``."""
    sys.stdout = Tee(sys.stdout, "out", rank, send)
    sys.stderr = Tee(sys.stderr, "err", rank, send)


def read_raw() -> dict[str, Any]:
    """Return the options in ``join.json`` or ``run.json``, those that differ from the defaults; empty without a run."""
    run = os.environ.get(RUN_ENV)
    # On another host the run directory may be missing; join.json holds the same options.
    for path in (os.environ.get(JOIN_ENV), run and os.path.join(run, "run.json")):
        try:
            with open(path or "", "rb") as file:
                content = json.load(file)
        except (OSError, ValueError):
            continue
        found = content.get("options", {}) if isinstance(content, dict) else {}
        return found if isinstance(found, dict) else {}
    return {}


def read_options() -> "RunOptions":
    """Return the run's options; the defaults without a run, or where they cannot be read."""
    import msgspec

    from ....protocol.run.rundir import RunOptions

    try:
        return msgspec.convert(read_raw(), RunOptions)
    except msgspec.ValidationError:
        return RunOptions()


def redirect_output(rank: int) -> bool:
    """Point descriptors 1 and 2 at the rank's log files; return False without a run, or if it keeps no logs.

    Output of native code and child processes goes to the files, too. No reader blocks a file, and no crash loses it.
    """
    run = folder()
    if not run or read_raw().get("logs", True) is False:
        return False
    try:
        for descriptor, stream in ((1, "out"), (2, "err")):
            path = os.path.join(run, "logs", f"rank-{rank}.{stream}")  # RunDir.rank_log, without its imports
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(file, descriptor)
            os.close(file)
        for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
            make_steady(stream, descriptor)
    except (OSError, ValueError) as error:
        log_error("redirecting output", error)
        return False
    return True
