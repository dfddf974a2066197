"""The hub's bound sockets: one per channel on this host, and more if the run listens on TCP."""

import contextlib
import os
from typing import Any

import zmq

from ....protocol.link import sockets
from ....protocol.run.rundir import RunDir
from .remote import RemoteSockets

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
