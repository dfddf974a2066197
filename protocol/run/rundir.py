"""The run directory: all files of one run.

``runs/RUN-ID/`` in the user's directory (``run_store.home``), mode 0700, holds::

    run.json        the run's command and options; the launcher adds its own process
    hub.json        the connection file: the living hub's process and addresses, 0600, written after binding
    hub.lock        held by the hub while it lives
    exit.json       the job's exit status: written once, by the launcher, or by the hub if no launcher lives
    intent.json     a request to end the run: why the job ended
    left.json       processes still alive after the job's command ended: written before the launcher ends them
    recording.sqlite
    config.yaml     the configuration of ftmon's own trainer
    prediction.json predicted memory of that configuration, by a dry run beside it
    notify.json     targets of notifications
    join.json       address and keys with which other hosts join the run
    curve.key, agent.key   key pairs of the hub and of the agents
    logs/           rank-0.out, rank-0.err ... one pair a rank, launcher.log, hub.log
    snapshots/      memory snapshots
    oom/            reports of out-of-memory errors
    stacks/         stacks saved when the run hangs
    hosts/          a directory for each other host
"""

import contextlib
import errno
import hashlib
import os
import re
import shlex
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from ..errors import HubError, RunDirError
from ..host.private_files import write_private
from ..host.process import ProcessId, is_alive
from .run_options import RunOptions

HOSTS = "hosts"
"""Name of the directory with a directory for each other host, which that host uses."""

_ROOM_BYTES = 4096
_ROOMS = ("exit.json", "intent.json", "hub.json", "left.json", "run.json")
"""Files with reserved disk space, so that the run's command, its hub's address and its exit status can be written on a
full disk."""

_IPC_PATH_LIMIT = 100
"""Limit on the length of a socket's path: sockaddr_un holds 108 bytes."""

T = TypeVar("T")


class Recipe(msgspec.Struct, frozen=True, omit_defaults=True):
    """The arguments of ``ftmon train`` or ``ftmon demo``, and what they train."""

    config: str = ""
    """The configuration file as given; empty: none."""
    overrides: list[str] = []
    """The arguments ``key.sub=value``."""
    model: str = ""
    """Name or folder of the model; ``qwen2 (random weights)`` for a bare configuration."""
    data: list[str] = []
    """The training data: files, or the name of a data set."""


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
    options: RunOptions = RunOptions()
    recipe: Recipe | None = None
    """None for scripts that are not ftmon's trainer."""


class HubFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """``hub.json``, the connection file. ``addresses`` includes every channel of ``sockets.CHANNELS``."""

    process: ProcessId
    addresses: dict[str, str]
    version: str
    host: str
    started: float
    listen: dict[str, str] = {}
    """Those that other hosts use, over TCP with CURVE, when the run was started with --listen."""
    server_key: str = ""
    """The public CURVE key of the TCP side."""
    read_only: bool = False


class ExitFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """``exit.json``: the job's end. ``exit_code`` is the job's, negative for a signal, as in ``subprocess``."""

    exit_code: int
    time: float
    state: str
    """``finished``, ``failed`` or ``stopped``."""
    text: str = ""
    cause: str = ""
    """``hang`` or ``hang-at-exit`` if ftmon itself ended the run (``--on-hang``, ``--exit-timeout``), ``request`` if a
    user did, ``not-started``, or ``lost`` if the end is unknown; empty: the job ended by itself, or by a signal.
    """
    left: list[int] = []
    """Processes that could not be ended."""


class LeftoversFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """``left.json``: processes still alive after the job's command ended; the launcher ends them."""

    time: float
    exit_code: int | None
    """The command's exit code, negative for a signal; None: it was not started."""
    count: int
    processes: list[str]
    """The first of them: pid and name."""


