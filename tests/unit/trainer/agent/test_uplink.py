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
from ftmon.protocol.link.join import JoinFile
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

    def __init__(self, context: "zmq.Context[Any]", run: rundir.RunDir, port: int = 0) -> None:
        self.authenticator = keys.start_authenticator(context, keys.agent_pair(run).public)
        self.socket = sockets.hub_socket(context, "agents")
        sockets.secure_server(self.socket, keys.server_pair(run), keys.AGENT_DOMAIN)
        sockets.bind(self.socket, f"tcp://127.0.0.1:{port or '*'}")
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
    return make_uplink(context, run)


def make_uplink(context: "zmq.Context[Any]", run: rundir.RunDir, **options: Any) -> Uplink:
    pair = keys.agent_pair(run)
    join = JoinFile(
        str(run.path), run.id, "nodea", "", [], 0, keys.server_pair(run).public, pair.public, pair.secret, "1"
    )
    return Uplink(context, join, NAME, **options)


def put(uplink: Uplink, *texts: str) -> None:
    for text in texts:
        line = LogLine(0, 1.0, "out", text)
        uplink.put(wire.encode_header("rank-0-1-2", 1, 1.0), wire.encode_body(line))


def beat(**fields: Any) -> AgentBeat:
    return AgentBeat("nodeb", 7, 70, "1", time.time(), **fields)


def turning(hub: Hub, uplink: Uplink, condition: Callable[[], object]) -> None:
    def turn() -> None:
        uplink.pump()
        hub.turn()
        uplink.receive()

    eventually(condition, "the messages", each=turn, state=lambda: (hub.texts[-3:], uplink.waiting), every=0.005)


def test_what_is_passed_on_comes_in_order_and_is_forgotten_once_confirmed(hub: Hub, uplink: Uplink) -> None:
    uplink.connect(hub.address)
    put(uplink, *map(str, range(10_000)))
    turning(hub, uplink, lambda: not uplink.waiting)
    assert hub.texts == list(map(str, range(10_000)))
    assert uplink.waiting_bytes == 0
    assert uplink.connected


def test_a_cut_link_costs_nothing_and_repeats_nothing(hub: Hub, uplink: Uplink) -> None:
    uplink.connect(hub.address)
    put(uplink, *map(str, range(500)))

    def take() -> None:
        uplink.pump()
        hub.agents.receive(hub.socket, 50)  # taken, and not confirmed

    eventually(lambda: len(hub.texts) >= 200, "200 messages taken", each=take, every=0.005)
    uplink.disconnect()
    put(uplink, *map(str, range(500, 900)))
    assert uplink.waiting == 900
    uplink.connect(hub.address)
    turning(hub, uplink, lambda: not uplink.waiting)
    assert hub.texts == list(map(str, range(900)))


def test_a_new_hub_is_sent_what_the_old_one_did_not_confirm(
    context: "zmq.Context[Any]", run: rundir.RunDir, uplink: Uplink
) -> None:
    old = Hub(context, run)
    uplink.connect(old.address)
    put(uplink, "one", "two")
    turning(old, uplink, lambda: not uplink.waiting)
    old.close()
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


def test_when_too_much_waits_the_oldest_go_and_are_counted(context: "zmq.Context[Any]", run: rundir.RunDir) -> None:
    uplink = make_uplink(context, run, kept_bytes=30_000)
    put(uplink, *map(str, range(1_000)))
    assert uplink.waiting_bytes <= 30_000
    assert uplink.dropped == 1_000 - uplink.waiting > 0
    hub = Hub(context, run)
    try:
        uplink.connect(hub.address)
        turning(hub, uplink, lambda: not uplink.waiting)
        assert hub.texts == list(map(str, range(uplink.dropped, 1_000)))
    finally:
        hub.close()


def test_what_was_lost_on_the_way_is_waited_for(hub: Hub, uplink: Uplink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink_module, "SILENT_SECONDS", 0.3)
    uplink.connect(hub.address)
    put(uplink, "one", "two", "three")
    turning(hub, uplink, lambda: not uplink.waiting)
    put(uplink, "four", "five", "six")
    lost = uplink._waiting.popleft()
    uplink._flying.append(lost)  # sent, as far as it knows
    turning(hub, uplink, lambda: uplink.silent)
    assert hub.texts == ["one", "two", "three"], "taken although one before it is missing"
    uplink.connect(hub.address)
    turning(hub, uplink, lambda: not uplink.waiting)
    assert hub.texts == ["one", "two", "three", "four", "five", "six"]


