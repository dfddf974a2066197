"""ZeroMQ sockets with the options that ZeroMQ's defaults get wrong: bounded queues, no linger, a size limit."""

from typing import Any

import zmq

from ..errors import UsageError
from .keys import ZAP_DOMAIN, KeyPair

SEND_HIGH_WATER = 10_000
RECEIVE_HIGH_WATER = 100_000
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""A frame above this is dropped with its connection; the largest honest one is a history answer."""

REQUEST_HIGH_WATER = 200
MAX_REQUEST_BYTES = 1024 * 1024
"""Limit of a request on the channels of apps: a flood waits in the sender's queue, not in the hub's memory."""

REQUEST_CHANNELS = ("control", "query")

CHANNELS = ("telemetry", "ranks", "stream", "control", "query", "agents")
"""The hub's sockets. telemetry: PULL from probes. ranks: ROUTER to the probes' DEALERs (commands to a rank).
stream: PUB to apps. control: ROUTER, commands of apps. query: ROUTER, history for apps. agents: ROUTER to the agents
of other hosts, which pass on what their ranks send."""

LOCAL_CHANNEL = "telemetry"
"""Not bound over TCP, where nothing uses it: what arrives on it counts as sent by a process of the hub's host."""

AGENT_CHANNELS = ("ranks", "agents")
"""The channels that an agent uses, and over TCP an agent alone."""

_HUB_KINDS = {
    "telemetry": zmq.PULL,
    "ranks": zmq.ROUTER,
    "stream": zmq.PUB,
    "control": zmq.ROUTER,
    "query": zmq.ROUTER,
    "agents": zmq.ROUTER,
}
_PEER_KINDS = {
    "telemetry": zmq.PUSH,
    "ranks": zmq.DEALER,
    "stream": zmq.SUB,
    "control": zmq.DEALER,
    "query": zmq.DEALER,
    "agents": zmq.DEALER,
}


class _Socket(zmq.Socket[bytes]):
    """Uses IPv6 for IPv6 addresses only: with the option always set, a name of both kinds is never tried over IPv4."""

    def bind(self, addr: str) -> Any:
        self.setsockopt(zmq.IPV6, int("[" in addr))
        return super().bind(addr)

    def connect(self, addr: str) -> Any:
        self.setsockopt(zmq.IPV6, int("[" in addr))
        return super().connect(addr)


def _set_common(socket: "zmq.Socket[Any]") -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)


def hub_socket(context: "zmq.Context[Any]", channel: str) -> "zmq.Socket[Any]":
    """Make the hub's side of ``channel``, not yet bound."""
    socket = context.socket(_HUB_KINDS[channel], _Socket)
    _set_common(socket)
    if _HUB_KINDS[channel] == zmq.ROUTER:
        # A send to a peer that left fails (EHOSTUNREACH) and one to a full queue says so (EAGAIN): neither is silent.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if channel == "telemetry":
        # Of each sender, in 18 KiB pieces of which a message may hold one alone.
        socket.setsockopt(zmq.RCVHWM, SEND_HIGH_WATER)
    if channel in REQUEST_CHANNELS:
        socket.setsockopt(zmq.RCVHWM, REQUEST_HIGH_WATER)
        socket.setsockopt(zmq.SNDHWM, REQUEST_HIGH_WATER)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
    if channel in AGENT_CHANNELS:
        # A rank or an agent that comes back takes its name over from its own dead connection. Nowhere else: an app's
        # name is given by ZeroMQ, and no second app may take the answers to another's command.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    # 1,024 ranks may come at the same moment; what the queue of a listening socket refuses comes back a second later.
    socket.setsockopt(zmq.BACKLOG, 4096)
    return socket


def peer_socket(context: "zmq.Context[Any]", channel: str, identity: bytes | None = None) -> "zmq.Socket[Any]":
    """Make a probe's or an app's side of ``channel``, not yet connected.

    While the hub is away a probe's telemetry queues up to ``SEND_HIGH_WATER`` messages and is delivered when a hub is
    back, within 1 s of its return; beyond that a non-blocking send fails and the probe counts the drop.
    """
    socket = context.socket(_PEER_KINDS[channel], _Socket)
    _set_common(socket)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    if channel == "stream":
        socket.setsockopt(zmq.RCVHWM, SEND_HIGH_WATER)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
    return socket


def secure_server(socket: "zmq.Socket[Any]", pair: KeyPair, domain: str = ZAP_DOMAIN) -> None:
    """Require CURVE on addresses that are bound from now on; bound ones stay as they are.

    Needs ``keys.start_authenticator`` on the same context before the first bind: without it no client is allowed.
    ``domain`` selects whose keys are allowed: those of apps, or the agents' (``keys.AGENT_DOMAIN``).
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
    socket.setsockopt_string(zmq.ZAP_DOMAIN, domain)
    # Without this a CURVE server without an authenticator admits every client that knows its public key.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    _keep_alive(socket)


def secure_client(socket: "zmq.Socket[Any]", pair: KeyPair, server_key: str) -> None:
    """Speak CURVE, as ``pair``, to a server whose public key is ``server_key``, on what is connected from now on.

    Raises:
        UsageError: the server's key is not one.
    """
    try:
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
    except (zmq.ZMQError, ValueError, OverflowError):
        raise UsageError(
            f"{server_key!r} is not a hub's public key; copy 'server_key' from the run's hub.json"
        ) from None
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
    _keep_alive(socket)


def _keep_alive(socket: "zmq.Socket[Any]") -> None:
    """Notice within a minute that the other host vanished without a word."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def bind(socket: "zmq.Socket[Any]", address: str) -> None:
    """Bind, or raise an error with the reason.

    Raises:
        UsageError: the address is taken, not this host's, or not an address.
    """
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise UsageError(f"{address}: already in use; choose another port with --listen HOST:PORT") from None
        raise UsageError(f"{address}: cannot listen there: {error.strerror}") from None
