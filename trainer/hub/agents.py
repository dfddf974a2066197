"""The agents of a run's other hosts, as the hub sees them: what they pass on, whether they are heard, what they know.

A message that an agent passes on is taken once, in the agent's own order, and confirmed when it is on disk; so a link
that was cut, or a hub that was restarted, costs nothing but what an agent dropped because its queue was full.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import zmq

from ...protocol import wire
from ...protocol.analysis.stalls.tracked_rank import ProcessFact
from ...protocol.control import RankState
from ...protocol.errors import ProtocolError
from ...protocol.hosts import AgentAck, AgentBeat, HostState, HostStateName, KernelKill, decode_numbers
from ...protocol.telemetry import Hello
from ...protocol.text import sanitize
from ...protocol.wire import Message

CUT_OFF_SECONDS = 5.0
"""An agent says something every second; unheard for so long, its host is cut off."""
BACK_SECONDS = 600.0
"""How long after a run's end the hub is there for a host that was cut off: nobody else can tell its agent."""
_NAMELESS = b"\0"
"""So begins the identity that ZeroMQ gives a connection once a newer one of the same agent has taken its name. What was
still under way on it is no word of another agent; what of it counts comes again."""
_PAUSE_SECONDS = 2.0
"""Looks farther apart than this: the hub itself was not looking, and nobody is cut off for that."""
_OFFSET_STEP = 0.05
"""A clock offset is told again when it has changed by so many seconds."""


class Agent:
    """One agent, and with it one host."""

    def __init__(self, identity: bytes, socket: "zmq.Socket[Any]", now: float) -> None:
        self.identity = identity
        self.socket = socket
        self.heard = now
        self.number = -1
        """The last number taken; -1 before the first."""
        self.confirmed = 0
        self.state: HostStateName = "reachable"
        self.since = time.time()
        self.beat: AgentBeat | None = None
        self.facts: dict[int, ProcessFact] = {}
        self.reported: HostState | None = None
        self.restored = False
        """An earlier hub heard it; this one has not."""
        self.successor: Agent | None = None
        self.missed = False
        """It was not heard when the run had ended, and ranks lived there as far as was known."""

    @property
    def host(self) -> str:
        """The host's name; empty before its first beat."""
        return self.beat.host if self.beat is not None else ""

    @property
    def now(self) -> "Agent":
        """The agent of its host at present: itself, or the one that was started after it."""
        return self if self.successor is None else self.successor.now

    @property
    def ranks(self) -> list[int]:
        """The ranks there, as far as their processes are known."""
        return sorted(self.facts)

    @property
    def alive(self) -> int:
        """How many of its ranks' processes live, as last seen."""
        return sum(fact.alive for fact in self.facts.values())

    def describe(self, now: float) -> HostState:
        """Return how this host stands."""
        beat = self.beat
        text = {
            "reachable": "",
            "cut off": "nothing is heard of its agent; for all we know its ranks go on",
            "left": "its agent has ended",
        }[self.state]
        ranks = self.ranks
        return HostState(
            host=self.host,
            state=self.state,
            time=now,
            rank=ranks[0] if ranks else -1,
            ranks=ranks,
            text=text,
            since=self.since,
            version=beat.version if beat is not None else "",
            clock_offset=beat.clock_offset if beat is not None else None,
            round_trip=beat.round_trip if beat is not None else None,
            dropped=beat.dropped if beat is not None else 0,
        )


