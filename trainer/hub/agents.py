"""Agents of a run's other hosts: receives the messages they forward, and tracks which hosts are reachable.

Each forwarded message is accepted once, in the agent's order, and confirmed when it is on disk. A cut link or a hub
restart loses only messages that an agent dropped because its queue was full.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
import zmq

from ...protocol.analysis.stalls.tracker import ProcessFact
from ...protocol.errors import ProtocolError
from ...protocol.link.sockets import received
from ...protocol.messages import wire
from ...protocol.messages.control import RankState
from ...protocol.messages.hosts import AgentAck, AgentBeat, HostState, HostStateName, decode_numbers
from ...protocol.messages.telemetry import Hello
from ...protocol.messages.wire import Message
from ...protocol.text import sanitize

CUT_OFF_SECONDS = 5.0  # Seconds of silence after which a host counts as cut off; an agent sends a beat every second
BACK_SECONDS = 600.0
"""Seconds after a run's end that the hub waits for a host that was cut off: only the hub can end its agent."""
_NAMELESS = b"\0"
"""Prefix of the identity that ZeroMQ assigns to a connection replaced by a newer one of the same agent. Messages still
in flight on it are ignored; the agent resends unconfirmed ones."""
_PAUSE_SECONDS = 2.0  # Ticks farther apart mean that the hub itself paused: hosts are not cut off because of it
_OFFSET_STEP = 0.05  # A clock offset is reported again when it has changed by this many seconds
_STATE_TEXTS: dict[HostStateName, str] = {
    "reachable": "",
    "cut off": "no messages from its agent; its ranks may still be training",
    "left": "its agent has ended",
}


class Agent:
    """One agent, and with it one host."""

    def __init__(self, identity: bytes, socket: "zmq.Socket[Any]", now: float) -> None:
        self.identity = identity
        self.socket = socket
        self.last_message = now
        self.number = -1  # Last sequence number accepted; -1 before the first
        self.confirmed = 0
        self.state: HostStateName = "reachable"
        self.since = time.time()
        self.beat: AgentBeat | None = None
        self.facts: dict[int, ProcessFact] = {}
        self.reported: HostState | None = None
        self.restored = False  # Whether it is known only from an earlier hub
        self.successor: Agent | None = None
        self.missed = False  # Whether it was unreachable at the run's end, and its host had living ranks before

    @property
    def host(self) -> str:
        """The host's name; empty before its first beat."""
        return self.beat.host if self.beat is not None else ""

    @property
    def now(self) -> "Agent":
        """The current agent of its host: itself, or the agent that replaced it."""
        return self if self.successor is None else self.successor.now

    @property
    def ranks(self) -> list[int]:
        """The host's ranks whose processes are known."""
        return sorted(self.facts)

    @property
    def alive(self) -> int:
        """Number of its ranks with a living process in the last report."""
        return sum(fact.alive for fact in self.facts.values())

    def describe(self, now: float) -> HostState:
        """Return the state of this host, whose agent has sent a beat."""
        beat = self.beat
        assert beat is not None
        lowest, text = min(self.facts, default=-1), _STATE_TEXTS[self.state]
        of_beat = beat.version, beat.clock_offset, beat.round_trip, beat.dropped
        return HostState(self.host, self.state, now, lowest, self.ranks, text, self.since, *of_beat)


