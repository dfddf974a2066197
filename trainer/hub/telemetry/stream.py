"""The stream of a run: each message gets the next sequence number, is recorded, and is published to every app.

The main loop calls ``flush`` before it waits, and ``commit`` a few times a second.
"""

from collections.abc import Callable, Sequence
from typing import Any

import zmq

from ....protocol.messages import wire
from ....protocol.messages.telemetry import Heartbeat
from ....protocol.messages.wire import Message
from .recorder import Recorder

_ENOUGH_ROWS = 4_000
"""Uncommitted messages above which a commit is due at once, so that memory stays bounded."""


class Stream:
    """Numbers, records and publishes. ``sockets`` are bound PUBs; ``first_seq`` is the first number to assign."""

    def __init__(self, sockets: "Sequence[zmq.Socket[Any]]", recorder: Recorder, first_seq: int) -> None:
        self._sockets = list(sockets)
        self.recorder = recorder
        self._waiting = 0
        self._outbox: list[bytes] = []
        self.seq = first_seq - 1
        self.published = 0

    @property
    def commit_due(self) -> bool:
        """Whether too many messages are uncommitted to wait for the next regular commit."""
        return self._waiting >= _ENOUGH_ROWS

    def put(self, message: Message, t: float, body: bytes | None = None) -> int:
        """Append ``message`` to the stream, to be published by the next ``flush``; return its number.

        ``t`` is the time of receipt, seconds since the epoch; ``body`` the encoded message as received, if it was.
        """
        self.seq = seq = self.seq + 1
        if type(message) is not Heartbeat:  # the recording does not need heartbeats
            self.recorder.writer.append(seq, t, message)
            self._waiting += 1
        if body is None:
            body = wire.encode_body(message)
        header = wire.encode_header("hub", seq, t)
        self._outbox.append(header)
        self._outbox.append(body)
        self.published += 1
        return seq

    def flush(self) -> None:
        """Publish the messages appended since the last call.

        In bursts, because each send may wake ZeroMQ's I/O thread: with single sends between other work, it woke up and
        wrote for every message, which took a quarter of the hub's time.
        """
        if not self._outbox:
            return
        frames, self._outbox = self._outbox, []
        more = int(zmq.SNDMORE)
        for socket in self._sockets:
            send = socket.send
            flags = more
            for frame in frames:
                # A PUB socket never blocks: it drops messages for slow apps only, and sequence numbers show the gap.
                send(frame, flags)
                flags ^= more

    def commit(self, then: Callable[[], object] | None = None) -> None:
        """Write the messages appended since the last commit; ``then`` is called as by ``Recorder.commit``."""
        self._waiting = 0
        self.recorder.commit(then)
