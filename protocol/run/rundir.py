"""The run directory: all files of one run, and the lookup of runs by name.

``runs/RUN-ID/`` in ``$FTMON_HOME`` (default: the user's state directory, ``~/.local/state/ftmon``), mode 0700, holds::

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
import math
import os
import re
import secrets
import shlex
import socket
import stat
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import platformdirs

from ..errors import HubError, RunDirError, RunNotFoundError, SeveralRunsError, UsageError
from ..host.process import ProcessId, is_alive, make_private, write_private

OnHang = Literal["warn", "stacks", "stop", "kill"]
OnOom = Literal["raise", "hold"]


class MultiHost(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run on several hosts, as detected from its command."""

    hosts: list[str] = []
    """Their names, if the launcher reaches them over ssh; empty: something else starts the ranks there."""
    ssh_port: int | None = None
    by_hand: bool = False  # each host's command is started separately
    slurm_nodes: int = 0  # nodes of the run's SLURM job, which `srun` reaches; 0: no SLURM job


class RunOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a run is monitored, and what ftmon may do to it; set once, when it is started.

    A ``StartRequest`` passes them to the process that creates the run, which writes them to ``run.json`` (and
    ``join.json`` for other hosts). Every other process of the run reads them there.
    """

    listen: str = ""  # `HOST:PORT`: the hub also serves other hosts, encrypted; empty: only this host
    read_only: bool = False  # the hub refuses every command that acts on the run
    logs: bool = True  # the ranks' output is written to the run's log files
    allocator_events: bool = True  # single steps of a rank are captured with the allocator's trace
    probe_budget: float = 0.5
    """Percent of a step, of 20 ms at most, that the probe may cost the training thread; where it costs more, memory is
    read at each boundary of phases in every k-th step only. 0: in every step."""
    predict: bool = True
    """With ftmon's own trainer on GPUs: the memory of its configuration is predicted during the run."""
    on_oom: OnOom = "raise"  # `hold`: a rank waits in the frame in which an allocation failed
    allow_console: bool = False  # a console may run code in a held rank
    hold_timeout: float = 0.0  # seconds after which a held rank continues without being released; 0: never
    on_hang: OnHang = "warn"  # action on a hang that has lasted `hang_grace`
    hang_grace: float = 30.0  # seconds that a hang must last before the action of `on_hang`
    exit_timeout: float = 0.0
    """Seconds without progress after which the rest of a run is killed once a rank has finished; 0: never."""
    stop_grace: float = 30.0
    """Seconds between SIGTERM (or the loss of the command that the run is tied to) and SIGKILL; the default is that of
    SLURM and Kubernetes."""
    metrics: str = ""
    """``[HOST:]PORT`` or ``FILE.prom``: a process beside the hub exports the figures to Prometheus; empty: none."""
    report_to: list[str] = []
    """Names of ``targets.REPORT_TARGETS``: systems that the run is sent to, each by a process beside the hub."""
    multihost: MultiHost | None = None  # the run's hosts, if it has several; detected when the run is created

    def check(self) -> None:
        """Raise ``UsageError`` for an invalid value or combination; the text names the option of the command line."""
        if self.on_oom != "hold" and (self.allow_console or self.hold_timeout):
            raise UsageError("--allow-console and --hold-timeout need --on-oom hold")
        for option in ("hold_timeout", "hang_grace", "exit_timeout", "stop_grace"):
            seconds: float = getattr(self, option)
            if not (math.isfinite(seconds) and seconds >= 0):
                raise UsageError(f"--{option.replace('_', '-')} must be seconds, 0 or more")
        if not 0 <= self.probe_budget <= 100:
            raise UsageError("--probe-budget must be a percentage of a step's time, 0 to 100 (0: no limit)")
        if self.allow_console and self.read_only:
            raise UsageError("--allow-console and --read-only: a read-only run runs no code from outside")
        if self.read_only and (self.on_hang in ("stop", "kill") or self.exit_timeout):
            raise UsageError("--on-hang stop, --on-hang kill and --exit-timeout need a run that is not --read-only")


HOSTS = "hosts"  # name of the directory with a directory for each other host, which that host uses
_ROOM_BYTES = 4096
_ROOMS = ("exit.json", "intent.json", "hub.json", "left.json", "run.json")
"""Files with reserved disk space, so that the run's command, its hub's address and its exit status can be written on a
full disk."""
_IPC_PATH_LIMIT = 100  # limit on the length of a socket's path: sockaddr_un holds 108 bytes
T = TypeVar("T")


