"""Forwards the hub's commands to the ranks of this host, and their answers back, unchanged."""

import contextlib
from collections.abc import Iterator
from typing import Any

import zmq

from ...protocol.link import sockets
from ...protocol.link.join import JoinFile


class Proxies:
    """Connections to the hub's ``ranks`` channel, one per rank of this host, under that rank's identity.

    ``ranks`` is the bound ROUTER that this host's ranks are connected to.
    """

    def __init__(self, context: "zmq.Context[Any]", join: JoinFile, ranks: "zmq.Socket[Any]") -> None:
        self._context = context
        self._join = join
        self._ranks = ranks
        self._address = ""
        self._by_name: dict[bytes, zmq.Socket[Any]] = {}

    def sockets(self) -> "Iterator[zmq.Socket[Any]]":
        """Return the sockets that receive commands."""
        return iter(self._by_name.values())

    def connect(self, address: str) -> None:
        """Reconnect all, because old connections may not have detected a cut yet."""
        self._address = address
        for name in list(self._by_name):
            self._by_name.pop(name).close(linger=0)
            self.add(name)

    def add(self, name: bytes) -> "zmq.Socket[Any] | None":
        """Add a rank and return its socket; None while the hub is unreachable."""
        if not self._address or name in self._by_name:
            return self._by_name.get(name)
        socket = sockets.peer_socket(self._context, "ranks", name)
        sockets.secure_client(socket, self._join.pair, self._join.server_key)
        socket.connect(self._address)
        self._by_name[name] = socket
        return socket

    def remove(self, name: bytes) -> None:
        """Remove a rank whose process is gone."""
        socket = self._by_name.pop(name, None)
        if socket is not None:
            socket.close(linger=0)

    def pass_commands(self) -> None:
        """Forward commands of the hub to the ranks."""
        for name, socket in self._by_name.items():
            with contextlib.suppress(zmq.Again):
                while True:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                    # EHOSTUNREACH, EAGAIN: it is gone or does not read; the hub's command then reaches its deadline.
                    with contextlib.suppress(zmq.ZMQError):
                        self._ranks.send_multipart([name, *frames], zmq.NOBLOCK)

    def pass_answers(self) -> None:
        """Forward answers of the ranks to the hub."""
        with contextlib.suppress(zmq.Again):
            while True:
                name, *frames = self._ranks.recv_multipart(zmq.NOBLOCK)
                socket = self.add(name)
                if socket is not None:
                    with contextlib.suppress(zmq.Again):
                        socket.send_multipart(frames, zmq.NOBLOCK)

    def close(self) -> None:
        """Close all sockets."""
        for socket in self._by_name.values():
            socket.close(linger=0)
        self._by_name.clear()
