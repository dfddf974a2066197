"""The run directory: where everything of one run lies, and how a run is found by name.

``$FTMON_HOME`` (default: the user's state directory, ``~/.local/state/ftmon``) holds ``runs/RUN-ID/``, mode 0700::

    run.json        what was started: written once, by whoever created the run
    hub.json        the connection file: the living hub's process and addresses, 0600, written after binding
    hub.lock        held by the hub while it lives
    exit.json       how the job ended: written once, by the launcher
    recording.sqlite
    config.yaml     the trainer's configuration, where the trainer is ftmon's own
    logs/           rank-0.out, rank-0.err ... one pair a rank, launcher.log, hub.log
    snapshots/      memory snapshots
"""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import platformdirs

from .errors import HubError, RunDirError, RunNotFoundError
from .process import ProcessId, is_alive

RUN_ENV = "FTMON_RUN"
"""Environment variable that carries the run directory to every process of a run, and marks it as one of the run's."""

HOSTS = "hosts"
"""The directory within a run directory that holds a directory of each other host's, in that host's own use."""

_EXIT_ROOM = 4096
"""Bytes kept for ``exit.json``: how a job ended is told also when the disk has filled up meanwhile."""

_IPC_PATH_LIMIT = 100
"""sockaddr_un holds 108 bytes; the longest socket name and a margin come off that."""

_STAMP = re.compile(r"-\d{8}-\d{6}(-[0-9a-f]{4})?$")
"""What ``create`` puts behind a run's name to make its identifier."""

T = TypeVar("T")


class RunFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """``run.json``."""

    id: str
    name: str
    created: float
    command: list[str]
    cwd: str
    host: str
    kind: str
    """``demo``, ``train``, ``run`` or ``watch``."""
    launcher: ProcessId | None = None
    options: dict[str, Any] = {}


class HubFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """``hub.json``, the connection file. ``addresses`` has every channel of ``sockets.CHANNELS``."""

    process: ProcessId
    addresses: dict[str, str]
    version: str
    host: str
    started: float
    listen: dict[str, str] = {}
    """The same channels over TCP with CURVE, when the run was started with --listen."""
    server_key: str = ""
    """The public CURVE key of the TCP side."""
    read_only: bool = False


class ExitFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """``exit.json``: how the job ended. ``exit_code`` is the job's, negative for a signal as in subprocess."""

    exit_code: int
    time: float
    state: str
    """``finished``, ``failed`` or ``stopped``."""
    text: str = ""
    cause: str = ""
    """``hang`` or ``hang-at-exit`` where ftmon itself ended the run (``--on-hang``, ``--exit-timeout``)."""


