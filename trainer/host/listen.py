"""The ``--listen HOST:PORT`` option: a TCP port for each of the hub's channels but ``LOCAL_CHANNEL``.

PORT and those after it, in the order of ``CHANNELS``; that of ``LOCAL_CHANNEL`` stays free.
"""

import ipaddress
import socket
from typing import NamedTuple

from ...protocol.errors import UsageError
from ...protocol.link.sockets import CHANNELS, LOCAL_CHANNEL


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
    """Parse ``HOST:PORT``; HOST is an address or name of this host, or empty for every interface.

    Raises:
        UsageError: ``text`` does not have that form.
    """
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
    """Raise if a port is in use.

    Raises:
        UsageError: one of the ports is in use, or the address is not this host's.
    """
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
