"""What a command of an app is answered with, over real sockets."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from ftmon.protocol.link import sockets
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import Accepted, Command, Result
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.hub.commands import Commands


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