class Recipe(msgspec.Struct, frozen=True, omit_defaults=True):
    """The arguments of ``ftmon train`` or ``ftmon demo``, and what they train."""

    config: str = ""  # the configuration file as given; empty: none
    overrides: list[str] = []  # the arguments `key.sub=value`
    model: str = ""  # name or folder of the model; `qwen2 (random weights)` for a bare configuration
    data: list[str] = []  # the training data: files, or the name of a data set


class ForeignRank(msgspec.Struct, frozen=True):
    """A rank's process of a run that was started without ftmon."""

    rank: int
    local_rank: int
    world_size: int
    process: ProcessId


class Foreign(msgspec.Struct, frozen=True, omit_defaults=True):
    """Processes of this host that ``ftmon watch`` observes from outside."""

    ranks: list[ForeignRank]
    launcher: ProcessId | None = None
    """Their common launcher (torchrun, deepspeed ...); None: there is none, or it starts other processes too."""
    nccl: str = ""  # address of NCCL's RAS service; empty: no rank has loaded NCCL


class RunFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """``run.json``."""

    id: str
    name: str
    created: float
    command: list[str]
    cwd: str
    host: str
    kind: str  # `demo`, `train`, `run`, `watch` or `import`
    launcher: ProcessId | None = None
    options: RunOptions = RunOptions()
    recipe: Recipe | None = None  # none for scripts that are not ftmon's trainer
    foreign: Foreign | None = None  # for a run that was started without ftmon: its processes


class HubFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """``hub.json``, the connection file. ``addresses`` includes every channel of ``sockets.CHANNELS``."""

    process: ProcessId
    addresses: dict[str, str]
    version: str
    host: str
    started: float
    listen: dict[str, str] = {}
    """Those that other hosts use, over TCP with CURVE, when the run was started with --listen."""
    server_key: str = ""  # the public CURVE key of the TCP side
    read_only: bool = False


class ExitFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """``exit.json``: the job's end. ``exit_code`` is the job's, negative for a signal, as in ``subprocess``."""

    exit_code: int
    time: float
    state: str  # `finished`, `failed` or `stopped`
    text: str = ""
    cause: str = ""
    """``hang`` or ``hang-at-exit`` if ftmon itself ended the run (``--on-hang``, ``--exit-timeout``), ``request`` if a
    user did, ``not-started``, or ``lost`` if the end is unknown; empty: the job ended by itself, or by a signal.
    """
    left: list[int] = []  # processes that could not be ended


class LeftoversFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """``left.json``: processes still alive after the job's command ended; the launcher ends them."""

    time: float
    exit_code: int | None  # the command's exit code, negative for a signal; None: it was not started
    count: int
    processes: list[str]  # the first of them: pid and name


class RunDir:
    """One run directory. The constructor does not access the disk."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.id = self.path.name
        self.recording = self.path / "recording.sqlite"
        self.logs = self.path / "logs"
        self.snapshots = self.path / "snapshots"
        self.config = self.path / "config.yaml"
        self.prediction = self.path / "prediction.json"  # the message `prediction` as JSON

    def rank_log(self, rank: int, stream: str) -> Path:
        """Return the path of a rank's log file; ``stream`` is ``out`` or ``err``."""
        return self.logs / f"rank-{rank}.{stream}"

    def check(self) -> None:
        """Raise ``RunDirError`` for a directory that other users could have made or can read."""
        try:
            info = self.path.lstat()
        except FileNotFoundError:
            raise RunDirError(f"{self.path}: no such run directory") from None
        if stat.S_ISLNK(info.st_mode) or not stat.S_ISDIR(info.st_mode):
            raise RunDirError(f"{self.path}: is not a directory of its own; remove it")
        _check_owner(self.path, info)
        if info.st_mode & 0o077:
            raise RunDirError(f"{self.path}: is open to other users; run: chmod 700 {shlex.quote(str(self.path))}")

    def read_run(self) -> RunFile:
        """Read ``run.json``; raise ``RunDirError`` if it is missing or damaged."""
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
        self.write_certain("run.json", encode_file(content))

    def write_hub(self, content: HubFile) -> None:
        """Write the connection file atomically, mode 0600."""
        self.write_certain("hub.json", encode_file(content))

    def write_leftovers(self, content: LeftoversFile) -> None:
        """Write ``left.json`` atomically."""
        self.write_certain("left.json", encode_file(content))

    def write_exit(self, content: ExitFile) -> None:
        """Write ``exit.json`` atomically, and release the disk space reserved for later files."""
        self.write_certain("exit.json", encode_file(content))
        for name in _ROOMS:
            with contextlib.suppress(OSError):
                self.room(name).unlink()

    def write_certain(self, name: str, data: bytes) -> None:
        """Write a file atomically, mode 0600; on a full disk, into the space reserved for it.

        If an earlier version of the file has used the reserved space, that version is overwritten in place.
        """
        path = self.path / name
        try:
            write_private(path, data)
        except OSError as error:
            room = self.room(name)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not (room.exists() or path.exists()):
                raise
            if room.exists():
                _overwrite(room, data, error)
                room.replace(path)
            else:
                _overwrite(path, data, error)

    def room(self, name: str) -> Path:
        """Return the file that reserves disk space for another one."""
        return self.path / f".{name}.room"

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

        Raises ``HubError`` if another hub of this run is alive.
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


