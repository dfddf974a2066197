"""ZeroMQ sockets with safer options than the defaults (bounded queues, no linger, a size limit), and ``join.json``."""

import errno
import socket as os_socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ..errors import UsageError
from ..host.process import proc_text, read_private, write_private
from ..run.rundir import RunDir, RunOptions, encode_file
from .keys import ZAP_DOMAIN, KeyPair

SEND_HIGH_WATER = 10_000
RECEIVE_HIGH_WATER = 100_000
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Limit of a frame; a larger one is dropped with its connection. The largest regular one is a history answer."""
REQUEST_HIGH_WATER = 200
MAX_REQUEST_BYTES = 1024 * 1024
"""Limit of a request on the channels of apps: a flood waits in the sender's queue, not in the hub's memory."""
REQUEST_CHANNELS = ("control", "query")
_KINDS = {
    "telemetry": (zmq.PULL, zmq.PUSH),  # from probes
    "ranks": (zmq.ROUTER, zmq.DEALER),  # commands to a rank's probe
    "stream": (zmq.PUB, zmq.SUB),  # to apps
    "control": (zmq.ROUTER, zmq.DEALER),  # commands of apps
    "query": (zmq.ROUTER, zmq.DEALER),  # history for apps
    "agents": (zmq.ROUTER, zmq.DEALER),  # to the agents of other hosts, which forward the messages of their ranks
}
"""The kinds of the hub's socket and of its peers', by channel."""
CHANNELS = tuple(_KINDS)
LOCAL_CHANNEL = "telemetry"
"""Not bound over TCP, where nothing uses it: what arrives on it counts as sent by a process of the hub's host."""
AGENT_CHANNELS = ("ranks", "agents")  # the channels that an agent uses; over TCP only agents use them


class _Socket(zmq.Socket[bytes]):
    """Sets ``IPV6`` for IPv6 addresses only: if it is always set, names with both kinds are not tried over IPv4."""

    def bind(self, addr: str) -> Any:
        self.setsockopt(zmq.IPV6, int("[" in addr))
        return super().bind(addr)

    def connect(self, addr: str) -> Any:
        self.setsockopt(zmq.IPV6, int("[" in addr))
        return super().connect(addr)


def _new(context: "zmq.Context[Any]", kind: int) -> "zmq.Socket[Any]":
    socket = context.socket(kind, _Socket)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    return socket


def hub_socket(context: "zmq.Context[Any]", channel: str) -> "zmq.Socket[Any]":
    """Return the hub's socket of ``channel``, not yet bound."""
    kind = _KINDS[channel][0]
    socket = _new(context, kind)
    if kind == zmq.ROUTER:
        # A send to a peer that is gone fails with EHOSTUNREACH, one to a full queue with EAGAIN: no silent drops.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if channel == "telemetry":
        # Per sender. A message may occupy a piece of 18 KiB by itself.
        socket.setsockopt(zmq.RCVHWM, SEND_HIGH_WATER)
    if channel in REQUEST_CHANNELS:
        socket.setsockopt(zmq.RCVHWM, REQUEST_HIGH_WATER)
        socket.setsockopt(zmq.SNDHWM, REQUEST_HIGH_WATER)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
    if channel in AGENT_CHANNELS:
        # A rank or an agent that reconnects takes over the identity of its dead connection. Only here: ZeroMQ assigns
        # the identities of apps, and no app may receive the answers to another's command.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    # 1,024 ranks may connect at once; connections that the listen queue refuses are retried a second later.
    socket.setsockopt(zmq.BACKLOG, 4096)
    return socket


def peer_socket(context: "zmq.Context[Any]", channel: str, identity: bytes | None = None) -> "zmq.Socket[Any]":
    """Return a probe's or an app's socket of ``channel``, not yet connected.

    Without a hub, a probe's socket queues up to ``SEND_HIGH_WATER`` messages and delivers them within 1 s of the hub's
    return; beyond that a non-blocking send fails and the probe counts the drop.
    """
    socket = _new(context, _KINDS[channel][1])
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    if channel == "stream":
        socket.setsockopt(zmq.RCVHWM, SEND_HIGH_WATER)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
    return socket


