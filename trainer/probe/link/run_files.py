"""Folder of this host's files of a run. Each host other than the hub's has its own directory, with an agent.

Standard library only on the hub's host, where most ranks are: every rank calls this.
"""

import fcntl
import json
import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

from ....protocol.run.environment import JOIN_ENV, PLACE_ENV, RUN_ENV
from ..guard import log_error

_agent: "subprocess.Popen[bytes] | None" = None
_failed = False


def folder() -> str:
    """Return the directory with this host's logs and sockets of the run; empty when there is no run."""
    return os.environ.get(PLACE_ENV) or os.environ.get(RUN_ENV, "")


def settle() -> None:
    """Check whether the hub is on this host; if not, make a directory and start an agent for this host.

    Raises:
        OSError: the directory cannot be made, or the run's file cannot be read.
        ValueError: that file is damaged.
        FtmonError: the directory is open to others.
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
    from ....protocol.run.spawn import spawn_module

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
    from ....protocol.run.run_store import home
    from ....protocol.run.rundir import RunDir

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
