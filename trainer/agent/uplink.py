"""At-least-once delivery to the hub: messages are numbered and kept until the hub has recorded them.

While the link is cut, messages wait here up to a limit; then the oldest are dropped, which the hub detects from their
senders' sequence numbers. On a new connection everything unconfirmed is resent, and the hub records each number once.
"""

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import zmq

from ...protocol.errors import ProtocolError
from ...protocol.link import sockets
from ...protocol.link.sockets import JoinFile
from ...protocol.messages import wire
from ...protocol.messages.hosts import AgentAck, AgentBeat, encode_numbers

KEPT_BYTES = 64 << 20  # Limit of the waiting messages
WINDOW = 4096  # Maximum number of messages in flight; the hub confirms four times a second
SILENT_SECONDS = 3.0  # A connection without an answer for this many seconds is closed: a cut link produces no error
_OVERHEAD = 200


class _Kept(NamedTuple):
    number: int
    header: bytes
    body: bytes

    @property
    def size(self) -> int:
        return len(self.header) + len(self.body) + _OVERHEAD


class Uplink:
    """One agent's connection to the hub's ``agents`` channel. Use it from one thread."""

    def __init__(self, context: "zmq.Context[Any]", join: JoinFile, identity: str) -> None:
        self._context = context
        self._join = join
        self._identity = identity
        self._waiting: deque[_Kept] = deque()
        self._flying: deque[_Kept] = deque()
        self.waiting_bytes = 0  # Size of the unconfirmed messages, bytes
        self._number = 0
        self._last_ack = 0.0
        self._connected_at = 0.0
        self._moved_at = 0.0  # When a message was last confirmed, or when sending resumed after all had been confirmed
        self._best_trip = float("inf")
        self.socket: zmq.Socket[Any] | None = None
        self.dropped = 0
        self.clock_offset: float | None = None  # Seconds to add to this host's clock to get the hub's time
        self.round_trip: float | None = None
        self.run_end: AgentAck | None = None  # The hub's message that the run is over

    @property
    def waiting(self) -> int:
        """Number of unconfirmed messages."""
        return len(self._waiting) + len(self._flying)

    @property
    def connected(self) -> bool:
        """Whether the hub has answered on this connection."""
        return self.socket is not None and self._last_ack >= self._connected_at

    @property
    def silent(self) -> bool:
        """Whether the connection has received no answer, or no confirmation, for too long."""
        if self.socket is None:
            return False
        now = time.monotonic()
        stuck = bool(self._flying) and now - max(self._moved_at, self._connected_at) > SILENT_SECONDS
        return stuck or now - max(self._last_ack, self._connected_at) > SILENT_SECONDS

    def connect(self, address: str) -> None:
        """Reconnect to the hub's ``agents`` channel; all unconfirmed messages are sent again."""
        self.disconnect()
        socket = sockets.peer_socket(self._context, "agents", self._identity.encode())
        socket.setsockopt(zmq.IMMEDIATE, 1)  # queue nothing while the hub is not connected
        sockets.secure_client(socket, self._join.pair, self._join.server_key)
        socket.connect(address)
        self.socket = socket
        self._connected_at = time.monotonic()

    def disconnect(self) -> None:
        """Close the connection."""
        if self.socket is not None:
            self.socket.close(linger=0)
            self.socket = None
        while self._flying:
            self._waiting.appendleft(self._flying.pop())

    def put(self, header: bytes, body: bytes) -> None:
        """Queue one message for the hub."""
        self._number += 1
        kept = _Kept(self._number, header, body)
        self._waiting.append(kept)
        self.waiting_bytes += kept.size
        while self.waiting_bytes > KEPT_BYTES and self.waiting > 1:
            self.waiting_bytes -= (self._flying or self._waiting).popleft().size
            self.dropped += 1

    def pump(self) -> None:
        """Send the messages that fit the window."""
        socket = self.socket
        if socket is None:
            return
        if not self._flying:
            self._moved_at = time.monotonic()
        oldest = (self._flying or self._waiting or (_Kept(self._number + 1, b"", b""),))[0].number
        with contextlib.suppress(zmq.Again):
            while self._waiting and len(self._flying) < WINDOW:
                kept = self._waiting[0]
                frames = [encode_numbers(kept.number, oldest), kept.header, kept.body]
                socket.send_multipart(frames, zmq.NOBLOCK)
                self._flying.append(self._waiting.popleft())

    def send_beat(self, beat: AgentBeat) -> None:
        """Send an unnumbered heartbeat; drop it if it cannot be sent now."""
        if self.socket is not None:
            with contextlib.suppress(zmq.Again):
                self.socket.send_multipart(wire.encode(self._identity, 0, beat.time, beat), zmq.NOBLOCK)

    def receive(self) -> None:
        """Receive all answers."""
        for frames in sockets.received(self.socket):
            with contextlib.suppress(ProtocolError, IndexError):
                wire.decode_header(frames[0])
                message = wire.decode_body(frames[1])
                if isinstance(message, AgentAck):
                    self._confirmed(message)

    def _confirmed(self, ack: AgentAck) -> None:
        self._last_ack = time.monotonic()
        for kept in (self._flying, self._waiting):
            while kept and kept[0].number <= ack.number:
                self.waiting_bytes -= kept.popleft().size
                self._moved_at = self._last_ack
        if ack.over:
            self.run_end = ack
        if ack.beat:
            self._learn_clock(ack)

    def _learn_clock(self, ack: AgentAck) -> None:
        """Estimate the clocks' difference from a heartbeat's answer; the fastest round trip is the most precise."""
        now = time.time()
        trip = now - ack.beat
        if not 0.0 <= trip < SILENT_SECONDS:
            return
        # Clocks drift: each later answer increases the stored round-trip time by 1 %, so that old ones lose weight.
        self._best_trip *= 1.01
        if trip <= max(self._best_trip, 0.0005):
            self._best_trip = trip
            self.round_trip = trip
            self.clock_offset = ack.time - (ack.beat + now) / 2


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
            self.remove(name)
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
        for name, channel in self._by_name.items():
            for frames in sockets.received(channel):
                # EHOSTUNREACH, EAGAIN: it is gone or does not read; the hub's command then reaches its deadline.
                with contextlib.suppress(zmq.ZMQError):
                    self._ranks.send_multipart([name, *frames], zmq.NOBLOCK)

    def pass_answers(self) -> None:
        """Forward answers of the ranks to the hub."""
        for name, *frames in sockets.received(self._ranks):
            socket = self.add(name)
            if socket is not None:
                with contextlib.suppress(zmq.Again):
                    socket.send_multipart(frames, zmq.NOBLOCK)

    def close(self) -> None:
        """Close all sockets."""
        for channel in self._by_name.values():
            channel.close(linger=0)
        self._by_name.clear()


