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


class RemoteSockets:
    """TCP sockets of a hub (``--listen``). If it cannot listen, ``problem`` has the reason; the run continues without.

    CURVE is a property of a socket, not of an address, so each channel needs a second socket. Apps and agents have
    different keys: an agent's key opens only the agents' channels, an app's key all others.
    """

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


_LINGER_MS = 500  # Time limit at the hub's end for data not yet sent to apps: the end of the stream, and answers


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