class RunDir:
    """One run directory. The constructor does not access the disk."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @property
    def id(self) -> str:
        """The run's identifier: the directory's name."""
        return self.path.name

    @property
    def recording(self) -> Path:
        """Path of the recording."""
        return self.path / "recording.sqlite"

    @property
    def logs(self) -> Path:
        """Folder of the log files."""
        return self.path / "logs"

    @property
    def snapshots(self) -> Path:
        """Folder of memory snapshots."""
        return self.path / "snapshots"

    @property
    def config(self) -> Path:
        """Path of the trainer's own configuration."""
        return self.path / "config.yaml"

    @property
    def prediction(self) -> Path:
        """Path of the prediction for the trainer's own configuration: the message ``prediction`` as JSON."""
        return self.path / "prediction.json"

    def rank_log(self, rank: int, stream: str) -> Path:
        """Return the path of a rank's log file; ``stream`` is ``out`` or ``err``."""
        return self.logs / f"rank-{rank}.{stream}"

    def check(self) -> None:
        """Refuse a directory that other users could have made or can read.

        Raises:
            RunDirError: it is missing, a symbolic link, another user's, or open to others.
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
            raise RunDirError(f"{self.path}: is open to other users; run: chmod 700 {shlex.quote(str(self.path))}")

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
        """Read the connection file; None if no hub has bound its sockets yet."""
        return self._read("hub.json", HubFile)

    def read_exit(self) -> ExitFile | None:
        """Read ``exit.json``; None while the job runs."""
        return self._read("exit.json", ExitFile)

    def read_leftovers(self) -> LeftoversFile | None:
        """Read ``left.json``; None if the job's command left no process."""
        return self._read("left.json", LeftoversFile)

    def living_hub(self) -> HubFile | None:
        """Return the connection file of a hub whose process lives on this host, else None."""
        hub = self.read_hub()
        return hub if hub is not None and is_alive(hub.process) else None

    def write_run(self, content: RunFile) -> None:
        """Write ``run.json`` atomically."""
        self.write_certain("run.json", _encode(content))

    def write_hub(self, content: HubFile) -> None:
        """Write the connection file atomically, mode 0600."""
        self.write_certain("hub.json", _encode(content))

    def write_leftovers(self, content: LeftoversFile) -> None:
        """Write ``left.json`` atomically."""
        self.write_certain("left.json", _encode(content))

    def write_exit(self, content: ExitFile) -> None:
        """Write ``exit.json`` atomically, and release the disk space reserved for later files."""
        self.write_certain("exit.json", _encode(content))
        for name in _ROOMS:
            with contextlib.suppress(OSError):
                self._room(name).unlink()

    def write_certain(self, name: str, data: bytes) -> None:
        """Write a file atomically, mode 0600; on a full disk, into the space reserved for it.

        If an earlier version of the file has used the reserved space, that version is overwritten in place.
        """
        path = self.path / name
        try:
            write_private(path, data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            room = self._room(name)
            if room.exists():
                _overwrite(room, data, error)
                room.replace(path)
            else:
                _overwrite(path, data, error)

    def _room(self, name: str) -> Path:
        return self.path / f".{name}.room"

    def keep_rooms(self) -> None:
        """Reserve disk space for the run's small files."""
        for name in _ROOMS:
            write_private(self._room(name), b" " * _ROOM_BYTES)

    def ipc_address(self, channel: str) -> str:
        """Return a channel's ``ipc://`` address."""
        return f"ipc://{self.socket_dir / f'{channel}.sock'}"

    @property
    def socket_dir(self) -> Path:
        """Directory of the sockets: this one, or one with a short path, mode 0700, if this path is too long.

        Another host's directory also uses the short one: its file system may be shared, which sockets must not be.
        """
        path = self.path.absolute()
        longest = len(os.fsencode(path)) + len("/telemetry.sock")
        return self._short_socket_dir() if longest > _IPC_PATH_LIMIT or path.parent.name == HOSTS else path

    def of_host(self, host: str) -> "RunDir":
        """Return another host's directory within this one; it has its own ``logs/`` and ``snapshots/``."""
        return RunDir(self.path / HOSTS / (re.sub(r"[^A-Za-z0-9._-]+", "-", host).strip("-.") or "host"))

    def remove_sockets(self, channels: Iterable[str]) -> None:
        """Remove the channels' socket files, and the directory with the short path, after the hub has ended."""
        for channel in channels:
            path = Path(self.ipc_address(channel).removeprefix("ipc://"))
            path.unlink(missing_ok=True)
            if path.parent != self.path.absolute():
                with contextlib.suppress(OSError):
                    path.parent.rmdir()

    def lock_hub(self) -> int:
        """Acquire the hub's lock; return the descriptor that holds it until it is closed or the process ends.

        Raises:
            HubError: another hub of this run is alive.
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
        # Not $TMPDIR: the hub and the ranks must use the same path, and a job may set its own.
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


def _encode(content: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content)) + b"\n"


def _overwrite(path: Path, data: bytes, error: OSError) -> None:
    """Overwrite a file in place, padded with blanks, which JSON allows. Raises ``error`` if the data is longer."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if len(data) > size:
            raise error
        file.seek(0)
        file.write(data.ljust(size))
        file.flush()
        os.fsync(file.fileno())
