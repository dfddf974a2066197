"""``join.json``: what another host of a run needs to join it: where the hub is, its key, and the agents' own.

It holds a secret, so it is 0600 in the 0700 run directory and goes to another host as a file: over a shared file
system, or over ssh's or srun's standard input. A command line or the environment only ever name its path.
"""

from pathlib import Path

import msgspec

from ..errors import UsageError
from ..host.private_files import read_private, write_private
from ..run.environment import JOIN_ENV as JOIN_ENV
from ..run.run_options import RunOptions
from ..run.rundir import RunDir
from .keys import KeyPair

JOIN_NAME = "join.json"


class JoinFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """``join.json``."""

    run: str
    """The run directory on the hub's host, which is also the mark of the run's processes on every host."""
    id: str
    host: str
    """The hub's host."""
    boot_id: str
    """Identifies that host among several of the same name."""
    addresses: list[str]
    """Where the hub may be reached, to be tried in this order."""
    port: int
    """The first of the hub's ports."""
    server_key: str
    """The hub's public CURVE key."""
    public: str
    secret: str
    """The pair that the run's agents use."""
    version: str
    options: RunOptions = RunOptions()
    """The run's options."""
    pushed: bool = False
    """This copy was put here for this run, by ssh or srun: the last process of the run here removes it."""

    @property
    def pair(self) -> KeyPair:
        """The agents' key pair."""
        return KeyPair(self.public, self.secret)

    def __repr__(self) -> str:
        return f"JoinFile(id={self.id!r}, host={self.host!r}, port={self.port})"


def join_path(run: RunDir) -> Path:
    """Name the file in a run directory."""
    return run.path / JOIN_NAME


def encode_join(content: JoinFile) -> bytes:
    """Encode the file's content."""
    return msgspec.json.format(msgspec.json.encode(content)) + b"\n"


def write_join(run: RunDir, content: JoinFile) -> Path:
    """Write the file, mode 0600; return its path."""
    write_private(join_path(run), encode_join(content))
    return join_path(run)


def read_join(path: Path) -> JoinFile:
    """Read the file.

    Raises:
        UsageError: there is none, or it is not one.
        RunDirError: others can read it.
    """
    try:
        data = read_private(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; copy join.json from the run's directory") from None
    try:
        return msgspec.json.decode(data, type=JoinFile)
    except (msgspec.MsgspecError, ValueError) as error:
        raise UsageError(f"{path}: is not a run's join.json: {error}") from None


def boot_id() -> str:
    """Return the identifier of this boot; empty where the kernel has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
