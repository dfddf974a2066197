"""Addresses of ``--listen`` (a TCP port for each channel but ``LOCAL_CHANNEL``) and ``--metrics``; who holds a port."""

import ipaddress
import os
import pwd
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ...protocol.errors import UsageError
from ...protocol.host.process import proc_text
from ...protocol.link.sockets import CHANNELS, LOCAL_CHANNEL
from .processes import open_files


class Listen(NamedTuple):
    """Address to listen on. ``port`` is the first of ``len(CHANNELS)`` consecutive ports, in their order."""

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
    last = 65535 - len(CHANNELS) + 1
    if not separator or not port_text.isdigit() or not 1 <= int(port_text) <= last:
        raise UsageError(f"--listen {text}: must be HOST:PORT with a port from 1 to {last}, such as 0.0.0.0:7420")
    return Listen(_address(f"--listen {text}", host.strip("[]") or "0.0.0.0"), int(port_text))


def parse_metrics(text: str, setting: str = "--metrics") -> Listen | Path:
    """Parse ``[HOST:]PORT`` or ``FILE.prom``; without HOST, only this host is served.

    Raises ``UsageError`` for anything else, and if ``prometheus_client`` is not installed.
    """
    if find_spec("prometheus_client") is None:
        raise UsageError(f"{setting} needs prometheus_client, which is not installed: pip install 'ftmon[metrics]'")
    host, _, port_text = text.rpartition(":")
    if text.endswith(".prom"):
        return Path(text)
    known = port_text.isascii() and port_text.isdigit() and len(port_text) <= 5
    if not known or not 1 <= int(port_text) <= 65535:
        raise UsageError(
            f"{setting} {text}: must be [HOST:]PORT, such as 9400 or 0.0.0.0:9400, or a file FILE.prom in the textfile "
            "directory of node_exporter"
        )
    return Listen(_address(f"{setting} {text}", host.strip("[]") or "127.0.0.1"), int(port_text))


def _address(option: str, host: str) -> str:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        try:
            return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError):
            raise UsageError(f"{option}: {host} is not an address or name of this host") from None
    return host


def check_free(listen: Listen, option: str = "--listen", count: int = len(CHANNELS)) -> None:
    """Raise ``UsageError`` if one of ``count`` ports is in use, or the address is not this host's."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    for port in range(listen.port, listen.port + count):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((listen.host, port))
            except OSError as error:
                where = f"{option} {listen.host}:{listen.port}"
                if port != listen.port:
                    where += f" (which takes {count} ports, {listen.port} to {listen.port + count - 1})"
                raise UsageError(
                    f"{where}: port {port} cannot be used: {error.strerror}; choose another address"
                ) from None


_LISTEN = "0A"
_COMMAND_LIMIT = 200


class PortHolder(NamedTuple):
    """A listening socket, and its process if it can be inspected."""

    user: str  # The socket's owner: user name, or the uid if it has no name
    pid: int  # 0: its process cannot be inspected (it belongs to another user or container)
    command: str


def holder_of(port: int) -> PortHolder | None:
    """Return the process that listens on ``port``; None if there is none, or if it cannot be read.

    From /proc/net (proc(5)) and readable descriptors.
    """
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in proc_text(table).splitlines()[1:]:
            row = line.split()
            if len(row) > 9 and row[3] == _LISTEN and row[1].endswith(f":{port:04X}"):
                pid, command = _process_with(row[9])
                return PortHolder(_user(int(row[7])), pid, command)
    return None


def _process_with(inode: str) -> tuple[int, str]:
    wanted = f"socket:[{inode}]"
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if any(target == wanted for _, target in open_files(pid)):
            words = proc_text(f"/proc/{pid}/cmdline").split("\0")
            text = " ".join(word for word in words if word)
            return pid, text if len(text) <= _COMMAND_LIMIT else f"{text[:_COMMAND_LIMIT]}..."
    return 0, ""


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
