"""Tracks the run's ranks and which of them run on this host, that is, whose messages no agent forwards."""

import contextlib
import itertools
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from ...protocol.analysis.stalls.tracker import RankTracker
from ...protocol.errors import ProtocolError
from ...protocol.link.sockets import received
from ...protocol.messages import wire
from ...protocol.messages.control import Accepted, Command, Identify, Result, Verb
from ...protocol.messages.telemetry import Hello
from ...protocol.messages.wire import Message
from ...protocol.run.rundir import RunDir
from ..host.end.kill import Target
from ..host.loop import Post, Reply

Answers = dict[int, Result]  # Results by rank; a rank that did not answer in time is absent

_CONNECTING_SECONDS = 10.0
"""A rank's ``Hello`` may arrive before its command socket connects: for this many seconds after it, commands to an
unreachable rank are retried until their deadline. Later, the rank counts as gone. Commands to agents are always
retried, because agents reconnect after a cut."""

_AGAIN_SECONDS = 1.0
"""Interval for resending a command to an agent: the first may have gone to an old connection. An agent executes a
repeated command once."""
_IDENTIFY_SECONDS = 1.0  # Minimum interval between requests for a sender's ``Hello``


def identity_of(hello: Hello) -> str:
    """Return the name of a rank's process on the wire: the source of its headers and the identity of its socket."""
    return f"rank-{hello.rank}-{hello.pid}-{hello.start_ticks}"


@dataclass
class _Ask:
    command: Command
    waiting: dict[bytes, int]
    unsent: set[bytes]  # Awaited peers that were not reachable yet
    deadline: float
    reply: Reply[Answers]
    left: Callable[[int], bool] | None
    answers: Answers = field(default_factory=dict[int, Result])
    asked: float = field(default_factory=time.monotonic)


class RankLink:
    """Sends commands to ranks through bound ROUTER ``sockets``. Main loop only."""

    def __init__(self, sockets: "Sequence[zmq.Socket[Any]]") -> None:
        self._sockets = list(sockets)
        self._identities: dict[int, bytes] = {}
        self._asks: dict[str, _Ask] = {}
        self._numbers = itertools.count(1)
        self._name = f"hub-{secrets.token_hex(3)}"  # Prefix of command ids, different for each hub of the run
        self._identified: dict[str, float] = {}
        self._known_at: dict[bytes, float] = {}

    def register(self, hello: Hello) -> None:
        """Record the identity under which a rank is reachable."""
        identity = identity_of(hello).encode()
        self._identities[hello.rank] = identity
        self._known_at.setdefault(identity, time.monotonic())

    def identify(self, sender: str) -> None:
        """Request the ``Hello`` of an unknown sender (again)."""
        now = time.monotonic()
        if now - self._identified.get(sender, -_IDENTIFY_SECONDS) < _IDENTIFY_SECONDS:
            return
        self._identified[sender] = now
        self._send(sender.encode(), Identify().command(f"{self._name}-{next(self._numbers)}"))

    def ask(self, verb: Verb, ranks: Iterable[int], timeout: float) -> Reply[Answers]:
        """Send a command to ``ranks``; their answers arrive together, after ``timeout`` seconds at the latest."""
        known = {identity: rank for rank in ranks if (identity := self._identities.get(rank)) is not None}
        return self._ask(verb, known, timeout, None)

    def ask_agents(
        self, verb: Verb, agents: dict[bytes, int], timeout: float, left: Callable[[int], bool] = lambda _: False
    ) -> Reply[Answers]:
        """Send a command to agents by their identities; answers arrive under the number assigned to each.

        ``left`` returns whether an agent of that number has left and will not answer.
        """
        return self._ask(verb, agents, timeout, left)

    def rename(self, before: bytes, now: bytes) -> None:
        """Redirect pending commands from an agent to its successor."""
        for ask in self._asks.values():
            if before in ask.waiting:
                ask.waiting[now] = ask.waiting.pop(before)
                ask.unsent = ask.unsent - {before} | {now}

    def _ask(
        self, verb: Verb, peers: dict[bytes, int], timeout: float, left: Callable[[int], bool] | None
    ) -> Reply[Answers]:
        reply: Reply[Answers] = Reply()
        command = verb.command(f"{self._name}-{next(self._numbers)}")
        now = time.monotonic()
        unsent = {identity for identity in peers if not self._send(identity, command)}
        young = {identity for identity in unsent if now - self._known_at.get(identity, now) < _CONNECTING_SECONDS}
        waiting = {identity: peer for identity, peer in peers.items() if identity in young or identity not in unsent}
        if waiting:
            self._asks[command.id] = _Ask(command, waiting, young, now + timeout, reply, left)
        else:
            reply.arrive({})
        return reply

    def receive(self, socket: "zmq.Socket[Any]") -> None:
        """Receive every waiting answer of one socket."""
        for frames in received(socket):
            if len(frames) == 3:
                with contextlib.suppress(ProtocolError):
                    wire.decode_header(frames[1])
                    self._answer(frames[0], wire.decode_body(frames[2]))

    def expire(self) -> None:
        """Send pending commands to ranks that are now reachable, and close commands whose deadline has passed."""
        now = time.monotonic()
        for ask in self._asks.values():
            if ask.left is not None:
                ask.waiting = {identity: peer for identity, peer in ask.waiting.items() if not ask.left(peer)}
                if now - ask.asked >= _AGAIN_SECONDS:
                    ask.asked, ask.unsent = now, set(ask.waiting)
            ask.unsent = {i for i in ask.unsent if i in ask.waiting and not self._send(i, ask.command)}
        for number in [number for number, ask in self._asks.items() if now >= ask.deadline or not ask.waiting]:
            ask = self._asks.pop(number)
            ask.reply.arrive(ask.answers)

    def _answer(self, identity: bytes, message: wire.Message | None) -> None:
        if isinstance(message, Accepted) and not message.ok:
            message = Result(message.id, False, text=message.text)
        if not isinstance(message, Result):
            return
        ask = self._asks.get(message.id)
        rank = None if ask is None else ask.waiting.pop(identity, None)
        if ask is None or rank is None:
            return
        ask.answers[rank] = message
        if not ask.waiting:
            del self._asks[message.id]
            ask.reply.arrive(ask.answers)

    def _send(self, identity: bytes, command: Command) -> bool:
        frames = [identity, *wire.encode("hub", 0, time.time(), command)]
        for each in self._sockets:
            # EHOSTUNREACH: not connected here; EAGAIN: its queue is full, it has not read for a long time.
            with contextlib.suppress(zmq.ZMQError):
                each.send_multipart(frames, zmq.NOBLOCK)
                return True
        return False


