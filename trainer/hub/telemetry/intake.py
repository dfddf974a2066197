"""Receives telemetry from the ranks: decodes each message once; counts lost, unknown and refused messages."""

import contextlib
import heapq
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from ....protocol.errors import ProtocolError, VersionError
from ....protocol.messages.bounds import MAX_RANKS, MAX_WHOLE
from ....protocol.messages.control import Accepted, Alert, Answer, Command, HubStats, Query, RankState, Result, RunState
from ....protocol.messages.hosts import AgentAck, AgentBeat, HostState
from ....protocol.messages.jobs import Job
from ....protocol.messages.telemetry import Goodbye, Heartbeat, Step
from ....protocol.messages.wire import Header, LossCounter, Message, decode_body, decode_header
from ....protocol.text import sanitize

_OF_THE_HUB = (RankState, RunState, Alert, HubStats, Command, Accepted, Result, Query, Answer, Job)
_NOT_FROM_RANKS = frozenset({*_OF_THE_HUB, AgentBeat, AgentAck, HostState})

MAX_SENDERS = 4 * MAX_RANKS
MAX_OTHERS = 64
"""Maximum number of senders in a hub's lifetime: ``MAX_SENDERS`` in total, ``MAX_OTHERS`` that are not ranks."""
LOSSES_LISTED = 1_000

_NOBLOCK = int(zmq.NOBLOCK)
"""A plain int: pyzmq handles an enum member much slower."""

_OF_RANK = re.compile(r"rank-(\d{1,9})-\d+-\d+")


class Intake:
    """Reads telemetry sockets without ever waiting.

    Args:
        accept: called with each good message: message, time received, sender, body bytes.
        refuse: called with a sender and the reason, the first time that sender is refused.
        known: highest recorded sequence number per sender from an earlier hub; empty for a run's first hub. Other
            senders start at 1. None: unknown; the first message of each sender sets it.
        missed: called once per sender with the number of messages that an earlier hub had received, or that were in
            flight to it, but that are not recorded.
    """

    def __init__(
        self,
        accept: Callable[[Message, float, str, bytes], None],
        refuse: Callable[[str, str], None],
        known: Mapping[str, int] | None,
        missed: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._accept = accept
        self._refuse = refuse
        self._known = known
        self._missed = missed
        self._loss = LossCounter()
        self._seen: dict[str, int | None] = {}
        """By sender: the rank that it may send messages for; None: any."""
        self._others = 0
        self._reported: set[str] = set()
        self._says_dropped: dict[str, int] = {}
        self.received = 0
        self.unknown = 0
        self.refused = 0

    @property
    def lost(self) -> dict[str, int]:
        """Lost messages by sender: gaps in its numbering plus those it reports as dropped before numbering."""
        total = dict(self._loss.lost)
        for sender, dropped in self._says_dropped.items():
            total[sender] = total.get(sender, 0) + dropped
        found = {sender: min(count, MAX_WHOLE) for sender, count in total.items() if count}
        if len(found) > LOSSES_LISTED:
            found = dict(heapq.nlargest(LOSSES_LISTED, found.items(), key=lambda entry: entry[1]))
        return found

    def numbers(self) -> dict[str, int]:
        """Return the highest sequence number received from each sender, including those of an earlier hub."""
        return {**(self._known or {}), **self._loss.numbers}

    def drain(self, socket: "zmq.Socket[Any]", limit: int) -> int:
        """Receive up to ``limit`` waiting messages; return their number."""
        handle = self._handle
        clock = time.time
        count = 0
        with contextlib.suppress(zmq.Again):
            while count < limit:
                frames = _receive(socket)
                count += 1
                handle(frames, clock())
        self.received += count
        return count

    def receive(self, frames: list[bytes]) -> None:
        """Receive one message that an agent forwarded: header and body frames, unchanged."""
        self.received += 1
        self._handle(frames, time.time())

    def _handle(self, frames: list[bytes], now: float) -> None:
        if len(frames) != 2:
            self._refuse_message("a peer", f"an envelope of {len(frames)} frames instead of 2")
            return
        try:
            header = decode_header(frames[0])
            sender = header.src
            first = sender not in self._seen
            if first and not self._register(header):
                self._refuse_message(
                    "a stranger", f"{sanitize(sender, 80)} is not a valid rank, or exceeds the limit: ignored"
                )
                return
            gap = self._loss.see(sender, header.seq)
            if gap and first:
                self._missed(gap)
            message = decode_body(frames[1])
        except VersionError as error:
            self._refuse_message(error.sender, str(error))
            return
        except ProtocolError as error:
            self._refuse_message("a peer", str(error))
            return
        if message is None:
            self.unknown += 1
            return
        kind = type(message)
        rank = self._seen[sender]
        if rank is not None and getattr(message, "rank", rank) != rank:
            self._refuse_message(sender, f"{sender} sent a message in another rank's name")
            return
        if kind is Step or kind is Heartbeat or kind is Goodbye:
            if message.dropped > 0:  # pyright: ignore[reportAttributeAccessIssue]
                self._says_dropped[sender] = message.dropped  # pyright: ignore[reportAttributeAccessIssue]
        elif kind in _NOT_FROM_RANKS:
            self._refuse_message(sender, f"{sender} sent a {kind.__name__} as telemetry")
            return
        self._accept(message, now, sender, frames[1])

    def _register(self, header: Header) -> bool:
        """Register a sender; False if its messages are refused."""
        found = _OF_RANK.fullmatch(header.src)
        rank = int(found.group(1)) if found else None
        if len(self._seen) >= MAX_SENDERS or (rank is None and self._others >= MAX_OTHERS):
            return False
        if rank is None:
            self._others += 1
        elif rank >= MAX_RANKS:
            return False
        self._seen[header.src] = rank
        if self._known is not None:
            # A first number above the next expected one then counts as loss.
            self._loss.see(header.src, self._known.get(header.src, 0))
        return True

    def _refuse_message(self, sender: str, reason: str) -> None:
        self.refused += 1
        if sender not in self._reported and len(self._reported) < 64:
            self._reported.add(sender)
            self._refuse(sender, reason)


def _receive(socket: "zmq.Socket[Any]") -> list[bytes]:
    """Receive one message like ``recv_multipart``, in half the time.

    ``recv_multipart`` queries the socket for more frames after each one, which costs more than receiving it; a frame
    received without copying has that flag. Raises ``zmq.Again`` if no message is waiting.
    """
    frame = socket.recv(_NOBLOCK, copy=False)
    frames = [frame.bytes]
    while frame.more:
        frame = socket.recv(_NOBLOCK, copy=False)
        frames.append(frame.bytes)
    return frames
