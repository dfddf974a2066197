"""What a command of an app is answered with, over real sockets."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from eventually import eventually
from ftmon.protocol.link import sockets
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import Accepted, Command, Result, Stop
from ftmon.protocol.messages.telemetry import DeviceInfo, Hello, PhaseRecord, Span, Step
from ftmon.protocol.run.rundir import RunDir, RunFile
from ftmon.trainer.hub import ranks
from ftmon.trainer.hub.analyses import Analysis
from ftmon.trainer.hub.commands import Actions, Commands
from ftmon.trainer.hub.ranks import RankLink, identity_of


class Rig:
    """The hub's commands, with one app that asks."""

    def __init__(self, run: RunDir, folder: Path, **parts: Any) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.router = sockets.hub_socket(self.context, "control")
        self.router.bind(f"ipc://{folder}/c")
        self.app = sockets.peer_socket(self.context, "control")
        self.app.connect(f"ipc://{folder}/c")
        self.emitted: list[Any] = []
        self.ended = 0
        rank_hosts = SimpleNamespace(ranks=[0, 1])
        core: Any = SimpleNamespace(run=run, file=run.read_run(), emit=self.emitted.append, rank_hosts=rank_hosts)
        nothing: Any = SimpleNamespace(check=lambda ranks: None)
        stack_requests, kills = parts.get("stack_requests", nothing), parts.get("kills", nothing)
        self.commands = Commands(core, stack_requests, kills, self._end)

    def _end(self) -> None:
        self.ended += 1

    def ask(self, verb: str, **args: Any) -> tuple[Accepted, Result]:
        self.app.send_multipart(wire.encode("app", 1, 1.0, Command("1", verb, args)))
        assert self.router.poll(200_000)
        self.commands.receive(self.router)
        found: list[Any] = []
        for _ in range(2):
            assert self.app.poll(200_000)
            found.append(wire.decode_body(self.app.recv_multipart()[1]))
        return found[0], found[1]


@pytest.fixture
def rigs():
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.context.destroy(linger=0)


def test_a_command_that_fails_inside_the_hub_is_answered_and_holds_nothing_up(run, tmp_path, rigs, capsys) -> None:
    async def fails(*_: Any) -> dict[int, Result]:
        raise OSError("no descriptor is left")

    rig = Rig(run, tmp_path, stack_requests=SimpleNamespace(collect=fails))
    rigs.append(rig)
    accepted, result = rig.ask("kill")
    assert accepted.ok
    assert (result.ok, result.verb) == (False, "kill")
    assert "no descriptor is left" in result.text
    assert not rig.commands.busy, "a hub would stay for it"
    assert [type(message) for message in rig.emitted] == [Command, Result]
    assert "no descriptor is left" in capsys.readouterr().err


def test_a_hub_that_is_told_to_end_answers_first(run, tmp_path, rigs) -> None:
    rig = Rig(run, tmp_path)
    rigs.append(rig)
    assert [answer.ok for answer in rig.ask("shutdown")] == [True, True]
    assert rig.ended == 1


GIB = 2**30
DEVICE = DeviceInfo("cuda", 0, "H200", 140 * GIB)
HELLO = Hello(0, 0, 1, "here", 77, 5, DEVICE, "cuda", 0.0)


class ActionsRig:
    def __init__(self, allowed: bool = True) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.router = sockets.hub_socket(self.context, "ranks")
        self.router.bind("inproc://ranks")
        self.rank = sockets.peer_socket(self.context, "ranks", identity_of(HELLO).encode())
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
            peak = 2 * GIB if number == 20 else GIB
            span = Span(GIB, GIB, peak)
            self.analysis.feed(
                number, float(number), Step(0, number, 0.0, 9000, [PhaseRecord("optimizer", 0, 9000, span, span)])
            )
        self.analysis.flush()

    def received(self) -> list[Command]:
        commands: list[Command] = []
        while self.rank.poll(200):
            command = wire.decode_body(self.rank.recv_multipart()[1])
            assert isinstance(command, Command)
            commands.append(command)
        return commands


@pytest.fixture
def rig() -> Iterator[ActionsRig]:
    rig = ActionsRig()
    yield rig
    rig.context.destroy(linger=0)


def test_a_spike_has_the_rank_asked_and_its_answer_recorded(rig: ActionsRig) -> None:
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
    assert [(result.verb, result.ok, result.text) for result in rig.emitted] == [
        ("arm", True, "rank 0: found"),
        ("compose", False, "rank 0: unknown"),
    ]
    assert rig.emitted[0].data["asked_by"] == "hub"
    assert rig.emitted[0].data["why"] == "a spike in optimizer, step 20"


def test_a_hub_that_may_not_act_asks_nothing() -> None:
    rig = ActionsRig(allowed=False)
    try:
        rig.train()
        assert rig.received() == []
    finally:
        rig.context.destroy(linger=0)


def test_a_rank_whose_command_socket_comes_late_is_asked_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context: zmq.Context[Any] = zmq.Context()
    try:
        router = sockets.hub_socket(context, "ranks")
        router.bind("inproc://late")
        link = RankLink([router])
        link.register(HELLO)
        answers: list[Any] = []
        link.ask(Stop(), [0], 60.0).then(answers.append)
        assert answers == []
        rank = sockets.peer_socket(context, "ranks", identity_of(HELLO).encode())
        rank.connect("inproc://late")
        eventually(lambda: rank.poll(20), "the command", each=link.expire)
        command = wire.decode_body(rank.recv_multipart()[1])
        assert isinstance(command, Command)
        rank.send_multipart(wire.encode(identity_of(HELLO), 1, time.time(), Result(command.id, True, "stop")))
        eventually(lambda: router.poll(20), "its answer")
        link.receive(router)
        assert list(answers[0]) == [0]
        rank.close(linger=0)
        monkeypatch.setattr(ranks, "_CONNECTING_SECONDS", 0.0)
        eventually(
            lambda: len(answers) > 1,
            "the answer for one that is gone",
            each=lambda: link.ask(Stop(), [0], 60.0).then(answers.append),
        )
        assert answers[1] == {}, "one that is gone holds nobody up"
    finally:
        context.destroy(linger=0)
