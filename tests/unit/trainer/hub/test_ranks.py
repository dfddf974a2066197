"""Questions to peers over a real ROUTER: who is not there yet is asked when it is; who has left is not waited for."""

from pathlib import Path
from typing import Any

import pytest
import zmq
from eventually import eventually
from ftmon.protocol.link import sockets
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import Command, Kill, Result
from ftmon.trainer.hub import ranks
from ftmon.trainer.hub.ranks import Answers, RankLink

AGENT = b"agent-nodeb-7-70"


def test_an_agent_that_connects_anew_is_asked_when_it_is_there(context: "zmq.Context[Any]", tmp_path: Path) -> None:
    hub = sockets.hub_socket(context, "ranks")
    hub.bind(f"ipc://{tmp_path}/r")
    link = RankLink([hub])
    done: list[Answers] = []
    link.ask_agents(Kill(), {AGENT: 0}, 200.0).then(done.append)
    link.expire()
    assert not done, "given up at once"
    agent = sockets.peer_socket(context, "ranks", AGENT)
    agent.connect(f"ipc://{tmp_path}/r")

    def turn() -> None:
        link.expire()
        if agent.poll(20):
            command = wire.decode_body(agent.recv_multipart()[1])
            assert isinstance(command, Command)
            agent.send_multipart(wire.encode("agent", 0, 1.0, Result(command.id, True, "kill", "killed")))
        if hub.poll(20):
            link.receive(hub)

    eventually(lambda: done, "its answer", each=turn)
    assert done[0][0].text == "killed"


def test_who_has_left_is_not_waited_for(context: "zmq.Context[Any]", tmp_path: Path) -> None:
    hub = sockets.hub_socket(context, "ranks")
    hub.bind(f"ipc://{tmp_path}/r")
    link = RankLink([hub])
    left: set[int] = set()
    done: list[Answers] = []
    link.ask_agents(Kill(), {AGENT: 0}, 200.0, left=left.__contains__).then(done.append)
    link.expire()
    assert not done
    left.add(0)
    link.expire()
    assert done == [{}]


def test_an_agent_that_owes_an_answer_is_asked_again_and_another_in_its_place(
    context: "zmq.Context[Any]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_AGAIN_SECONDS", 0.1)
    hub = sockets.hub_socket(context, "ranks")
    hub.bind(f"ipc://{tmp_path}/r")
    link = RankLink([hub])
    done: list[Answers] = []
    link.ask_agents(Kill(), {AGENT: 0}, 200.0).then(done.append)
    first, later = (sockets.peer_socket(context, "ranks", name) for name in (AGENT, b"agent-nodeb-8-80"))
    first.connect(f"ipc://{tmp_path}/r")
    asked = {command(link, first).id for _ in range(3)}
    assert len(asked) == 1, "one question under several numbers"
    link.rename(AGENT, b"agent-nodeb-8-80")
    later.connect(f"ipc://{tmp_path}/r")
    again = command(link, later)
    assert {again.id} == asked
    later.send_multipart(wire.encode("agent", 0, 1.0, Result(again.id, True, "kill", "killed")))
    assert hub.poll(200_000)
    link.receive(hub)
    assert done[0][0].text == "killed"


def command(link: RankLink, agent: "zmq.Socket[Any]") -> Command:
    eventually(lambda: agent.poll(20), "a command", each=link.expire)
    found = wire.decode_body(agent.recv_multipart()[1])
    assert isinstance(found, Command)
    return found
