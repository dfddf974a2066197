"""Questions to peers over a real ROUTER: who is not there yet is asked when it is; who has left is not waited for."""

from pathlib import Path
from typing import Any

import pytest
import zmq
from eventually import eventually
from ftmon.protocol.link import sockets
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import Command, Kill, Result, Stop
from ftmon.protocol.messages.telemetry import DeviceInfo, Hello
from ftmon.trainer.hub import ranks
from ftmon.trainer.hub.ranks import Answers, RankLink, identity_of

AGENT = b"agent-nodeb-7-70"
HELLO = Hello(0, 0, 1, "here", 77, 5, DeviceInfo("cuda", 0, "H200", 2**37), "cuda", 0.0)


class Rig:
    def __init__(self, context: "zmq.Context[Any]", folder: Path) -> None:
        self._context = context
        self._address = f"ipc://{folder}/r"
        self.hub = sockets.hub_socket(context, "ranks")
        self.hub.bind(self._address)
        self.link = RankLink([self.hub])
        self.done: list[Answers] = []

    def peer(self, name: bytes) -> "zmq.Socket[Any]":
        made = sockets.peer_socket(self._context, "ranks", name)
        made.connect(self._address)
        return made

    def command(self, peer: "zmq.Socket[Any]") -> Command:
        eventually(lambda: peer.poll(20), "a command", each=self.link.expire)
        found = wire.decode_body(peer.recv_multipart()[1])
        assert isinstance(found, Command)
        return found

    def answer(self, peer: "zmq.Socket[Any]", command: Command) -> None:
        peer.send_multipart(wire.encode("peer", 0, 1.0, Result(command.id, True, command.verb, "done")))
        assert self.hub.poll(200_000)
        self.link.receive(self.hub)
        assert self.done[0][0].text == "done"


@pytest.fixture
def rig(context: "zmq.Context[Any]", tmp_path: Path) -> Rig:
    return Rig(context, tmp_path)


def test_a_rank_whose_command_socket_comes_late_is_asked_all_the_same(rig, monkeypatch):
    rig.link.register(HELLO)
    rig.link.ask(Stop(), [0], 60.0).then(rig.done.append)
    assert rig.done == []
    rank = rig.peer(identity_of(HELLO).encode())
    rig.answer(rank, rig.command(rank))
    rank.close(linger=0)
    monkeypatch.setattr(ranks, "_CONNECTING_SECONDS", 0.0)
    eventually(
        lambda: len(rig.done) > 1,
        "the answer for one that is gone",
        each=lambda: rig.link.ask(Stop(), [0], 60.0).then(rig.done.append),
    )
    assert rig.done[1] == {}, "one that is gone holds nobody up"


def test_who_has_left_is_not_waited_for(rig):
    left: set[int] = set()
    rig.link.ask_agents(Kill(), {AGENT: 0}, 200.0, left=left.__contains__).then(rig.done.append)
    rig.link.expire()
    assert not rig.done
    left.add(0)
    rig.link.expire()
    assert rig.done == [{}]


def test_an_agent_is_asked_once_there_and_again_while_it_owes_an_answer_and_another_in_its_place(rig, monkeypatch):
    monkeypatch.setattr(ranks, "_AGAIN_SECONDS", 0.1)
    rig.link.ask_agents(Kill(), {AGENT: 0}, 200.0).then(rig.done.append)
    rig.link.expire()
    assert not rig.done, "given up at once"
    first = rig.peer(AGENT)
    asked = {rig.command(first).id for _ in range(3)}
    assert len(asked) == 1, "one question under several numbers"
    rig.link.rename(AGENT, b"agent-nodeb-8-80")
    later = rig.peer(b"agent-nodeb-8-80")
    again = rig.command(later)
    assert {again.id} == asked
    rig.answer(later, again)
