"""Multiplexes connections over one pair of pipes: carries a run's sockets through an ssh without open ports.

Bytes only; their meaning is up to the sockets at both ends. Frames are a kind, a connection's number and a length
(``>BII``), then as many bytes. A side sends at most ``WINDOW`` bytes of a connection that the other has not written on
yet, so that one without a reader holds up no other.
"""

import contextlib
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Mapping

OPEN, DATA, CLOSE, CREDIT = range(4)
WINDOW = 1 << 20
_READ = 64 << 10
_PIPE_LIMIT = 256 << 10
"""Bytes that may wait for the pipe; little, because a small answer waits behind them."""
_FRAME_LIMIT = WINDOW + _READ
_HEAD = struct.Struct(">BII")
_COUNT = struct.Struct(">I")


class _Connection:
    def __init__(self, near: socket.socket) -> None:
        self.socket = near
        self.unwritten = bytearray()
        self.credit = WINDOW
        self.closing = False
        """The other side has closed: what is unwritten still goes out."""


class Tunnel(threading.Thread):
    """One end. Either end may be the one whose programs connect (``listeners``), the other then opens.

    Args:
        source: descriptor to read from; closed at the end.
        sink: descriptor to write to; closed at the end.
        listeners: bound sockets by channel; a connection to one is carried to the other end.
        opener: makes the connection to a channel, when the other end asks for it; raises OSError where it cannot.
    """

    def __init__(
        self,
        source: int,
        sink: int,
        listeners: Mapping[str, socket.socket] | None = None,
        opener: Callable[[str], socket.socket] | None = None,
    ) -> None:
        super().__init__(name="tunnel", daemon=True)
        self._source = source
        self._sink = sink
        self._listeners = dict(listeners or {})
        self._opener = opener
        self._connections: dict[int, _Connection] = {}
        self._last = 0
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._over = False

    def stop(self) -> None:
        """End it; any thread."""
        self._over = True
        with contextlib.suppress(OSError):
            self._wake.send(b"!")

    def run(self) -> None:
        """Carry until a pipe closes or ``stop``."""
        for descriptor in (self._source, self._sink):
            os.set_blocking(descriptor, False)
        for listener in self._listeners.values():
            listener.setblocking(False)
        try:
            while not self._over:
                self._wait()
        except (OSError, ValueError):
            pass  # a pipe broke, or what comes through it is no tunnel's: either way it is over
        finally:
            self._close()

    def _wait(self) -> None:
        wanted = self._wanted()
        for key in list(self._selector.get_map().values()):
            if key.fileobj not in wanted:
                self._selector.unregister(key.fileobj)
        for each, events in wanted.items():
            try:
                self._selector.modify(each, events)
            except KeyError:
                self._selector.register(each, events)
        ready = {key.fileobj: events for key, events in self._selector.select()}
        if self._source in ready:
            self._read_pipe()
        for channel, listener in self._listeners.items():
            if listener in ready:
                self._accept(channel, listener)
        for number, connection in list(self._connections.items()):
            events = ready.get(connection.socket, 0)
            if events & selectors.EVENT_WRITE:
                self._write_on(number, connection)
            if events & selectors.EVENT_READ and number in self._connections:
                self._read_from(number, connection)
        self._write_pipe()

    def _wanted(self) -> dict[int | socket.socket, int]:
        """List what is to be waited for."""
        wanted: dict[int | socket.socket, int] = {self._source: selectors.EVENT_READ, self._woken: selectors.EVENT_READ}
        if self._outgoing:
            wanted[self._sink] = selectors.EVENT_WRITE
        if len(self._outgoing) < _PIPE_LIMIT:
            for listener in self._listeners.values():
                wanted[listener] = selectors.EVENT_READ
        for connection in self._connections.values():
            events = selectors.EVENT_WRITE if connection.unwritten else 0
            if connection.credit > 0 and not connection.closing and len(self._outgoing) < _PIPE_LIMIT:
                events |= selectors.EVENT_READ
            if events:
                wanted[connection.socket] = events
        return wanted

    # The pipe.

    def _send(self, kind: int, number: int, data: bytes = b"") -> None:
        self._outgoing += _HEAD.pack(kind, number, len(data))
        self._outgoing += data

    def _write_pipe(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                del self._outgoing[: os.write(self._sink, self._outgoing[:_READ])]

    def _read_pipe(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._source, 4 * _READ)
            if not data:
                self._over = True
                return
            self._incoming += data
        while len(self._incoming) >= _HEAD.size:
            kind, number, length = _HEAD.unpack_from(self._incoming)
            if length > _FRAME_LIMIT:
                raise ValueError("not a tunnel's frame")
            end = _HEAD.size + length
            if len(self._incoming) < end:
                return
            data = bytes(self._incoming[_HEAD.size : end])
            del self._incoming[:end]
            self._handle_frame(kind, number, data)

    def _handle_frame(self, kind: int, number: int, data: bytes) -> None:
        connection = self._connections.get(number)
        if kind == OPEN:
            self._open(number, data.decode("ascii", "replace"))
        elif connection is None:
            return  # closed here meanwhile
        elif kind == DATA:
            connection.unwritten += data
            self._write_on(number, connection)
        elif kind == CREDIT:
            connection.credit += _COUNT.unpack(data)[0]
        elif kind == CLOSE:
            connection.closing = True
            self._write_on(number, connection)

    # The connections.

    def _open(self, number: int, channel: str) -> None:
        try:
            if self._opener is None or number in self._connections:
                raise OSError("nothing opens here")
            near = self._opener(channel)
        except OSError:
            self._send(CLOSE, number)
            return
        near.setblocking(False)
        self._connections[number] = _Connection(near)

    def _accept(self, channel: str, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            near, _ = listener.accept()
            near.setblocking(False)
            self._last += 1
            self._connections[self._last] = _Connection(near)
            self._send(OPEN, self._last, channel.encode("ascii"))

    def _read_from(self, number: int, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(min(_READ, connection.credit))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            connection.credit -= len(data)
            self._send(DATA, number, data)
        else:
            self._drop(number)
            self._send(CLOSE, number)

    def _write_on(self, number: int, connection: _Connection) -> None:
        written = 0
        try:
            while connection.unwritten:
                count = connection.socket.send(connection.unwritten)
                del connection.unwritten[:count]
                written += count
        except BlockingIOError:
            pass
        except OSError:
            self._drop(number)
            self._send(CLOSE, number)
            return
        if written and not connection.closing:
            self._send(CREDIT, number, _COUNT.pack(written))
        if connection.closing and not connection.unwritten:
            self._drop(number)

    def _drop(self, number: int) -> None:
        connection = self._connections.pop(number)
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection.socket)
        connection.socket.close()

    def _close(self) -> None:
        self._over = True
        for number in list(self._connections):
            self._drop(number)
        self._selector.close()
        for each in (self._wake, self._woken):
            each.close()
        for descriptor in {self._source, self._sink}:
            with contextlib.suppress(OSError):
                os.close(descriptor)
