"""``join.json``: the hub's addresses and key and the agents' key pair, with which another host joins a run.

It holds a secret, so it is 0600 in the 0700 run directory and is sent to another host as a file: over a shared file
system, or over ssh's or srun's standard input. Command lines and the environment have only its path.
"""

from pathlib import Path

import msgspec

from ..errors import UsageError
from ..host.process import proc_text, read_private, write_private
from ..run.rundir import RunDir, RunOptions, encode_file
from .keys import KeyPair
from .sockets import CHANNELS

JOIN_NAME = "join.json"


class JoinFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """``join.json``."""

    run: str
    """The run directory on the hub's host, which also marks the run's processes on every host."""
    id: str
    host: str
    boot_id: str
    """Boot identifier, which distinguishes that host from others of the same name."""
    addresses: list[str]
    """The hub's possible addresses, to be tried in this order."""
    port: int
    """The first of the hub's ports."""
    server_key: str
    """The hub's public CURVE key."""
    public: str
    secret: str
    """The key pair of the run's agents, with ``public``."""
    version: str
    options: RunOptions = RunOptions()
    pushed: bool = False
    """This copy was made for this run, by ssh or srun; the last process of the run on this host removes it."""

    @property
    def pair(self) -> KeyPair:
        """The agents' key pair."""
        return KeyPair(self.public, self.secret)

    def port_of(self, channel: str) -> int:
        """Return the TCP port of one of the hub's channels."""
        return self.port + CHANNELS.index(channel)

    def __repr__(self) -> str:
        return f"JoinFile(id={self.id!r}, host={self.host!r}, port={self.port})"


def join_path(run: RunDir) -> Path:
    """Return the path of the file in a run directory."""
    return run.path / JOIN_NAME


def write_join(run: RunDir, content: JoinFile) -> Path:
    """Write the file, mode 0600; return its path."""
    write_private(join_path(run), encode_file(content))
    return join_path(run)


def read_join(path: Path) -> JoinFile:
    """Read the file; raise ``UsageError`` if it is missing or invalid, ``RunDirError`` if others can read it."""
    try:
        data = read_private(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; copy join.json from the run's directory") from None
    try:
        return msgspec.json.decode(data, type=JoinFile)
    except (msgspec.MsgspecError, ValueError) as error:
        raise UsageError(f"{path}: is not a run's join.json: {error}") from None


def boot_id() -> str:
    """Return the identifier of this boot; empty if the kernel has none."""
    return proc_text("/proc/sys/kernel/random/boot_id").strip()
