"""An agent's uplink and the hub's end of it, over real TCP with CURVE: nothing twice, nothing lost that was kept."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from eventually import eventually
from ftmon.protocol.analysis.stalls.tracker import ProcessFact
from ftmon.protocol.link import keys, sockets
from ftmon.protocol.link.sockets import JoinFile
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.hosts import AgentBeat, HostState, KernelKill, ProcessState
from ftmon.protocol.messages.telemetry import DeviceInfo, Hello, LogLine
from ftmon.protocol.run import rundir
from ftmon.trainer.agent import uplink as uplink_module
from ftmon.trainer.agent.uplink import Uplink
from ftmon.trainer.hub import agents as agents_module
from ftmon.trainer.hub.agents import Agents

NAME = "agent-nodeb-7-70"
HELLO = Hello(3, 0, 4, "nodeb", 12, 99, DeviceInfo("cpu", 0, "x", 1), "glibc", 1.0)


class Hub:
    """The hub's end: a bound socket, and what came over it."""

    def __init__(self, context: "zmq.Context[Any]", run: rundir.RunDir) -> None:
        self.authenticator = keys.start_authenticator(context, keys.agent_pair(run).public)
        self.socket = sockets.hub_socket(context, "agents")
        sockets.secure_server(self.socket, keys.server_pair(run), keys.AGENT_DOMAIN)
        sockets.bind(self.socket, "tcp://127.0.0.1:*")
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.texts: list[str] = []
        self.facts: list[ProcessFact] = []
        self.agents = Agents([self.socket], self._accept, self.facts.append)

    def _accept(self, frames: list[bytes]) -> None:
        message = wire.decode_body(frames[1])
        assert isinstance(message, LogLine)
        self.texts.append(message.text)

    def turn(self) -> None:
        self.agents.receive(self.socket, 10_000)
        self.agents.confirm(self.agents.unconfirmed())

    def close(self) -> None:
        self.socket.close()
        self.authenticator.stop()


@pytest.fixture
def hub(context: "zmq.Context[Any]", run: rundir.RunDir) -> Iterator[Hub]:
    made = Hub(context, run)
    yield made
    made.close()


@pytest.fixture
def uplink(context: "zmq.Context[Any]", run: rundir.RunDir) -> Uplink:
    pair, server = keys.agent_pair(run), keys.server_pair(run)
    join = JoinFile(str(run.path), run.id, "nodea", "", [], 0, server.public, pair.public, pair.secret, "1")
    return Uplink(context, join, NAME)


def put(uplink: Uplink, *texts: str) -> None:
    for text in texts:
        line = LogLine(0, 1.0, "out", text)
        uplink.put(wire.encode_header("rank-0-1-2", 1, 1.0), wire.encode_body(line))


ALIVE = ProcessState(3, 12, 99, True, "S")


def beat(*processes: ProcessState, leaving: bool = False) -> AgentBeat:
    return AgentBeat("nodeb", 7, 70, "1", time.time(), list(processes), leaving=leaving)


def turning(hub: Hub, uplink: Uplink, condition: Callable[[], object]) -> None:
    def turn() -> None:
        uplink.pump()
        hub.turn()
        uplink.receive()

    eventually(condition, "the messages", each=turn, state=lambda: (hub.texts[-3:], uplink.waiting), every=0.005)


def taken(hub: Hub, uplink: Uplink, count: int, limit: int) -> None:
    """Have the hub take messages without confirming them."""

    def take() -> None:
        uplink.pump()
        hub.agents.receive(hub.socket, limit)

    eventually(lambda: len(hub.texts) >= count, f"{count} messages taken", each=take, every=0.005)


def test_a_cut_link_costs_nothing_and_repeats_nothing_and_what_is_confirmed_is_forgotten(hub, uplink):
    uplink.connect(hub.address)
    put(uplink, *map(str, range(500)))
    taken(hub, uplink, 200, limit=50)
    uplink.disconnect()
    put(uplink, *map(str, range(500, 10_000)))
    assert uplink.waiting == 10_000
    uplink.connect(hub.address)
    turning(hub, uplink, lambda: not uplink.waiting)
    assert hub.texts == list(map(str, range(10_000)))
    assert (uplink.waiting_bytes, uplink.connected) == (0, True)


def test_a_new_hub_is_sent_what_the_old_one_did_not_confirm(run, hub, uplink):
    uplink.connect(hub.address)
    put(uplink, "one", "two")
    turning(hub, uplink, lambda: not uplink.waiting)
    hub.close()
    put(uplink, "three")
    other: zmq.Context[Any] = zmq.Context()
    new = Hub(other, run)
    try:
        uplink.connect(new.address)
        turning(new, uplink, lambda: not uplink.waiting)
        assert new.texts == ["three"]
    finally:
        new.close()
        other.destroy(linger=0)