def encode_file(content: msgspec.Struct) -> bytes:
    """Return a file of a run directory as indented JSON."""
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


_STAMP = re.compile(r"-\d{8}-\d{6}(-[0-9a-f]{4})?$")
"""The suffix that ``create`` appends to a run's name to form its identifier."""


def home() -> Path:
    """Return the directory that holds all runs (``$FTMON_HOME`` or the user's state directory)."""
    configured = os.environ.get("FTMON_HOME")
    return Path(configured).expanduser().absolute() if configured else platformdirs.user_state_path("ftmon")


def checked_home() -> Path:
    """Return ``home()``, which need not exist; raise ``RunDirError`` if other users can write to it or its target."""
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
    _check_owner(where, link, info)
    if not stat.S_ISDIR(info.st_mode):
        raise RunDirError(f"{where}: is not a directory; set FTMON_HOME to a directory of yours")
    if info.st_mode & 0o002 or (info.st_mode & 0o020 and not _is_private_group(info.st_gid)):
        raise RunDirError(f"{where}: others may write there; run: chmod go-w {shlex.quote(str(path))}")
    return path


def _check_owner(where: str | Path, *found: os.stat_result) -> None:
    if hasattr(os, "getuid") and any(info.st_uid != os.getuid() for info in found):
        raise RunDirError(f"{where}: belongs to another user; set FTMON_HOME to a directory of yours")


def _is_private_group(group: int) -> bool:
    """Return whether a group is the user's own, without other members; a umask of 002 is common with such groups."""
    import grp  # absent on Windows
    import pwd

    try:
        user, found = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


def create(
    name: str,
    command: list[str],
    kind: str,
    options: RunOptions | None = None,
    recipe: Recipe | None = None,
    foreign: Foreign | None = None,
) -> RunDir:
    """Create a run directory with its ``run.json``.

    Raises ``RunDirError`` if that fails, or the working directory no longer exists or its path is not UTF-8.
    """
    cwd = _working_directory()
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
    runs = checked_home() / "runs"
    now = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    try:
        make_private(runs.parent)
        make_private(runs)
        _check_ours(runs)
        run = RunDir(runs / f"{slug}-{stamp}")
        while True:
            try:
                run.path.mkdir(mode=0o700)
                break
            except FileExistsError:
                run = RunDir(runs / f"{slug}-{stamp}-{secrets.token_hex(2)}")
        run.logs.mkdir(mode=0o700)
        run.snapshots.mkdir(mode=0o700)
        host, chosen = socket.gethostname(), options or RunOptions()
        run.write_run(RunFile(run.id, slug, now, command, cwd, host, kind, None, chosen, recipe, foreign))
        for name in _ROOMS:
            write_private(run.room(name), b" " * _ROOM_BYTES)
    except OSError as error:
        raise RunDirError(f"{runs}: cannot make a run directory there: {error.strerror}; set FTMON_HOME") from None
    return run


def _working_directory() -> str:
    try:
        path = os.getcwd()
    except OSError:
        raise RunDirError("the working directory no longer exists; change to another one") from None
    try:
        path.encode()
    except UnicodeEncodeError:
        raise RunDirError(f"{path}: the path of the working directory is not UTF-8; change to another one") from None
    return path


