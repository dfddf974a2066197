"""Finds the process listening on a TCP port of this host, from /proc/net (proc(5)) and readable descriptors."""

import ipaddress
import os
import pwd
import socket
from typing import NamedTuple

from ...protocol.errors import UsageError
from ...protocol.link.sockets import CHANNELS, LOCAL_CHANNEL

# The ``--listen HOST:PORT`` option: a TCP port for each of the hub's channels but ``LOCAL_CHANNEL``.
#
# PORT and those after it, in the order of ``CHANNELS``; that of ``LOCAL_CHANNEL`` stays free.


class Listen(NamedTuple):
    """Address to listen on. ``port`` is the first of ``len(CHANNELS)`` consecutive ports."""

    host: str
    port: int

    def addresses(self) -> dict[str, str]:
        """Return the ``tcp://`` address of every channel that other hosts reach."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        ports = {channel: self.port + offset for offset, channel in enumerate(CHANNELS)}
        return {channel: f"tcp://{host}:{port}" for channel, port in ports.items() if channel != LOCAL_CHANNEL}


def parse_listen(text: str) -> Listen:
    """Parse ``HOST:PORT``, or raise ``UsageError``; HOST is an address or name of this host; empty: all interfaces."""
    host, separator, port_text = text.rpartition(":")
    host = host.strip("[]") or "0.0.0.0"
    last = 65535 - len(CHANNELS) + 1
    if not separator or not port_text.isdigit() or not 1 <= int(port_text) <= last:
        raise UsageError(f"--listen {text}: must be HOST:PORT with a port from 1 to {last}, such as 0.0.0.0:7420")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        try:
            host = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError:
            raise UsageError(f"--listen {text}: {host} is not an address or name of this host") from None
    return Listen(host, int(port_text))


def check_free(listen: Listen) -> None:
    """Raise ``UsageError`` if one of the ports is in use, or the address is not this host's."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    for port in range(listen.port, listen.port + len(CHANNELS)):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((listen.host, port))
            except OSError as error:
                where = f"--listen {listen.host}:{listen.port}"
                if port != listen.port:
                    where += f" (which takes {len(CHANNELS)} ports, {listen.port} to {listen.port + len(CHANNELS) - 1})"
                raise UsageError(
                    f"{where}: port {port} cannot be used: {error.strerror}; choose another address"
                ) from None


_LISTEN = "0A"
_COMMAND_LIMIT = 200


class PortHolder(NamedTuple):
    """A listening socket, and its process if it can be inspected."""

    user: str
    """The socket's owner: user name, or the uid if it has no name."""
    pid: int
    """0: its process cannot be inspected (it belongs to another user or container)."""
    command: str


def holder_of(port: int) -> PortHolder | None:
    """Return the process that listens on ``port``; None if there is none, or if it cannot be read."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for uid, inode in _listening(table, port):
            pid, command = _process_with(inode)
            return PortHolder(_user(uid), pid, command)
    return None


def _listening(table: str, port: int) -> list[tuple[int, str]]:
    try:
        with open(table) as file:
            rows = [line.split() for line in file.readlines()[1:]]
    except OSError:
        return []
    return [
        (int(row[7]), row[9]) for row in rows if len(row) > 9 and row[3] == _LISTEN and row[1].endswith(f":{port:04X}")
    ]


def _process_with(inode: str) -> tuple[int, str]:
    wanted = f"socket:[{inode}]"
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with os.scandir(f"/proc/{name}/fd") as entries:
                if any(_link(entry.path) == wanted for entry in entries):
                    return int(name), _command(name)
        except OSError:
            continue
    return 0, ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _command(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    text = " ".join(word for word in words if word)
    return text if len(text) <= _COMMAND_LIMIT else f"{text[:_COMMAND_LIMIT]}..."


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