class RunDir:
    """One run directory. Making the object touches nothing on disk."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @property
    def id(self) -> str:
        """The run's identifier: the directory's name."""
        return self.path.name

    @property
    def recording(self) -> Path:
        """Where the recording is."""
        return self.path / "recording.sqlite"

    @property
    def logs(self) -> Path:
        """Where the log files are."""
        return self.path / "logs"

    @property
    def snapshots(self) -> Path:
        """Where memory snapshots go."""
        return self.path / "snapshots"

    @property
    def config(self) -> Path:
        """Where the trainer's own configuration is kept."""
        return self.path / "config.yaml"

    def rank_log(self, rank: int, stream: str) -> Path:
        """Name the file that a rank's ``out`` or ``err`` goes to."""
        return self.logs / f"rank-{rank}.{stream}"

    def check(self) -> None:
        """Refuse a directory that others could have planted or can read.

        Raises:
            RunDirError: it is a symbolic link, not ours, or open to others.
        """
        try:
            info = self.path.lstat()
        except FileNotFoundError:
            raise RunDirError(f"{self.path}: no such run directory") from None
        if stat.S_ISLNK(info.st_mode) or not stat.S_ISDIR(info.st_mode):
            raise RunDirError(f"{self.path}: is not a directory of its own; remove it")
        if hasattr(os, "getuid") and info.st_uid != os.getuid():
            raise RunDirError(f"{self.path}: belongs to another user; set FTMON_HOME to a directory of yours")
        if info.st_mode & 0o077:
            raise RunDirError(f"{self.path}: is open to other users; run: chmod 700 {self.path}")

    def read_run(self) -> RunFile:
        """Read ``run.json``.

        Raises:
            RunDirError: it is missing or damaged.
        """
        found = self._read("run.json", RunFile)
        if found is None:
            raise RunDirError(f"{self.path}: is not an ftmon run (no run.json)")
        return found

    def read_hub(self) -> HubFile | None:
        """Read the connection file; None when no hub has ever bound."""
        return self._read("hub.json", HubFile)

    def read_exit(self) -> ExitFile | None:
        """Read how the job ended; None while it has not."""
        return self._read("exit.json", ExitFile)

    def living_hub(self) -> HubFile | None:
        """Return the connection file of a hub whose process lives on this host, else None."""
        hub = self.read_hub()
        return hub if hub is not None and is_alive(hub.process) else None

    def write_run(self, content: RunFile) -> None:
        """Write ``run.json`` atomically."""
        self._write("run.json", content)

    def write_hub(self, content: HubFile) -> None:
        """Write the connection file atomically, mode 0600."""
        self._write("hub.json", content)

    def write_exit(self, content: ExitFile) -> None:
        """Write ``exit.json`` atomically; on a full disk into the room that was kept for it."""
        data = _encode(content)
        try:
            write_private(self.path / "exit.json", data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or len(data) > _EXIT_ROOM:
                raise
            with self._exit_room.open("r+b") as file:
                file.write(data.ljust(_EXIT_ROOM))  # blanks end a JSON text as well as anything
                file.flush()
                os.fsync(file.fileno())
            self._exit_room.replace(self.path / "exit.json")
        else:
            self._exit_room.unlink(missing_ok=True)

    @property
    def _exit_room(self) -> Path:
        return self.path / ".exit.room"

    def keep_room_for_exit(self) -> None:
        """Take the room on the disk that ``exit.json`` will need, while there is some."""
        write_private(self._exit_room, b" " * _EXIT_ROOM)

    def ipc_address(self, channel: str) -> str:
        """Give a channel's ``ipc://`` address."""
        return f"ipc://{self.socket_dir / f'{channel}.sock'}"

    @property
    def socket_dir(self) -> Path:
        """Where the sockets are: here, or in a short 0700 twin where the path is too long.

        Also for another host's directory: the file system it lies on may be shared, and a socket must not be.
        """
        path = self.path.absolute()
        longest = len(os.fsencode(path)) + len("/telemetry.sock")
        return self._short_socket_dir() if longest > _IPC_PATH_LIMIT or path.parent.name == HOSTS else path

    def of_host(self, host: str) -> "RunDir":
        """Name another host's own directory within this one: it has ``logs/`` and ``snapshots/`` of its own."""
        return RunDir(self.path / HOSTS / (re.sub(r"[^A-Za-z0-9._-]+", "-", host).strip("-.") or "host"))

    def remove_sockets(self, channels: Iterable[str]) -> None:
        """Remove what the channels' sockets left on disk, the short twin directory included, after the hub ended."""
        for channel in channels:
            path = Path(self.ipc_address(channel).removeprefix("ipc://"))
            path.unlink(missing_ok=True)
            if path.parent != self.path.absolute():
                with contextlib.suppress(OSError):
                    path.parent.rmdir()

    def lock_hub(self) -> int:
        """Take the hub's lock; the returned descriptor holds it until it is closed or the process ends.

        Raises:
            HubError: another hub of this run lives.
        """
        import fcntl  # absent on Windows, where no hub runs

        descriptor = os.open(self.path / "hub.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise HubError(f"{self.id}: another hub of this run is alive") from None
            raise
        return descriptor

    def _short_socket_dir(self) -> Path:
        # Not $TMPDIR: the hub and the ranks must come to the same path, and a job may set its own.
        base = Path("/tmp") if Path("/tmp").is_dir() else Path(tempfile.gettempdir())
        digest = hashlib.sha256(os.fsencode(os.path.realpath(self.path))).hexdigest()[:12]
        path = base / f"ftmon-{getattr(os, 'getuid', int)()}-{digest}"
        path.mkdir(mode=0o700, exist_ok=True)
        RunDir(path).check()
        return path

    def _read(self, name: str, kind: type[T]) -> T | None:
        path = self.path / name
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            raise RunDirError(f"{path}: cannot be read: {error}") from None

    def _write(self, name: str, content: msgspec.Struct) -> None:
        write_private(self.path / name, _encode(content))


def _encode(content: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content)) + b"\n"


def write_private(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, mode 0600."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def home() -> Path:
    """Return the directory that holds all runs (``$FTMON_HOME`` or the user's state directory)."""
    configured = os.environ.get("FTMON_HOME")
    return Path(configured).expanduser().absolute() if configured else platformdirs.user_state_path("ftmon")


def create(name: str, command: list[str], kind: str, options: dict[str, Any] | None = None) -> RunDir:
    """Make a new run directory with its ``run.json``.

    Raises:
        RunDirError: it cannot be made.
    """
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
    runs = home() / "runs"
    now = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    try:
        runs.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_ours(runs)
        identifier = f"{slug}-{stamp}"
        while True:
            try:
                (runs / identifier).mkdir(mode=0o700)
                break
            except FileExistsError:
                identifier = f"{slug}-{stamp}-{secrets.token_hex(2)}"
        run = RunDir(runs / identifier)
        run.logs.mkdir(mode=0o700)
        run.snapshots.mkdir(mode=0o700)
        host = socket.gethostname()
        run.write_run(RunFile(identifier, slug, now, command, os.getcwd(), host, kind, options=options or {}))
        run.keep_room_for_exit()
    except OSError as error:
        raise RunDirError(f"{runs}: cannot make a run directory there: {error.strerror}; set FTMON_HOME") from None
    return run


def _check_ours(runs: Path) -> None:
    """Refuse a directory of runs in which others could plant or exchange one.

    Raises:
        RunDirError: it belongs to another user, or others may write into it.
    """
    info = runs.stat()
    if hasattr(os, "getuid") and info.st_uid != os.getuid():
        raise RunDirError(f"{runs}: belongs to another user; set FTMON_HOME to a directory of yours")
    if os.name == "posix" and info.st_mode & 0o022:
        raise RunDirError(f"{runs}: others may write there; run: chmod 700 {runs}")


def all_runs() -> list[RunDir]:
    """List the run directories of this user on this host, newest first; what is not one is passed over."""
    found: list[tuple[float, str, RunDir]] = []
    try:
        paths = list((home() / "runs").iterdir())
    except OSError:
        return []
    for path in paths:
        try:
            found.append(((path / "run.json").stat().st_mtime, path.name, RunDir(path)))
        except OSError:
            # Not a run, not yet one, or removed this moment.
            continue
    return [run for _, _, run in sorted(found, key=lambda entry: entry[:2], reverse=True)]


def find(name: str | None) -> RunDir:
    """Find a run by identifier, by name, or by the beginning of an identifier; None means the newest living one.

    A whole name goes before a beginning: ``demo`` is not taken for ``demo-large``. What several runs share means the
    one of them that is alive, when there is exactly one.

    Raises:
        RunNotFoundError: none matches, or several do.
    """
    runs = all_runs()
    if not runs:
        raise RunNotFoundError(f"no runs in {home() / 'runs'}: start one with 'ftmon demo' or 'ftmon run -- COMMAND'")
    if not name:
        return next((run for run in runs if _has_living_hub(run)), runs[0])
    for run in runs:
        if run.id == name:
            return run
    matches = [run for run in runs if _STAMP.sub("", run.id) == name] or [
        run for run in runs if run.id.startswith(name)
    ]
    if len(matches) > 1:
        alive = [run for run in matches if _has_living_hub(run)]
        matches = alive if len(alive) == 1 else matches
    if not matches:
        raise RunNotFoundError(f"no run is called {name!r}; 'ftmon ls' lists them, the newest is {runs[0].id}")
    if len(matches) > 1:
        listed = ", ".join(run.id for run in matches[:4]) + (" ..." if len(matches) > 4 else "")
        raise RunNotFoundError(f"{name!r} matches {len(matches)} runs: {listed}; name one of them")
    return matches[0]


def _has_living_hub(run: RunDir) -> bool:
    """Tell whether a run's hub lives; a damaged connection file of one run is no reason not to find another."""
    try:
        return run.living_hub() is not None
    except RunDirError:
        return False
