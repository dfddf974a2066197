"""All runs of a user: their location, creation, and lookup by name.

Each run is in ``runs/RUN-ID/`` in ``$FTMON_HOME`` (default: the user's state directory, ``~/.local/state/ftmon``).
"""

import os
import re
import secrets
import shlex
import socket
import stat
import time
from pathlib import Path

import platformdirs

from ..errors import RunDirError, RunNotFoundError, SeveralRunsError
from ..host.private_files import make_private
from .run_options import RunOptions
from .rundir import Recipe, RunDir, RunFile

_STAMP = re.compile(r"-\d{8}-\d{6}(-[0-9a-f]{4})?$")
"""The suffix that ``create`` appends to a run's name to form its identifier."""


def home() -> Path:
    """Return the directory that holds all runs (``$FTMON_HOME`` or the user's state directory)."""
    configured = os.environ.get("FTMON_HOME")
    return Path(configured).expanduser().absolute() if configured else platformdirs.user_state_path("ftmon")


def checked_home() -> Path:
    """Return ``home()`` after checking that no other user can write to it; it need not exist.

    Raises:
        RunDirError: it, or the target of the symbolic link, is another user's, not a directory, or open to others.
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
        raise RunDirError(f"{where}: others may write there; run: chmod go-w {shlex.quote(str(path))}")
    return path


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
    name: str, command: list[str], kind: str, options: RunOptions | None = None, recipe: Recipe | None = None
) -> RunDir:
    """Create a run directory with its ``run.json``.

    Raises:
        RunDirError: it cannot be created, or the working directory no longer exists or its path is not UTF-8.
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
        content = RunFile(identifier, slug, now, command, cwd, host, kind, None, options or RunOptions(), recipe)
        run.write_run(content)
        run.keep_rooms()
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
    """Refuse a directory of runs that other users can write to.

    Raises:
        RunDirError: it belongs to another user, or others may write into it.
    """
    info = runs.stat()
    if hasattr(os, "getuid") and info.st_uid != os.getuid():
        raise RunDirError(f"{runs}: belongs to another user; set FTMON_HOME to a directory of yours")
    if os.name == "posix" and info.st_mode & 0o022:
        raise RunDirError(f"{runs}: others may write there; run: chmod 700 {shlex.quote(str(runs))}")


def all_runs() -> list[RunDir]:
    """Return the run directories of this user on this host, newest first; everything else is skipped.

    Raises:
        RunDirError: other users can write to the directory that holds them.
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
            # Not a run, not yet complete, or just removed.
            continue
    return [run for _, _, run in sorted(found, key=lambda entry: entry[:2], reverse=True)]


def find(name: str | None) -> RunDir:
    """Return a run by identifier, name, or prefix of an identifier; None: the newest with a living hub, or the newest.

    A whole name takes precedence over a prefix: ``demo`` does not mean ``demo-large``. If several runs match, the one
    with a living hub is returned, if there is exactly one.

    Raises:
        RunNotFoundError: no run matches.
        SeveralRunsError: several runs match.
        RunDirError: other users can write to the directory that holds them.
    """
    runs = all_runs()
    if not runs:
        raise RunNotFoundError(f"no runs in {home() / 'runs'}: start one with 'ftmon demo' or 'ftmon run -- COMMAND'")
    if name is None:
        return next((run for run in runs if _has_living_hub(run)), runs[0])
    if not name:
        raise RunNotFoundError("the name of the run is empty; 'ftmon ls' lists the runs there are")
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
        raise SeveralRunsError(f"{name!r} matches {len(matches)} runs: {listed}; name one of them")
    return matches[0]


def _has_living_hub(run: RunDir) -> bool:
    """Return whether a run's hub is alive; False for a damaged connection file, which must not hide other runs."""
    try:
        return run.living_hub() is not None
    except RunDirError:
        return False