def test_when_too_much_waits_the_oldest_go_and_are_counted(hub, uplink, monkeypatch):
    monkeypatch.setattr(uplink_module, "KEPT_BYTES", 30_000)
    put(uplink, *map(str, range(1_000)))
    assert uplink.waiting_bytes <= 30_000
    assert uplink.dropped == 1_000 - uplink.waiting > 0
    uplink.connect(hub.address)
    turning(hub, uplink, lambda: not uplink.waiting)
    assert hub.texts == list(map(str, range(uplink.dropped, 1_000)))


def test_what_was_lost_on_the_way_is_waited_for(hub, uplink, monkeypatch):
    monkeypatch.setattr(uplink_module, "SILENT_SECONDS", 0.3)
    uplink.connect(hub.address)
    put(uplink, "one", "two", "three")
    turning(hub, uplink, lambda: not uplink.waiting)
    put(uplink, "four", "five", "six")
    uplink._flying.append(uplink._waiting.popleft())  # sent, as far as it knows
    turning(hub, uplink, lambda: uplink.silent)
    assert hub.texts == ["one", "two", "three"], "taken although one before it is missing"
    uplink.connect(hub.address)
    turning(hub, uplink, lambda: not uplink.waiting)
    assert hub.texts == ["one", "two", "three", "four", "five", "six"]


def test_a_beat_introduces_the_host_measures_its_clock_and_tells_of_its_ranks(hub, uplink):
    uplink.connect(hub.address)

    def beat_once() -> None:
        uplink.send_beat(beat(ALIVE))
        hub.turn()
        uplink.receive()

    # The offset is wrong by at most half the time that a beat and its answer took.
    eventually(lambda: (uplink.round_trip or 1.0) < 0.1, "a fast round trip", each=beat_once, every=0.01)
    assert uplink.clock_offset is not None
    assert abs(uplink.clock_offset) < 0.05
    assert hub.facts[0] == ProcessFact(3, 12, 99, True, "S")
    (state,) = hub.agents.tick()
    assert (state.host, state.state, state.ranks) == ("nodeb", "reachable", [3])
    found = hub.agents.of(3)
    assert found.identity == NAME.encode()
    # The kernel's part in a death on another host is known here, and cannot command a terminal.
    kill = KernelKill(True, "host", "\x1b]0;x\x07py", 7, limits_bytes=[9])
    dead = ProcessState(3, 12, 99, False, "Z", None, 9, kill)
    turning(hub, uplink, lambda: uplink.send_beat(beat(dead)) or not found.alive)
    assert found.facts[3].signal == 9
    assert found.facts[3].kernel_kill == KernelKill(True, "host", "py", 7, limits_bytes=[9])
    hub.agents.run_is_over(2.0)
    turning(hub, uplink, lambda: uplink.run_end)
    assert uplink.run_end.grace == 2.0


def test_a_host_that_is_not_heard_is_cut_off_until_it_is(hub, uplink, monkeypatch):
    uplink.connect(hub.address)
    turning(hub, uplink, lambda: uplink.send_beat(beat()) or hub.agents.all())
    assert states(hub) == ["reachable"]
    monkeypatch.setattr(agents_module, "CUT_OFF_SECONDS", 0.3)
    (state,) = eventually(hub.agents.tick, "a change of its state")
    assert state.state == "cut off"
    assert time.time() - state.since > 0.3
    assert hub.agents.reachable() == []
    turning(hub, uplink, lambda: uplink.send_beat(beat()) or hub.agents.tick())
    assert [agent.state for agent in hub.agents.all()] == ["reachable"]


def test_a_host_that_is_cut_off_when_the_run_ends_is_told_once_it_is_back(hub, uplink, monkeypatch):
    uplink.connect(hub.address)
    turning(hub, uplink, lambda: uplink.send_beat(beat(ALIVE)) or hub.agents.all())
    hub.agents.run_is_over(2.0)
    hub.agents.tick()
    assert not hub.agents.missed(), "it is heard, so it has been told"
    uplink.disconnect()
    # Below every silence: after a pause of the hub an agent counts as heard in the future.
    monkeypatch.setattr(agents_module, "CUT_OFF_SECONDS", float("-inf"))
    hub.agents.tick()
    assert [agent.host for agent in hub.agents.missed()] == ["nodeb"]
    monkeypatch.setattr(agents_module, "CUT_OFF_SECONDS", 60.0)
    uplink.connect(hub.address)
    uplink.run_end = None
    turning(hub, uplink, lambda: uplink.send_beat(beat(ALIVE)) or uplink.run_end)
    assert states(hub) == ["reachable"]
    assert hub.agents.missed(), "it has been told, and still has to end what is there"
    turning(hub, uplink, lambda: uplink.send_beat(beat(ALIVE, leaving=True)) or "left" in states(hub))
    assert not hub.agents.missed()


