"""The stream of a run: messages are received, get the next sequence number, are recorded and published to every app.

The main loop calls ``flush`` before it waits, and ``commit`` a few times a second.
"""

import contextlib
import heapq
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq

from ...protocol.errors import ProtocolError, VersionError
from ...protocol.messages import wire
from ...protocol.messages.control import Accepted, Alert, Answer, Command, HubStats, Query, RankState, Result, RunState
from ...protocol.messages.hosts import AgentAck, AgentBeat, HostState, Job
from ...protocol.messages.telemetry import MAX_RANKS, MAX_WHOLE, Goodbye, Heartbeat, Step
from ...protocol.messages.wire import Header, LossCounter, Message, decode_body, decode_header
from ...protocol.recording.writer import Batch, Writer
from ...protocol.text import sanitize

_OF_THE_HUB = (RankState, RunState, Alert, HubStats, Command, Accepted, Result, Query, Answer, Job)
_NOT_FROM_RANKS = frozenset({*_OF_THE_HUB, AgentBeat, AgentAck, HostState})

MAX_SENDERS = 4 * MAX_RANKS
MAX_OTHERS = 64  # Most senders in a hub's lifetime: ``MAX_SENDERS`` in total, ``MAX_OTHERS`` that are not ranks
LOSSES_LISTED = 1_000

_NOBLOCK = int(zmq.NOBLOCK)  # A plain int: pyzmq handles an enum member much slower

_OF_RANK = re.compile(r"rank-(\d{1,9})-\d+-\d+")


class Intake:
    """Reads telemetry sockets without ever waiting.

    ``accept`` is called with each good message, the time received, its sender and body bytes; ``refuse`` with a sender
    and the reason, the first time that it is refused; ``missed`` once per sender with the number of messages that an
    earlier hub had received, or that were in flight to it, but that are not recorded. ``known`` has the highest
    recorded sequence number per sender from an earlier hub, empty for a run's first hub; other senders start at 1.
    None: unknown; the first message of each sender sets it.
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
        self._seen: dict[str, int | None] = {}  # By sender: the rank that it may send messages for; None: any
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
                frames = socket.recv_multipart(_NOBLOCK)
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
                why = f"{sanitize(sender, 80)} is not a valid rank, or exceeds the limit: ignored"
                self._refuse_message("a stranger", why)
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


_STUCK_SECONDS = 5.0  # A commit that takes longer than this is reported
_CLOSE_SECONDS = 90.0  # Time limit at the end for writing the remaining messages


class Recorder(threading.Thread):
    """Thread in which ``writer`` writes the appended messages at each ``commit``, so that no disk blocks the hub.

    SQLite waits for the disk from time to time, even if a commit only appends to the write-ahead log: the first write
    after a checkpoint restarts the log, and syncs its header first. A network file system, or a disk under other load,
    may delay any write.

    While the disk accepts no writes, rows are held and thinned out (``Batch.let_go``), as after disk errors.
    """

    def __init__(self, writer: Writer) -> None:
        super().__init__(name="recorder", daemon=True)
        self.writer = writer
        self._lock = threading.Lock()
        self._next = Batch()
        self._then: list[Callable[[], object]] = []
        self._last = False
        self._work = threading.Event()
        self._since: float | None = None  # Start of the current commit, ``time.monotonic``
        self.agent_numbers: Callable[[], dict[str, int]] = dict
        """Called at each commit for the numbers of ``Writer.note_agent_numbers``."""
        self.received: Callable[[], dict[str, int]] = dict  # Returns the numbers of ``Writer.note_received``
        self.bytes = 0  # Size of the recording on disk
        self.start()

    @property
    def error(self) -> str:
        """Why nothing is being recorded; empty if there is no error."""
        since = self._since
        waits = 0.0 if since is None else time.monotonic() - since
        if waits > _STUCK_SECONDS:
            return f"{self.writer.path}: the disk has accepted no writes for {waits:.0f} s; recording resumes by itself"
        return self.writer.error

    def commit(self, then: Callable[[], object] | None = None) -> None:
        """Write the appended messages. Returns at once.

        ``then`` is called in the recorder's thread once they are on disk, or held back because of a disk error.
        """
        self._hand_over(then, last=False)

    def close(self) -> None:
        """Write the appended messages and close the file cleanly; wait at most 90 s for a stuck disk."""
        self._hand_over(None, last=True)
        self.join(_CLOSE_SECONDS)
        if self.is_alive():
            print(f"left before all was on disk: {self.error}", file=sys.stderr)

    def run(self) -> None:
        """Write until closed."""
        last = False
        while not last:
            self._work.wait()
            self._work.clear()
            with self._lock:
                last = self._last
                batch, self._next = self._next, Batch()
                then, self._then = self._then, []
            self._since = time.monotonic()
            try:
                self.writer.write(batch)
                self.bytes = self.writer.bytes
            except Exception:  # an error here loses one batch, not the recording
                traceback.print_exc(file=sys.stderr)
            self._since = None
            for call in then:
                call()
        self.writer.close()

    def _hand_over(self, then: Callable[[], object] | None, *, last: bool) -> None:
        self.writer.note_agent_numbers(self.agent_numbers())
        self.writer.note_received(self.received())
        batch = self.writer.drain()
        with self._lock:
            self._next.add(batch)
            self._next.let_go("the disk accepted no writes for long")
            if then is not None:
                self._then.append(then)
            self._last = last
        self._work.set()


class Stream:
    """Numbers, records and publishes. ``sockets`` are bound PUBs; ``first_seq`` is the first number to assign."""

    def __init__(self, sockets: "Sequence[zmq.Socket[Any]]", recorder: Recorder, first_seq: int) -> None:
        self._sockets = list(sockets)
        self.recorder = recorder
        self.waiting = 0  # Number of uncommitted messages
        self._outbox: list[bytes] = []
        self.seq = first_seq - 1
        self.published = 0

    def put(self, message: Message, t: float, body: bytes | None = None) -> int:
        """Append ``message`` to the stream, to be published by the next ``flush``; return its number.

        ``t`` is the time of receipt, seconds since the epoch; ``body`` the encoded message as received, if it was.
        """
        self.seq = seq = self.seq + 1
        if type(message) is not Heartbeat:  # the recording does not need heartbeats
            self.recorder.writer.append(seq, t, message)
            self.waiting += 1
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
        self.waiting = 0
        self.recorder.commit(then)