class RankHosts:
    """The latest Hello of every rank."""

    def __init__(self) -> None:
        self._host = socket.gethostname()
        self.hellos: dict[int, Hello] = {}  # The latest of each rank, by rank
        self._away: set[int] = set()  # Ranks whose messages an agent forwards
        self.senders: set[str] = set()  # Sender names of the processes that have sent ``Hello``

    def register(self, hello: Hello, away: bool = False) -> None:
        """Record a rank's ``Hello``, replacing an earlier one, and whether an agent forwarded it."""
        self.hellos[hello.rank] = hello
        (self._away.add if away else self._away.discard)(hello.rank)
        self.senders.add(identity_of(hello))

    def begin_job(self) -> None:
        """Forget the ranks of the previous job; known senders are kept."""
        self.hellos.clear()
        self._away.clear()

    @property
    def ranks(self) -> list[int]:
        """All known ranks, ascending."""
        return sorted(self.hellos)

    @property
    def world_size(self) -> int:
        """World size as reported by the known ranks; 0 before the first."""
        return max((hello.world_size for hello in self.hellos.values()), default=0)

    @property
    def on_gpu(self) -> bool:
        """Whether any rank computes on a GPU."""
        return any(hello.device.kind == "cuda" for hello in self.hellos.values())

    @property
    def any_elsewhere(self) -> bool:
        """Whether any rank runs on another host, where the supervisor cannot observe it."""
        return any(not self._is_here(hello) for hello in self.hellos.values())

    def target(self, rank: int) -> Target | None:
        """Return a rank's process if it runs on this host, else None."""
        hello = self.hellos.get(rank)
        if hello is None or not self._is_here(hello):
            return None
        return Target(rank, hello.pid, hello.start_ticks)

    def targets(self) -> list[Target]:
        """Return the processes of all ranks on this host."""
        found = [self.target(rank) for rank in self.ranks]
        return [target for target in found if target is not None]

    def _is_here(self, hello: Hello) -> bool:
        # After a restart of the hub, ranks from the history have sent nothing yet: then the host's name decides.
        return hello.rank not in self._away and hello.host == self._host


@dataclass(frozen=True)
class RankAccess:
    """The ranks of a run, the commands to them, and the stream for what they answer."""

    run: RunDir
    tracker: RankTracker
    rank_hosts: RankHosts
    link: RankLink
    emit: Callable[[Message], object]  # Appends a message to the stream, and analyses it
    post: Post