_TRY_SECONDS = 2.0
_PAUSE_SECONDS = 1.0


class Route(threading.Thread):
    """Tries the hub's addresses on request, until one answers.

    ``addresses`` are in order of preference; ``found`` is called, in this thread, with one that accepted a connection.
    """

    def __init__(self, addresses: list[str], port: int, found: Callable[[str], object]) -> None:
        super().__init__(name="route", daemon=True)
        self._addresses = list(dict.fromkeys(addresses))
        self._port = port
        self._found = found
        self._wanted = threading.Event()
        self._ending = threading.Event()

    def search(self) -> None:
        """Start a search for an address; ``found`` is called once it succeeds."""
        self._wanted.set()

    def avoid(self, address: str) -> None:
        """Try this address last: it accepted a connection, but no hub of this run answered."""
        if address in self._addresses:
            self._addresses.remove(address)
            self._addresses.append(address)

    def stop(self) -> None:
        """End the thread within a few seconds."""
        self._ending.set()
        self._wanted.set()

    def run(self) -> None:
        """Search on request until stopped."""
        while True:
            self._wanted.wait()
            if self._ending.is_set():
                return
            answers = next((address for address in list(self._addresses) if self._answers(address)), None)
            if answers is None:
                self._ending.wait(_PAUSE_SECONDS)
                continue
            self._wanted.clear()
            self._found(answers)

    def _answers(self, address: str) -> bool:
        try:
            with socket.create_connection((address, self._port), timeout=_TRY_SECONDS):
                return True
        except OSError:
            return False