def test_a_beat_introduces_the_host_measures_its_clock_and_tells_of_its_ranks(hub: Hub, uplink: Uplink) -> None:
    uplink.connect(hub.address)

    def beat_once() -> None:
        uplink.send_beat(beat(processes=[ProcessState(3, 12, 99, True, "S")]))
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
    assert found is not None
    assert found.identity == NAME.encode()
    hub.agents.run_is_over(2.0)
    turning(hub, uplink, lambda: uplink.run_end)
    assert uplink.run_end is not None
    assert uplink.run_end.grace == 2.0


def test_the_kernel_s_part_in_a_death_on_another_host_is_known_here_and_cannot_command_a_terminal(
    hub: Hub, uplink: Uplink
) -> None:
    kill = KernelKill(True, "host", "\x1b]0;x\x07py", 7, limits_bytes=[9])
    uplink.connect(hub.address)
    dead = ProcessState(3, 12, 99, False, "Z", None, 9, kill)
    turning(hub, uplink, lambda: uplink.send_beat(beat(processes=[dead])) or hub.agents.of(3))
    (fact,) = [agent.facts[3] for agent in hub.agents.all()]
    assert (fact.signal, fact.kernel_kill is not None and fact.kernel_kill.sure) == (9, True)
    assert fact.kernel_kill is not None
    assert fact.kernel_kill == KernelKill(True, "host", "py", 7, limits_bytes=[9])


def test_a_host_that_is_not_heard_is_cut_off_until_it_is(
    hub: Hub, uplink: Uplink, monkeypatch: pytest.MonkeyPatch
) -> None:
    uplink.connect(hub.address)
    turning(hub, uplink, lambda: uplink.send_beat(beat()) or hub.agents.all())
    assert [state.state for state in hub.agents.tick()] == ["reachable"]
    monkeypatch.setattr(agents_module, "CUT_OFF_SECONDS", 0.3)
    (state,) = eventually(hub.agents.tick, "a change of its state")
    assert state.state == "cut off"
    assert time.time() - state.since > 0.3
    assert hub.agents.reachable() == []
    turning(hub, uplink, lambda: uplink.send_beat(beat()) or hub.agents.tick())
    assert [agent.state for agent in hub.agents.all()] == ["reachable"]


def test_a_host_that_is_cut_off_when_the_run_ends_is_told_once_it_is_back(
    hub: Hub, uplink: Uplink, monkeypatch: pytest.MonkeyPatch
) -> None:
    def speak(leaving: bool = False) -> None:
        uplink.send_beat(beat(processes=[ProcessState(3, 12, 99, True, "S")], leaving=leaving))

    uplink.connect(hub.address)
    turning(hub, uplink, lambda: speak() or hub.agents.all())
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
    turning(hub, uplink, lambda: speak() or uplink.run_end)
    assert [state.state for state in hub.agents.tick()] == ["reachable"]
    assert hub.agents.missed(), "it has been told, and still has to end what is there"
    turning(hub, uplink, lambda: speak(leaving=True) or "left" in [state.state for state in hub.agents.tick()])
    assert not hub.agents.missed()


def test_what_is_left_on_a_connection_that_a_newer_one_replaced_is_no_other_agent(hub: Hub, uplink: Uplink) -> None:
    uplink.connect(hub.address)
    turning(hub, uplink, lambda: uplink.send_beat(beat()) or hub.agents.all())
    (known,) = hub.agents.all()
    for _ in range(50):
        uplink.send_beat(beat())
    assert hub.socket.poll(60_000), "a message in the queue"
    uplink.disconnect()
    uplink.connect(hub.address)
    assert uplink.socket is not None
    assert uplink.socket.poll(60_000, zmq.POLLOUT)
    turning(hub, uplink, lambda: uplink.send_beat(beat()) or uplink.connected)
    assert hub.agents.all() == [known]
    assert hub.agents.all()[0] is known


def test_an_agent_started_again_takes_the_place_of_the_one_before(hub: Hub) -> None:
    context: zmq.Context[Any] = zmq.Context()
    try:
        for pid in (7, 8):
            frames = wire.encode("agent", 0, 1.0, AgentBeat("nodeb", pid, 70, "1", 1.0, boot_id="b"))
            agent = agents_module.Agent(f"agent-nodeb-{pid}-70".encode(), hub.socket, time.monotonic())
            hub.agents._by_identity[agent.identity] = agent
            hub.agents._receive_beat(agent, frames)
        assert [agent.identity for agent in hub.agents.all()] == [b"agent-nodeb-8-70"]
    finally:
        context.destroy(linger=0)