def _check_ours(runs: Path) -> None:
    """Refuse a directory of runs that other users can write to."""
    info = runs.stat()
    _check_owner(runs, info)
    if os.name == "posix" and info.st_mode & 0o022:
        raise RunDirError(f"{runs}: others may write there; run: chmod 700 {shlex.quote(str(runs))}")


def all_runs() -> list[RunDir]:
    """Return the run directories of this user on this host, newest first; everything else is skipped.

    Raises ``RunDirError`` if other users can write to the directory that holds them.
    """
    found: list[tuple[float, str, RunDir]] = []
    runs = checked_home() / "runs"
    with contextlib.suppress(OSError):
        for path in list(runs.iterdir()):
            with contextlib.suppress(OSError):  # not a run, not yet complete, or just removed
                found.append(((path / "run.json").stat().st_mtime, path.name, RunDir(path)))
    return [run for _, _, run in sorted(found, key=lambda entry: entry[:2], reverse=True)]


def find(name: str | None) -> RunDir:
    """Return a run by identifier, name, or prefix of an identifier; None: the newest with a living hub, or the newest.

    A whole name takes precedence over a prefix: ``demo`` does not mean ``demo-large``. If several runs match, the one
    with a living hub is returned, if there is exactly one. Raises ``RunNotFoundError``, ``SeveralRunsError``, or
    ``RunDirError`` if other users can write to the directory that holds them.
    """
    runs = all_runs()
    if not runs:
        raise RunNotFoundError(f"no runs in {home() / 'runs'}: start one with 'ftmon demo' or 'ftmon run -- COMMAND'")
    if name is None:
        return next((run for run in runs if _has_living_hub(run)), runs[0])
    if not name:
        raise RunNotFoundError("the name of the run is empty; 'ftmon ls' lists the runs there are")
    matches = [run for run in runs if run.id == name] or [run for run in runs if _STAMP.sub("", run.id) == name]
    matches = matches or [run for run in runs if run.id.startswith(name)]
    if len(matches) > 1:
        alive = [run for run in matches if _has_living_hub(run)]
        matches = alive if len(alive) == 1 else matches
    if not matches:
        raise RunNotFoundError(f"no run is called {name!r}; 'ftmon ls' lists them, the newest is {runs[0].id}")
    if len(matches) > 1:
        listed = ", ".join(run.id for run in matches[:4]) + (" ..." if len(matches) > 4 else "")
        raise SeveralRunsError(f"{name!r} matches {len(matches)} runs: {listed}; name one of them")
    return matches[0]


_SUFFIXES = (".sqlite", ".csv", ".tsv", ".jsonl", ".json", ".yaml", ".yml")  # of files that an argument may name


def recording_file(name: str) -> Path | None:
    """Return the recording for the path of a file or of a run directory; None if it is neither."""
    path = Path(name)
    try:
        if os.path.isdir(path):
            found = RunDir(path).recording
            return found if name and (found.exists() or (path / "run.json").exists()) else None
        return path if os.path.lexists(path) else None
    except (OSError, ValueError):  # too long for a file's name
        return None


def find_recording(name: str) -> Path:
    """Return the recording of a file, a run directory or a run's name.

    Raises ``RunNotFoundError`` if it is neither, or several runs match.
    """
    found = recording_file(name)
    if found is not None:
        return found
    try:
        return find(name).recording
    except RunNotFoundError:
        if os.path.isdir(name):
            text = f"{name}: no recording in this folder; 'ftmon ls' lists the runs there are"
            raise RunNotFoundError(text) from None
        if os.sep in name or Path(name).suffix.lower() in _SUFFIXES:  # meant as a file's name
            raise RunNotFoundError(f"{name}: no such file") from None
        raise


def find_run(name: str) -> RunDir | None:
    """Return the run of a run directory or of a run's name; None for a recording on its own.

    Raises ``RunNotFoundError`` if it is neither, or several runs match.
    """
    recording = find_recording(name)
    alone = recording == Path(name) or not (recording.parent / "run.json").exists()
    return None if alone else RunDir(os.path.abspath(recording.parent))


def _has_living_hub(run: RunDir) -> bool:
    """Return whether a run's hub is alive; False for a damaged connection file, which must not hide other runs."""
    try:
        return run.living_hub() is not None
    except RunDirError:
        return False
