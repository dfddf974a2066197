"""The line to the ranks: commands to their control threads, and the answers, each with a deadline."""

import contextlib
import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from ...protocol import wire
from ...protocol.control import Accepted, Command, Result
from ...protocol.errors import ProtocolError
from ...protocol.telemetry import Hello
from ..host.flow import Reply

Answers = dict[int, Result]
"""Results by rank; a rank that did not answer in time is absent."""

_CONNECTING_SECONDS = 10.0
"""A rank's hello may arrive before its command socket connects: for this long after it, an unreachable rank is
tried again until the question's time is up. Later on it is gone. An agent connects anew after every cut: it is tried
again always."""

_AGAIN_SECONDS = 1.0
"""Interval for asking an agent again: where its connection was new, the question may have gone to the old one. An
agent executes a repeated command once."""
_IDENTIFY_SECONDS = 1.0
"""Minimum interval between requests for a sender's introduction."""


def identity_of(hello: Hello) -> str:
    """Name a rank's process on the wire: the source of its headers and the identity of its socket."""
    return f"rank-{hello.rank}-{hello.pid}-{hello.start_ticks}"


class _Ask:
    def __init__(self, waiting: dict[bytes, int], deadline: float, reply: Reply[Answers]) -> None:
        self.waiting = waiting
        self.deadline = deadline
        self.reply = reply
        self.answers: Answers = {}
        self.command = Command("", "")
        self.unsent: set[bytes] = set()
        """Peers waited for that could not be reached yet."""
        self.left: Callable[[int], bool] | None = None
        self.asked = time.monotonic()


class RankLink:
    """Sends commands to ranks through bound ROUTER ``sockets``. Main loop only."""

    def __init__(self, sockets: "Sequence[zmq.Socket[Any]]") -> None:
        self._sockets = list(sockets)
        self._identities: dict[int, bytes] = {}
        self._asks: dict[str, _Ask] = {}
        self._numbers = itertools.count(1)
        self._name = f"hub-{secrets.token_hex(3)}"
        """No other hub of the run asks by the same numbers."""
        self._identified: dict[str, float] = {}
        self._known_at: dict[bytes, float] = {}

    @property
    def busy(self) -> bool:
        """True while answers are awaited."""
        return bool(self._asks)

    def register(self, hello: Hello) -> None:
        """Note where a rank is to be reached."""
        identity = identity_of(hello).encode()
        self._identities[hello.rank] = identity
        self._known_at.setdefault(identity, time.monotonic())

    def identify(self, sender: str) -> None:
        """Ask an unknown sender to introduce itself (again)."""
        now = time.monotonic()
        if now - self._identified.get(sender, -_IDENTIFY_SECONDS) < _IDENTIFY_SECONDS:
            return
        self._identified[sender] = now
        self._send(sender.encode(), Command(f"{self._name}-{next(self._numbers)}", "identify"))

    def ask(
        self,
        verb: str,
        ranks: Iterable[int],
        timeout: float,
        args: dict[str, Any] | None = None,
    ) -> Reply[Answers]:
        """Send a command to ``ranks``; their answers arrive together, after ``timeout`` seconds at the latest."""
        known = {identity: rank for rank in ranks if (identity := self._identities.get(rank)) is not None}
        return self._put(verb, known, timeout, args, None)

    def ask_agents(
        self,
        verb: str,
        agents: dict[bytes, int],
        timeout: float,
        args: dict[str, Any] | None = None,
        left: Callable[[int], bool] = lambda _: False,
    ) -> Reply[Answers]:
        """Send a command to agents by their identities; the answers arrive under the numbers that stand for them.

        ``left`` returns whether such a number will get no answer any more.
        """
        return self._put(verb, agents, timeout, args, left)

    def rename(self, before: bytes, now: bytes) -> None:
        """Ask an agent's successor in its place."""
        for ask in self._asks.values():
            if before in ask.waiting:
                ask.waiting[now] = ask.waiting.pop(before)
                ask.unsent = ask.unsent - {before} | {now}

    def _put(
        self,
        verb: str,
        peers: dict[bytes, int],
        timeout: float,
        args: dict[str, Any] | None,
        left: Callable[[int], bool] | None,
    ) -> Reply[Answers]:
        reply: Reply[Answers] = Reply()
        number = f"{self._name}-{next(self._numbers)}"
        command = Command(number, verb, args or {})
        now = time.monotonic()
        unsent = {identity for identity in peers if not self._send(identity, command)}
        young = {identity for identity in unsent if now - self._known_at.get(identity, now) < _CONNECTING_SECONDS}
        waiting = {identity: peer for identity, peer in peers.items() if identity in young or identity not in unsent}
        if not waiting:
            reply.arrive({})
            return reply
        ask = self._asks[number] = _Ask(waiting, now + timeout, reply)
        ask.command, ask.unsent, ask.left = command, young, left
        return reply

    def receive(self, socket: "zmq.Socket[Any]") -> None:
        """Receive every waiting answer of one socket."""
        with contextlib.suppress(zmq.Again):
            while True:
                frames = socket.recv_multipart(zmq.NOBLOCK)
                if len(frames) != 3:
                    continue
                with contextlib.suppress(ProtocolError):
                    wire.decode_header(frames[1])
                    self._answer(frames[0], wire.decode_body(frames[2]))

    def expire(self) -> None:
        """Send the questions to ranks that are reachable now, and close the questions whose time is up."""
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
        for socket in self._sockets:
            # EHOSTUNREACH: not connected here; EAGAIN: its queue is full, it has not read for a long time.
            with contextlib.suppress(zmq.ZMQError):
                socket.send_multipart(frames, zmq.NOBLOCK)
                return True
        return False