def test_a_hub_that_was_killed_before_it_could_confirm_what_it_had_recorded_is_followed_by_one_that_knows(
    hub: Hub, uplink: Uplink
) -> None:
    uplink.connect(hub.address)
    put(uplink, "a", "b", "c")

    def take() -> None:
        uplink.pump()
        hub.agents.receive(hub.socket, 100)

    eventually(lambda: len(hub.texts) >= 3, "all taken, and nothing confirmed", each=take)
    assert uplink.waiting == 3
    hub.agents = Agents([hub.socket], hub._accept, hub.facts.append, hub.agents.received())
    uplink.connect(hub.address)  # anew: all that was not confirmed is said again
    put(uplink, "d")
    turning(hub, uplink, lambda: not uplink.waiting)
    assert hub.texts == ["a", "b", "c", "d"]


@pytest.mark.parametrize("who", ["an app", "a stranger", "nobody's key"])
def test_only_the_runs_own_agents_come_in(context: "zmq.Context[Any]", run: rundir.RunDir, hub: Hub, who: str) -> None:
    pair = keys.client_pair() if who == "an app" else keys.make_pair()
    made = sockets.peer_socket(context, "agents", b"agent-x-1-1")
    watch = made.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED)
    if who != "nobody's key":
        sockets.secure_client(made, pair, keys.server_pair(run).public)
    made.connect(hub.address)
    with contextlib.suppress(zmq.Again):  # refused already: then there is nobody to send it to
        made.send_multipart(wire.encode("agent-x-1-1", 0, 1.0, beat()), zmq.NOBLOCK)
    assert watch.poll(60_000), "the connection was not refused"
    assert not hub.socket.poll(100)


def test_an_agents_key_opens_no_app_channel(context: "zmq.Context[Any]", run: rundir.RunDir) -> None:
    authenticator = keys.start_authenticator(context, keys.agent_pair(run).public)
    try:
        control = sockets.hub_socket(context, "control")
        sockets.secure_server(control, keys.server_pair(run))
        sockets.bind(control, "tcp://127.0.0.1:*")
        made = sockets.peer_socket(context, "control")
        watch = made.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED)
        sockets.secure_client(made, keys.agent_pair(run), keys.server_pair(run).public)
        made.connect(control.getsockopt_string(zmq.LAST_ENDPOINT))
        assert watch.poll(60_000), "the connection was not refused"
    finally:
        authenticator.stop()


def test_a_silent_address_is_given_up(context: "zmq.Context[Any]", run: rundir.RunDir, monkeypatch: Any) -> None:
    uplink = make_uplink(context, run)
    monkeypatch.setattr(uplink_module, "SILENT_SECONDS", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        uplink.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        assert not uplink.silent
        monkeypatch.setattr(uplink_module, "SILENT_SECONDS", 0.2)
        eventually(lambda: uplink.silent, "silence")
        assert not uplink.connected


def test_a_hub_that_was_restarted_while_a_host_was_cut_off_knows_of_it(hub: Hub, uplink: Uplink) -> None:
    states = [HostState("nodeb", "reachable", 1.0), HostState("nodeb", "cut off", 2.0, 3, [3])]
    hub.agents.restore([HELLO, *states])
    hub.agents.tick()
    (known,) = hub.agents.all()
    assert (known.host, known.state, known.ranks, known.alive) == ("nodeb", "cut off", [3], 1)
    assert not hub.agents.reachable()
    hub.agents.run_is_over(2.0)
    hub.agents.tick()
    assert hub.agents.missed() == [known]
    uplink.connect(hub.address)
    turning(
        hub, uplink, lambda: uplink.send_beat(beat(processes=[ProcessState(3, 12, 99, True, "S")])) or uplink.run_end
    )
    assert [agent.identity for agent in hub.agents.all()] == [NAME.encode()]
    assert [state.state for state in hub.agents.tick()] == ["reachable"]


def test_a_hub_that_was_restarted_gives_a_host_it_has_not_heard_yet_some_seconds(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.agents.restore([HELLO, HostState("nodeb", "reachable", time.time(), 3, [3])])
    assert hub.agents.tick() == []
    monkeypatch.setattr(agents_module, "CUT_OFF_SECONDS", float("-inf"))
    assert [state.state for state in hub.agents.tick()] == ["cut off"]
