"""The hub's bound sockets: one per channel on this host, and more if the run listens on TCP."""

import contextlib
import os
from typing import Any

import zmq

from ...protocol.errors import FtmonError
from ...protocol.link import keys, sockets
from ...protocol.run.rundir import RunDir
from ..host.sockets import parse_listen

# The hub's TCP sockets (``--listen``): a second, encrypted socket for each channel that other hosts use.
#
# CURVE is a property of a socket, not of an address, so each channel needs a second socket. Apps and agents have
# different keys: an agent's key opens only the agents' channels, an app's key all others.


class RemoteSockets:
    """TCP sockets of a hub. If it cannot listen, ``problem`` has the reason, and the run continues without."""

    def __init__(self, context: "zmq.Context[Any]", run: RunDir, listen: str) -> None:
        self.sockets: dict[str, zmq.Socket[Any]] = {}
        self.addresses: dict[str, str] = {}
        self.server_key = ""
        self.problem = ""
        self._authenticator: Any = None
        if listen:
            try:
                self._open(context, run, listen)
            except FtmonError as error:
                self.close()
                self.problem = str(error)

    def close(self) -> None:
        """Close the open sockets (the history thread closes its own)."""
        for socket in self.sockets.values():
            if not socket.closed:
                socket.close()
        self.sockets.clear()
        self.addresses.clear()
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None

    def _open(self, context: "zmq.Context[Any]", run: RunDir, listen: str) -> None:
        addresses = parse_listen(listen).addresses()
        pair = keys.server_pair(run)
        self._authenticator = keys.start_authenticator(context, keys.agent_pair(run).public)
        for channel, address in addresses.items():
            socket = sockets.hub_socket(context, channel)
            self.sockets[channel] = socket
            # An app must not be able to send messages for a rank.
            domain = keys.AGENT_DOMAIN if channel in sockets.AGENT_CHANNELS else keys.ZAP_DOMAIN
            sockets.secure_server(socket, pair, domain)
            sockets.bind(socket, address)
        self.addresses = addresses
        self.server_key = pair.public


_LINGER_MS = 500
"""Time limit at the hub's end for data not yet sent to apps: the end of the stream, and answers."""


class Channels:
    """Binds every channel of ``run``; ``listen`` is ``HOST:PORT`` or empty.

    Raises:
        UsageError: a local address cannot be bound.
    """

    def __init__(self, run: RunDir, listen: str) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        # If the hub shares a core with ZeroMQ's I/O thread, that thread need not interrupt it for every message.
        self._context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
        self._run = run
        self.addresses = {channel: run.ipc_address(channel) for channel in sockets.CHANNELS}
        self._local = {channel: self._bind(channel) for channel in sockets.CHANNELS}
        self.remote = RemoteSockets(self._context, run, listen)

    def of(self, channel: str) -> "list[zmq.Socket[Any]]":
        """Return a channel's local socket and, if it has one, its TCP socket."""
        remote = self.remote.sockets.get(channel)
        return [self._local[channel]] + ([remote] if remote is not None else [])

    def close(self) -> None:
        """Close the open sockets, and remove their files."""
        self.remote.close()
        for channel, socket in self._local.items():
            if not socket.closed:
                socket.close(linger=_LINGER_MS if channel in ("stream", "control") else 0)
        self._context.term()
        with contextlib.suppress(OSError):
            self._run.remove_sockets(sockets.CHANNELS)

    def _bind(self, channel: str) -> "zmq.Socket[Any]":
        socket = sockets.hub_socket(self._context, channel)
        sockets.bind(socket, self.addresses[channel])
        return socket
