"""The hub's bound sockets, one per channel on this host and more if the run listens on TCP, and its main loop."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import zmq

from ...protocol.errors import FtmonError
from ...protocol.link import keys, sockets
from ...protocol.run.rundir import RunDir
from ..host.loop import serve
from ..host.sockets import parse_listen

_LINGER_MS = 500  # Time limit at the hub's end for data not yet sent to apps: the end of the stream, and answers


class Channels:
    """Binds every channel of ``run``; ``listen`` is ``HOST:PORT`` or empty.

    If the hub cannot listen on TCP, ``problem`` has the reason; the run continues without. CURVE is a property of a
    socket, not of an address, so each channel needs a second socket. Apps and agents have different keys: an agent's
    key opens only the agents' channels, an app's key all others. Raises ``UsageError`` if a local address cannot be
    bound.
    """

    def __init__(self, run: RunDir, listen: str) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        # If the hub shares a core with ZeroMQ's I/O thread, that thread need not interrupt it for every message.
        self._context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
        self._run = run
        self.addresses = {channel: run.ipc_address(channel) for channel in sockets.CHANNELS}
        self._local = {channel: self._bind(channel) for channel in sockets.CHANNELS}
        self._remote: dict[str, zmq.Socket[Any]] = {}
        self._authenticator: Any = None
        self.listening: dict[str, str] = {}  # Addresses on TCP
        self.server_key = self.problem = ""
        if listen:
            try:
                self._open(listen)
            except FtmonError as error:
                self._close_remote()
                self.problem = str(error)

    def of(self, channel: str) -> "list[zmq.Socket[Any]]":
        """Return a channel's local socket and, if it has one, its TCP socket."""
        return [each[channel] for each in (self._local, self._remote) if channel in each]

    def close(self) -> None:
        """Close the open sockets (the history thread closes its own), and remove their files."""
        self._close_remote()
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

    def _open(self, listen: str) -> None:
        addresses = parse_listen(listen).addresses()
        pair = keys.server_pair(self._run)
        self._authenticator = keys.start_authenticator(self._context, keys.agent_pair(self._run).public)
        for channel, address in addresses.items():
            socket = self._remote[channel] = sockets.hub_socket(self._context, channel)
            # An app must not be able to send messages for a rank.
            domain = keys.AGENT_DOMAIN if channel in sockets.AGENT_CHANNELS else keys.ZAP_DOMAIN
            sockets.secure_server(socket, pair, domain)
            sockets.bind(socket, address)
        self.listening, self.server_key = addresses, pair.public

    def _close_remote(self) -> None:
        for socket in self._remote.values():
            if not socket.closed:
                socket.close()
        self._remote.clear()
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None


class PollLoop:
    """The main loop: polls sources and calls their handlers; telemetry reaches 20,000 messages a second.

    ``tick`` is called regularly with ``time.monotonic``; the others around each wait for the sources.
    """

    def __init__(
        self, tick: Callable[[float], None], before_wait: Callable[[], None], after_read: Callable[[], None]
    ) -> None:
        self._tick = tick
        self._before_wait = before_wait
        self._after_read = after_read
        self._handlers: dict[Any, Callable[[], object]] = {}
        self._stopped = False

    def add(self, source: Any, handler: Callable[[], object]) -> None:
        """Call ``handler`` when ``source`` (a socket or a descriptor) is readable; sources added first come first."""
        self._handlers[source] = handler

    def stop(self) -> None:
        """End ``run`` after the current round."""
        self._stopped = True

    def run(self) -> None:
        """Serve until stopped; raise a handler's exception after too many of them in a short time."""
        poller = zmq.Poller()
        for source in self._handlers:
            poller.register(source, zmq.POLLIN)
        serve(lambda wait_ms: self._round(poller, wait_ms), self._tick, lambda: self._stopped)

    def _round(self, poller: zmq.Poller, timeout_ms: int) -> None:
        self._before_wait()
        ready = dict(poller.poll(timeout_ms))
        for source, handler in self._handlers.items():
            if source in ready:
                handler()
        self._after_read()