class Agents:
    """Serves the agents' channel. Main loop only.

    Args:
        sockets: bound ROUTERs.
        take: called with each message passed on (header and body frames), once.
        fact: called with what an agent saw of a rank's process.
        taken: numbers up to which an earlier hub has recorded what agents passed on, as ``taken`` gave them.
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
        self._over_grace: float | None = None
        self.replaced: Callable[[bytes, bytes], object] = lambda _before, _now: None
        """Called when one agent takes another's place, with both identities."""
        self.speaking: Agent | None = None
        """Whose message is being taken."""

    def restore(self, history: Iterable[Message]) -> None:
        """Take over the hosts that an earlier hub knew: each is cut off too unless its agent is heard in time."""
        messages = list(history)
        hellos = {message.rank: message for message in messages if isinstance(message, Hello)}
        states = {message.rank: message.state for message in messages if isinstance(message, RankState)}
        ended = {rank for rank, state in states.items() if state in ("gone", "finished")}
        hosts = [message for message in messages if isinstance(message, HostState) and message.ranks]
        covered: set[int] = set()
        for reported in sorted(hosts, key=lambda host: -host.time):  # the history has one of each lowest rank there was
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
        """List the agents that have introduced themselves and not left."""
        return [agent for agent in self._by_identity.values() if agent.beat is not None and agent.state != "left"]

    def reachable(self) -> list[Agent]:
        """List the agents that are heard."""
        return [agent for agent in self.all() if agent.state == "reachable" and not agent.restored]

    def missed(self) -> list[Agent]:
        """List the agents that have not left since and may not know that the run is over."""
        return [agent for agent in self.all() if agent.missed]

    def of(self, rank: int) -> Agent | None:
        """Find the agent of a rank; None when it has none (it runs on the hub's own host)."""
        return next((agent for agent in self.all() if rank in agent.facts), None)

    @property
    def ranks_alive(self) -> int:
        """How many ranks of hosts that are heard have a living process."""
        return sum(agent.alive for agent in self.reachable())

    def receive(self, socket: "zmq.Socket[Any]", limit: int) -> int:
        """Take up to ``limit`` messages that are waiting on one of the sockets; return how many there were."""
        count = 0
        with contextlib.suppress(zmq.Again):
            while count < limit:
                identity, *frames = socket.recv_multipart(zmq.NOBLOCK)
                count += 1
                if identity.startswith(_NAMELESS):
                    continue
                agent = self._by_identity.get(identity)
                if agent is None:
                    agent = self._by_identity[identity] = Agent(identity, socket, time.monotonic())
                agent.heard, agent.socket = time.monotonic(), socket
                with contextlib.suppress(ProtocolError):
                    if len(frames) == 3:
                        self._receive_forwarded(agent, frames)
                    elif len(frames) == 2:
                        self._receive_beat(agent, frames)
        return count

    def unconfirmed(self) -> dict[bytes, int]:
        """Return the numbers of the last messages taken, of the agents that wait to hear that these are on disk."""
        return {who: agent.number for who, agent in self._by_identity.items() if agent.number > agent.confirmed}

    def received(self) -> dict[str, int]:
        """Return the same by names that a recording can hold: a hub that comes after this one takes nothing twice."""
        return {who.hex(): number for who, number in self.unconfirmed().items()}

    def confirm(self, numbers: dict[bytes, int]) -> None:
        """Tell agents what is on disk: all up to ``numbers``, which ``unconfirmed`` gave before a commit."""
        for identity, number in numbers.items():
            agent = self._by_identity.get(identity)
            if agent is not None and number > agent.confirmed:
                agent.confirmed = number
                self._answer(agent, 0.0)

    def tick(self) -> list[HostState]:
        """Let time pass; return the states that changed."""
        now = time.monotonic()
        paused = now - self._ticked
        self._ticked = now
        changed: list[HostState] = []
        for agent in self.all():
            if paused > _PAUSE_SECONDS:
                agent.heard += paused
            state: HostStateName = "cut off" if now - agent.heard > CUT_OFF_SECONDS else "reachable"
            if agent.restored and agent.state == "cut off":
                state = "cut off"
            if agent.beat is not None and agent.beat.leaving:
                state = "left"
            if self._over_grace is not None and (state == "cut off" or agent.restored) and agent.alive:
                agent.missed = True
            if state != agent.state:
                agent.state = state
                agent.since = time.time() - (now - agent.heard if state == "cut off" else 0.0)
            described = agent.describe(time.time())
            if agent.reported is None or _differ(agent.reported, described):
                agent.reported = described
                changed.append(described)
        return changed

    def run_is_over(self, grace: float) -> None:
        """Have every agent end what is left on its host after ``grace`` seconds, and then itself."""
        if self._over_grace is None:
            self._over_grace = grace
            for agent in self.all():
                self._answer(agent, 0.0)

    def _receive_forwarded(self, agent: Agent, frames: list[bytes]) -> None:
        number, oldest = decode_numbers(frames[0])
        if agent.number < 0:
            # The first heard of it. An earlier hub may have had what it no longer holds, and not have come to say so.
            agent.number = agent.confirmed = max(oldest - 1, self._recorded.get(agent.identity.hex(), 0))
        if number <= agent.number or (number > agent.number + 1 and oldest <= agent.number + 1):
            return  # had already; or something before it was lost on the way, and all from there on comes again
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
            fact = ProcessFact(
                process.rank,
                process.pid,
                process.start_ticks,
                process.alive,
                process.proc_state,
                process.exit_code,
                process.signal,
                _clean(process.kernel_kill),
            )
            agent.facts[process.rank] = fact
            self._fact(fact)
        self._answer(agent, beat.time)

    def _replace_earlier(self, agent: Agent, beat: AgentBeat) -> None:
        """Forget an agent of the same host that this one was started in place of."""
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
        over, grace = self._over_grace is not None, self._over_grace or 0.0
        ack = AgentAck(agent.confirmed, time.time(), beat, over, grace)
        # EHOSTUNREACH or EAGAIN: it is cut off; its next beat is answered.
        with contextlib.suppress(zmq.ZMQError):
            agent.socket.send_multipart([agent.identity, *wire.encode("hub", 0, ack.time, ack)], zmq.NOBLOCK)


def _differ(reported: HostState, now: HostState) -> bool:
    if (reported.state, reported.ranks, reported.version) != (now.state, now.ranks, now.version):
        return True
    if now.dropped != reported.dropped:
        return True
    before, after = reported.clock_offset, now.clock_offset
    return after is not None and (before is None or abs(after - before) > _OFFSET_STEP)


def _clean(kill: KernelKill | None) -> KernelKill | None:
    """Take what another host read from its kernel's log: nothing in it may reach a terminal as a command."""
    return None if kill is None else KernelKill(kill.sure, sanitize(kill.text), list(map(sanitize, kill.evidence)))
