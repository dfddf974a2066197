"""What a command of an app is answered with, over real sockets."""

import time
from types import SimpleNamespace
from typing import Any

import zmq
from eventually import eventually
from ftmon.protocol.link import sockets
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import Accepted, Command, Result
from ftmon.protocol.messages.telemetry import DeviceInfo, Hello, PhaseRecord, Span, Step
from ftmon.protocol.run.rundir import RunDir, RunFile
from ftmon.trainer.hub.analyses import Analysis
from ftmon.trainer.hub.commands import Actions, Commands
from ftmon.trainer.hub.ranks import RankLink, identity_of


class Rig:
    """The hub's commands, with one app that asks."""

    def __init__(self, context: "zmq.Context[Any]", run: RunDir, stack_requests: Any = None) -> None:
        self.router = sockets.hub_socket(context, "control")
        self.router.bind("inproc://control")
        self.app = sockets.peer_socket(context, "control")
        self.app.connect("inproc://control")
        self.emitted: list[Any] = []
        self.ended: list[None] = []
        rank_hosts = SimpleNamespace(ranks=[0, 1])
        core: Any = SimpleNamespace(run=run, file=run.read_run(), emit=self.emitted.append, rank_hosts=rank_hosts)
        kills: Any = SimpleNamespace(check=lambda ranks: None)
        self.commands = Commands(core, stack_requests, kills, lambda: self.ended.append(None))

    def ask(self, verb: str, **args: Any) -> tuple[Accepted, Result]:
        self.app.send_multipart(wire.encode("app", 1, 1.0, Command("1", verb, args)))
        assert self.router.poll(200_000)
        self.commands.receive(self.router)
        found: list[Any] = []
        for _ in range(2):
            assert self.app.poll(200_000)
            found.append(wire.decode_body(self.app.recv_multipart()[1]))
        return found[0], found[1]


def test_a_command_that_fails_inside_the_hub_is_answered_and_holds_nothing_up(context, run, capsys) -> None:
    async def fails(*_: Any) -> dict[int, Result]:
        raise OSError("no descriptor is left")

    rig = Rig(context, run, stack_requests=SimpleNamespace(collect=fails))
    accepted, result = rig.ask("kill")
    assert accepted.ok
    assert (result.ok, result.verb) == (False, "kill")
    assert "no descriptor is left" in result.text
    assert not rig.commands.busy, "a hub would stay for it"
    assert [type(message) for message in rig.emitted] == [Command, Result]
    assert "no descriptor is left" in capsys.readouterr().err
    assert [answer.ok for answer in rig.ask("shutdown")] == [True, True], "a hub that is told to end answers first"
    assert rig.ended == [None]


GIB = 2**30
DEVICE = DeviceInfo("cuda", 0, "H200", 140 * GIB)
HELLO = Hello(0, 0, 1, "here", 77, 5, DEVICE, "cuda", 0.0)


class ActionsRig:
    def __init__(self, context: "zmq.Context[Any]", allowed: bool = True) -> None:
        self.router = sockets.hub_socket(context, "ranks")
        self.router.bind("inproc://ranks")
        self.rank = sockets.peer_socket(context, "ranks", identity_of(HELLO).encode())
        self.rank.connect("inproc://ranks")
        self.link = RankLink([self.router])
        self.link.register(HELLO)
        self.emitted: list[Any] = []
        actions = Actions(self.link, self.emitted.append, lambda _verb: allowed)
        run = RunFile("run", "run", 0.0, ["x"], "/", "here", "run")
        self.analysis = Analysis(run, lambda message: (0, 0.0))
        self.analysis.act = actions.send

    def train(self) -> None:
        self.analysis.feed(1, 0.0, HELLO)
        for number in range(1, 21):
            span = Span(GIB, GIB, 2 * GIB if number == 20 else GIB)
            step = Step(0, number, 0.0, 9000, [PhaseRecord("optimizer", 0, 9000, span, span)])
            self.analysis.feed(number, float(number), step)
        self.analysis.flush()

    def received(self) -> list[Command]:
        commands: list[Command] = []
        while self.rank.poll(200):
            command = wire.decode_body(self.rank.recv_multipart()[1])
            assert isinstance(command, Command)
            commands.append(command)
        return commands


def test_a_spike_has_the_rank_asked_and_its_answer_recorded(context: "zmq.Context[Any]") -> None:
    rig = ActionsRig(context)
    rig.train()
    arm, compose = rig.received()
    assert (arm.verb, arm.args) == ("arm", {"phase": "optimizer", "reason": "spike"})
    assert (compose.verb, compose.args) == ("compose", {"reason": "spike"})
    for message in (
        Accepted(arm.id, True),
        Result(arm.id, True, "arm", "found"),
        Accepted(compose.id, False, "unknown"),
    ):
        rig.rank.send_multipart(wire.encode(identity_of(HELLO), 1, time.time(), message))
    assert rig.router.poll(2000)

    def receive() -> None:
        rig.link.receive(rig.router)
        rig.router.poll(50)

    eventually(lambda: len(rig.emitted) >= 2, "both results", each=receive)
    results = [(result.verb, result.ok, result.text) for result in rig.emitted]
    assert results == [("arm", True, "rank 0: found"), ("compose", False, "rank 0: unknown")]
    assert rig.emitted[0].data["asked_by"] == "hub"
    assert rig.emitted[0].data["why"] == "a spike in optimizer, step 20"


def test_a_hub_that_may_not_act_asks_nothing(context: "zmq.Context[Any]") -> None:
    rig = ActionsRig(context, allowed=False)
    rig.train()
    assert rig.received() == []
