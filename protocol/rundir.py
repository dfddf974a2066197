"""The run directory: where everything of one run lies, and how a run is found by name.

``$FTMON_HOME`` (default: the user's state directory, ``~/.local/state/ftmon``) holds ``runs/RUN-ID/``, mode 0700::

    run.json        what was started: written once, by whoever created the run
    hub.json        the connection file: the living hub's process and addresses, 0600, written after binding
    hub.lock        held by the hub while it lives
    exit.json       how the job ended: written once, by the launcher
    left.json       what still ran when the job's command had ended: written by the launcher before it ends that
    recording.sqlite
    config.yaml     the trainer's configuration, where the trainer is ftmon's own
    prediction.json what its steps were predicted to take, by a dry run beside it
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
from typing import TypeVar

import msgspec
import platformdirs

from .environment import RUN_ENV as RUN_ENV
from .errors import HubError, RunDirError, RunNotFoundError
from .process import ProcessId, is_alive
from .run_options import RunOptions

HOSTS = "hosts"
"""The directory within a run directory that holds a directory of each other host's, in that host's own use."""

_ROOM_BYTES = 4096
_ROOMS = ("exit.json", "intent.json", "hub.json", "left.json", "run.json")
"""Files for which so many bytes are kept on the disk: what was asked of a run, where its hub is and how it ended is
written also when the disk has filled up meanwhile."""

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
    options: RunOptions = RunOptions()


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
    """``hang`` or ``hang-at-exit`` where ftmon itself ended the run (``--on-hang``, ``--exit-timeout``), ``request``
    where a person did, ``not-started``, ``lost`` where nobody knows; empty: the job ended by itself, or of a signal."""
    left: list[int] = []
    """Processes that could not be ended."""


class LeftFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """``left.json``: what still ran when the job's command had ended; the launcher ends it."""

    time: float
    exit_code: int | None
    """The command's, negative for a signal; None: it never began."""
    count: int
    processes: list[str]
    """The first of them: pid and name."""


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

    @property
    def prediction(self) -> Path:
        """Where the prediction of the trainer's own configuration is kept: the message ``prediction`` as JSON."""
        return self.path / "prediction.json"

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

    def read_left(self) -> LeftFile | None:
        """Read what the job's command left running; None where it left nothing."""
        return self._read("left.json", LeftFile)

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

    def write_left(self, content: LeftFile) -> None:
        """Write ``left.json`` atomically."""
        self.write_certain("left.json", _encode(content))

    def write_exit(self, content: ExitFile) -> None:
        """Write ``exit.json`` atomically, and give the room back that was kept for files to come."""
        self.write_certain("exit.json", _encode(content))
        for name in _ROOMS:
            with contextlib.suppress(OSError):
                self._room(name).unlink()

    def write_certain(self, name: str, data: bytes) -> None:
        """Write a file whole or not at all, mode 0600; on a full disk into the room that was kept for it.

        Where that was used up by an earlier version of the file, that version is overwritten in its place.
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
        """Take the room on the disk that the run's small files will need, while there is some."""
        for name in _ROOMS:
            write_private(self._room(name), b" " * _ROOM_BYTES)

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


def _encode(content: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content)) + b"\n"


def _overwrite(path: Path, data: bytes, error: OSError) -> None:
    """Write into the blocks that a file has; blanks end a JSON text. Raises ``error`` where they are too few."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if len(data) > size:
            raise error
        file.seek(0)
        file.write(data.ljust(size))
        file.flush()
        os.fsync(file.fileno())


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


def checked_home() -> Path:
    """Return ``home()``, refused where another user could plant or exchange what lies in it; it need not exist.

    Raises:
        RunDirError: it, or where it leads as a symbolic link, is another user's, no directory, or open to others.
    """
    path = home()
    if not hasattr(os, "getuid"):
        return path
    try:
        link = path.lstat()
        info = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise RunDirError(f"{path}: is a symbolic link that leads nowhere; remove it or set FTMON_HOME") from None
        return path
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunDirError(f"{path}: cannot be used: {reason}; set FTMON_HOME to a directory of yours") from None
    where = f"{path} -> {os.path.realpath(path)}" if stat.S_ISLNK(link.st_mode) else str(path)
    if {link.st_uid, info.st_uid} != {os.getuid()}:
        raise RunDirError(f"{where}: belongs to another user; set FTMON_HOME to a directory of yours")
    if not stat.S_ISDIR(info.st_mode):
        raise RunDirError(f"{where}: is not a directory; set FTMON_HOME to a directory of yours")
    if info.st_mode & 0o002 or (info.st_mode & 0o020 and not _is_private_group(info.st_gid)):
        raise RunDirError(f"{where}: others may write there; run: chmod go-w {path}")
    return path


def _is_private_group(group: int) -> bool:
    """Tell whether a group is the user's own, of nobody else: with such groups a umask of 002 is usual."""
    import grp  # absent on Windows
    import pwd

    try:
        user, found = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


def make_private(path: Path) -> None:
    """Make a directory 0700, and those above it that are missing."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def create(name: str, command: list[str], kind: str, options: RunOptions | None = None) -> RunDir:
    """Make a new run directory with its ``run.json``.

    Raises:
        RunDirError: it cannot be made.
    """
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
    runs = checked_home() / "runs"
    now = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    try:
        make_private(runs.parent)
        make_private(runs)
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
        run.write_run(RunFile(identifier, slug, now, command, os.getcwd(), host, kind, options=options or RunOptions()))
        run.keep_rooms()
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
    """List the run directories of this user on this host, newest first; what is not one is passed over.

    Raises:
        RunDirError: the directory that holds them is not this user's alone.
    """
    found: list[tuple[float, str, RunDir]] = []
    runs = checked_home() / "runs"
    try:
        paths = list(runs.iterdir())
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
        RunDirError: the directory that holds them is not this user's alone.
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