class Agents:
    """Serves the agents' channel. Main loop only.

    ``accept`` is called once with each forwarded message (header and body frames); ``recorded`` is what ``received``
    returned in an earlier hub.
    """

    def __init__(
        self,
        sockets: "Sequence[zmq.Socket[Any]]",
        accept: Callable[[list[bytes]], None],
        fact: Callable[[ProcessFact], None],
        recorded: Mapping[str, int] | None = None,
    ) -> None:
        self._recorded = dict(recorded or {})
        self.sockets = list(sockets)
        self._accept = accept
        self._fact = fact
        self._by_identity: dict[bytes, Agent] = {}
        self._ticked = time.monotonic()
        self._end_grace: float | None = None
        self.replaced: Callable[[bytes, bytes], object] = lambda _before, _now: None
        """Called with both identities when one agent replaces another."""
        self.speaking: Agent | None = None  # Sender of the message being accepted

    def restore(self, history: Iterable[Message]) -> None:
        """Restore the hosts of an earlier hub; each counts as cut off unless its agent reports in time."""
        messages = list(history)
        hellos = {message.rank: message for message in messages if isinstance(message, Hello)}
        states = {message.rank: message.state for message in messages if isinstance(message, RankState)}
        ended = {rank for rank, state in states.items() if state in ("gone", "finished")}
        hosts = [message for message in messages if isinstance(message, HostState) and message.ranks]
        covered: set[int] = set()
        for reported in sorted(hosts, key=lambda host: -host.time):  # the history has one state per lowest rank so far
            if covered & set(reported.ranks) or not self.sockets:
                continue
            covered.update(reported.ranks)
            if reported.state == "left":
                continue
            identity = f"restored-{reported.host}-{reported.rank}".encode()
            agent = self._by_identity[identity] = Agent(identity, self.sockets[0], time.monotonic())
            agent.beat = AgentBeat(
                *(reported.host, 0, 0, reported.version, reported.time),
                dropped=reported.dropped,
                clock_offset=reported.clock_offset,
            )
            agent.reported, agent.state, agent.since, agent.restored = reported, reported.state, reported.since, True
            ranks = [hellos[rank] for rank in reported.ranks if rank in hellos]
            agent.facts = {
                each.rank: ProcessFact(each.rank, each.pid, each.start_ticks, each.rank not in ended) for each in ranks
            }

    def all(self) -> list[Agent]:
        """Return the agents that have registered and not left."""
        return [agent for agent in self._by_identity.values() if agent.beat is not None and agent.state != "left"]

    def reachable(self) -> list[Agent]:
        """Return the agents that send heartbeats."""
        return [agent for agent in self.all() if agent.state == "reachable" and not agent.restored]

    def missed(self) -> list[Agent]:
        """Return the agents that may not have received the run's end."""
        return [agent for agent in self.all() if agent.missed]

    def of(self, rank: int) -> Agent | None:
        """Return the agent of a rank; None if it runs on the hub's own host."""
        return next((agent for agent in self.all() if rank in agent.facts), None)

    @property
    def ranks_alive(self) -> int:
        """Number of ranks with a living process on reachable hosts."""
        return sum(agent.alive for agent in self.reachable())

    def receive(self, socket: "zmq.Socket[Any]", limit: int) -> int:
        """Receive up to ``limit`` waiting messages from one of the sockets; return their number."""
        count = 0
        for identity, *frames in islice(received(socket), limit):
            count += 1
            if identity.startswith(_NAMELESS):
                continue
            agent = self._by_identity.get(identity)
            if agent is None:
                agent = self._by_identity[identity] = Agent(identity, socket, time.monotonic())
            agent.last_message, agent.socket = time.monotonic(), socket
            with contextlib.suppress(ProtocolError):
                if len(frames) == 3:
                    self._receive_forwarded(agent, frames)
                elif len(frames) == 2:
                    self._receive_beat(agent, frames)
        return count

    def unconfirmed(self) -> dict[bytes, int]:
        """Return the last sequence number accepted from each agent that awaits confirmation."""
        return {who: agent.number for who, agent in self._by_identity.items() if agent.number > agent.confirmed}

    def received(self) -> dict[str, int]:
        """Return the same with names that a recording can store, so that the next hub accepts no message twice."""
        return {who.hex(): number for who, number in self.unconfirmed().items()}

    def confirm(self, numbers: dict[bytes, int]) -> None:
        """Confirm to agents the messages on disk: all up to ``numbers``, from ``unconfirmed`` before a commit."""
        for identity, number in numbers.items():
            agent = self._by_identity.get(identity)
            if agent is not None and number > agent.confirmed:
                agent.confirmed = number
                self._answer(agent, 0.0)

    def tick(self) -> list[HostState]:
        """Update the hosts' states; return those that changed."""
        now = time.monotonic()
        paused = now - self._ticked
        self._ticked = now
        changed: list[HostState] = []
        for agent in self.all():
            if paused > _PAUSE_SECONDS:
                agent.last_message += paused
            state: HostStateName = "cut off" if now - agent.last_message > CUT_OFF_SECONDS else "reachable"
            if agent.restored and agent.state == "cut off":
                state = "cut off"
            if agent.beat is not None and agent.beat.leaving:
                state = "left"
            if self._end_grace is not None and (state == "cut off" or agent.restored) and agent.alive:
                agent.missed = True
            if state != agent.state:
                agent.state = state
                agent.since = time.time() - (now - agent.last_message if state == "cut off" else 0.0)
            described = agent.describe(time.time())
            if agent.reported is None or _differ(agent.reported, described):
                agent.reported = described
                changed.append(described)
        return changed

    def run_is_over(self, grace: float) -> None:
        """Instruct every agent to end its host's processes after ``grace`` seconds, and then itself."""
        if self._end_grace is None:
            self._end_grace = grace
            for agent in self.all():
                self._answer(agent, 0.0)

    def _receive_forwarded(self, agent: Agent, frames: list[bytes]) -> None:
        number, oldest = decode_numbers(frames[0])
        if agent.number < 0:
            # First message of this agent. An earlier hub may have recorded messages that the agent no longer holds, or
            # some that it has not confirmed.
            agent.number = agent.confirmed = max(oldest - 1, self._recorded.get(agent.identity.hex(), 0))
        if number <= agent.number or (number > agent.number + 1 and oldest <= agent.number + 1):
            return  # a duplicate; or an earlier message was lost, and the agent resends all from there on
        agent.number = number
        self.speaking = agent
        try:
            self._accept(frames[1:])
        finally:
            self.speaking = None

    def _receive_beat(self, agent: Agent, frames: list[bytes]) -> None:
        wire.decode_header(frames[0])
        beat = wire.decode_body(frames[1])
        if not isinstance(beat, AgentBeat):
            return
        if agent.beat is None:
            self._replace_earlier(agent, beat)
        agent.beat = beat
        for process in beat.processes:
            kill = process.kernel_kill
            if kill is not None:  # another host's kernel log may contain escape sequences
                kill = msgspec.structs.replace(kill, name=sanitize(kill.name, 64))
            identity = process.rank, process.pid, process.start_ticks
            end = process.exit_code, process.signal, kill
            fact = ProcessFact(*identity, process.alive, process.proc_state, *end)
            agent.facts[process.rank] = fact
            self._fact(fact)
        self._answer(agent, beat.time)

    def _replace_earlier(self, agent: Agent, beat: AgentBeat) -> None:
        for identity, other in list(self._by_identity.items()):
            known = other.beat
            if other is agent or known is None or known.host != beat.host:
                continue
            ranks = {process.rank for process in beat.processes}
            same = not ranks or bool(ranks & other.facts.keys()) if other.restored else known.boot_id == beat.boot_id
            if same:
                del self._by_identity[identity]
                other.successor = agent
                self.replaced(identity, agent.identity)

    def _answer(self, agent: Agent, beat: float) -> None:
        over, grace = self._end_grace is not None, self._end_grace or 0.0
        ack = AgentAck(agent.confirmed, time.time(), beat, over, grace)
        # EHOSTUNREACH or EAGAIN: it is cut off; its next beat is answered.
        with contextlib.suppress(zmq.ZMQError):
            agent.socket.send_multipart([agent.identity, *wire.encode("hub", 0, ack.time, ack)], zmq.NOBLOCK)


def _differ(reported: HostState, now: HostState) -> bool:
    fields = ("state", "ranks", "version", "dropped")
    if any(getattr(reported, field) != getattr(now, field) for field in fields):
        return True
    before, after = reported.clock_offset, now.clock_offset
    return after is not None and (before is None or abs(after - before) > _OFFSET_STEP)