def received(socket: "zmq.Socket[Any] | None") -> Iterator[list[bytes]]:
    """Yield the messages that have arrived at a socket, each as its frames; none without a socket."""
    with suppress(zmq.Again):
        while socket is not None and not socket.closed:
            yield socket.recv_multipart(zmq.NOBLOCK)


def is_listening(address: str) -> bool:
    """Return whether a process has bound an ``ipc://`` address; it may be stopped."""
    with os_socket.socket(os_socket.AF_UNIX, os_socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(address.removeprefix("ipc://")) in (0, errno.EAGAIN)


def secure_server(socket: "zmq.Socket[Any]", pair: KeyPair, domain: str = ZAP_DOMAIN) -> None:
    """Require CURVE on addresses that are bound from now on; bound ones are unchanged.

    Requires ``keys.start_authenticator`` on the same context before the first bind; without it no client is accepted.
    ``domain`` selects the keys that are accepted: those of apps, or the agents' (``keys.AGENT_DOMAIN``).
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, domain)
    # Without this a CURVE server without an authenticator accepts every client that has its public key.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    _set_pair(socket, pair)


def secure_client(socket: "zmq.Socket[Any]", pair: KeyPair, server_key: str) -> None:
    """Use CURVE on addresses that are connected from now on; raise ``UsageError`` for an invalid ``server_key``."""
    try:
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
    except (zmq.ZMQError, ValueError, OverflowError):
        hint = "copy 'server_key' from the run's hub.json"
        raise UsageError(f"{server_key!r} is not a hub's public key; {hint}") from None
    _set_pair(socket, pair)


def _set_pair(socket: "zmq.Socket[Any]", pair: KeyPair) -> None:
    """Set the key pair, and detect within a minute that the other host is gone without closing the connection."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def bind(socket: "zmq.Socket[Any]", address: str) -> None:
    """Bind a socket; raise ``UsageError`` if the address is in use, not this host's, or invalid."""
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise UsageError(f"{address}: already in use; choose another port with --listen HOST:PORT") from None
        raise UsageError(f"{address}: cannot listen there: {error.strerror}") from None


JOIN_NAME = "join.json"


class JoinFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """``join.json``: the hub's addresses and key and the agents' key pair, with which another host joins a run.

    It holds a secret, so it is 0600 in the 0700 run directory and is sent to another host as a file: over a shared file
    system, or over ssh's or srun's standard input. Command lines and the environment have only its path.
    """

    run: str  # the run directory on the hub's host, which also marks the run's processes on every host
    id: str
    host: str
    boot_id: str  # boot identifier, which distinguishes that host from others of the same name
    addresses: list[str]  # the hub's possible addresses, to be tried in this order
    port: int  # the first of the hub's ports
    server_key: str  # the hub's public CURVE key
    public: str
    secret: str  # the key pair of the run's agents, with `public`
    version: str
    options: RunOptions = RunOptions()
    pushed: bool = False
    """This copy was made for this run, by ssh or srun; the last process of the run on this host removes it."""

    @property
    def pair(self) -> KeyPair:
        """The agents' key pair."""
        return KeyPair(self.public, self.secret)

    def port_of(self, channel: str) -> int:
        """Return the TCP port of one of the hub's channels."""
        return self.port + CHANNELS.index(channel)

    def __repr__(self) -> str:
        return f"JoinFile(id={self.id!r}, host={self.host!r}, port={self.port})"


def join_path(run: RunDir) -> Path:
    """Return the path of the file in a run directory."""
    return run.path / JOIN_NAME


def write_join(run: RunDir, content: JoinFile) -> Path:
    """Write the file, mode 0600; return its path."""
    write_private(join_path(run), encode_file(content))
    return join_path(run)


def read_join(path: Path) -> JoinFile:
    """Read the file; raise ``UsageError`` if it is missing or invalid, ``RunDirError`` if others can read it."""
    try:
        data = read_private(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; copy join.json from the run's directory") from None
    try:
        return msgspec.json.decode(data, type=JoinFile)
    except (msgspec.MsgspecError, ValueError) as error:
        raise UsageError(f"{path}: is not a run's join.json: {error}") from None


def boot_id() -> str:
    """Return the identifier of this boot; empty if the kernel has none."""
    return proc_text("/proc/sys/kernel/random/boot_id").strip()
