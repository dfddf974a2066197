"""The hub's bound sockets: one a channel on this host, and one more each when the run listens on TCP."""

import contextlib
import os
from typing import Any

import zmq

from ...protocol import sockets
from ...protocol.rundir import RunDir
from .remote import RemoteSockets

_LINGER_MS = 500
"""Linger at the hub's end for data still owed to apps: the end of the stream, and answers."""


class Channels:
    """Binds every channel of ``run``; ``listen`` is ``HOST:PORT`` or empty.

    Raises:
        UsageError: a local address cannot be bound.
    """

    def __init__(self, run: RunDir, listen: str) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        # Where the hub shares a core with ZeroMQ's own thread, that thread need not interrupt it for every message.
        self._context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
        self._run = run
        self.addresses = {channel: run.ipc_address(channel) for channel in sockets.CHANNELS}
        self._local = {channel: self._bind(channel) for channel in sockets.CHANNELS}
        self.remote = RemoteSockets(self._context, run, listen)

    def of(self, channel: str) -> "list[zmq.Socket[Any]]":
        """Return a channel's local socket and, when the run listens on TCP, the other one."""
        remote = self.remote.sockets.get(channel)
        return [self._local[channel]] + ([remote] if remote is not None else [])

    def close(self) -> None:
        """Close what is still open, and remove the sockets' files."""
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