def states(hub: Hub) -> list[str]:
    return [state.state for state in hub.agents.tick()]


def test_what_is_left_on_a_connection_that_a_newer_one_replaced_is_no_other_agent(hub, uplink):
    uplink.connect(hub.address)
    turning(hub, uplink, lambda: uplink.send_beat(beat()) or hub.agents.all())
    (known,) = hub.agents.all()
    for _ in range(50):
        uplink.send_beat(beat())
    assert hub.socket.poll(60_000), "a message in the queue"
    uplink.disconnect()
    uplink.connect(hub.address)
    assert uplink.socket.poll(60_000, zmq.POLLOUT)
    turning(hub, uplink, lambda: uplink.send_beat(beat()) or uplink.connected)
    assert hub.agents.all() == [known]


def test_an_agent_started_again_takes_the_place_of_the_one_before(hub):
    for pid in (7, 8):
        frames = wire.encode("agent", 0, 1.0, AgentBeat("nodeb", pid, 70, "1", 1.0, boot_id="b"))
        agent = agents_module.Agent(f"agent-nodeb-{pid}-70".encode(), hub.socket, time.monotonic())
        hub.agents._by_identity[agent.identity] = agent
        hub.agents._receive_beat(agent, frames)
    assert [agent.identity for agent in hub.agents.all()] == [b"agent-nodeb-8-70"]


def test_a_hub_that_was_killed_before_it_could_confirm_what_it_had_recorded_is_followed_by_one_that_knows(hub, uplink):
    uplink.connect(hub.address)
    put(uplink, "a", "b", "c")
    taken(hub, uplink, 3, limit=100)
    assert uplink.waiting == 3
    hub.agents = Agents([hub.socket], hub._accept, hub.facts.append, hub.agents.received())
    uplink.connect(hub.address)  # anew: all that was not confirmed is said again
    put(uplink, "d")
    turning(hub, uplink, lambda: not uplink.waiting)
    assert hub.texts == ["a", "b", "c", "d"]


@pytest.mark.parametrize("who", ["an app", "a stranger", "nobody's key", "an agent at an app's channel"])
def test_only_the_runs_own_agents_come_in_and_an_agents_key_opens_no_app_channel(context, run, hub, who):
    server, address = hub.socket, hub.address
    pair = keys.client_pair() if who == "an app" else keys.make_pair()
    if who == "an agent at an app's channel":
        pair, server = keys.agent_pair(run), sockets.hub_socket(context, "control")
        sockets.secure_server(server, keys.server_pair(run))
        sockets.bind(server, "tcp://127.0.0.1:*")
        address = server.getsockopt_string(zmq.LAST_ENDPOINT)
    made = sockets.peer_socket(context, "agents", b"agent-x-1-1")
    watch = made.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED)
    if who != "nobody's key":
        sockets.secure_client(made, pair, keys.server_pair(run).public)
    made.connect(address)
    with contextlib.suppress(zmq.Again):  # refused already: then there is nobody to send it to
        made.send_multipart(wire.encode("agent-x-1-1", 0, 1.0, beat()), zmq.NOBLOCK)
    assert watch.poll(60_000), "the connection was not refused"
    assert not server.poll(100)


def test_a_silent_address_is_given_up(uplink, monkeypatch):
    monkeypatch.setattr(uplink_module, "SILENT_SECONDS", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        uplink.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        assert not uplink.silent
        monkeypatch.setattr(uplink_module, "SILENT_SECONDS", 0.2)
        eventually(lambda: uplink.silent, "silence")
        assert not uplink.connected


def test_a_hub_that_was_restarted_while_a_host_was_cut_off_knows_of_it(hub, uplink):
    hub.agents.restore([HELLO, HostState("nodeb", "reachable", 1.0), HostState("nodeb", "cut off", 2.0, 3, [3])])
    hub.agents.tick()
    (known,) = hub.agents.all()
    assert (known.host, known.state, known.ranks, known.alive) == ("nodeb", "cut off", [3], 1)
    assert not hub.agents.reachable()
    hub.agents.run_is_over(2.0)
    hub.agents.tick()
    assert hub.agents.missed() == [known]
    uplink.connect(hub.address)
    turning(hub, uplink, lambda: uplink.send_beat(beat(ALIVE)) or uplink.run_end)
    assert [agent.identity for agent in hub.agents.all()] == [NAME.encode()]
    assert states(hub) == ["reachable"]


def test_a_hub_that_was_restarted_gives_a_host_it_has_not_heard_yet_some_seconds(hub, monkeypatch):
    hub.agents.restore([HELLO, HostState("nodeb", "reachable", time.time(), 3, [3])])
    assert hub.agents.tick() == []
    monkeypatch.setattr(agents_module, "CUT_OFF_SECONDS", float("-inf"))
    assert states(hub) == ["cut off"]
