"""What an agent does with the hub's commands: real sockets with CURVE, a real process to kill."""

import subprocess
import threading
from pathlib import Path

import zmq
from eventually import eventually
from ftmon.protocol.host.process import start_ticks
from ftmon.protocol.link import keys, sockets
from ftmon.protocol.link.sockets import JoinFile
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import Accepted, Command, Result
from ftmon.protocol.run import rundir
from ftmon.trainer.agent import agent
from ftmon.trainer.agent.agent import Commands
from ftmon.trainer.host.end.kill import Target
from ftmon.trainer.host.loop import Mailbox

AGENT = "agent-nodeb-7-70"
LONG = 200_000
"""Milliseconds."""


class Bench:
    """The hub's end of the ranks' channel, and an agent's commands beside one process that is its only rank."""

    def __init__(self, tmp_path: Path, rank: Target) -> None:
        run = rundir.create("hosts", ["train.py"], "run")
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        pair = keys.agent_pair(run)
        self.authenticator = keys.start_authenticator(self.context, pair.public)
        self.hub = sockets.hub_socket(self.context, "ranks")
        sockets.secure_server(self.hub, keys.server_pair(run), keys.AGENT_DOMAIN)
        sockets.bind(self.hub, "tcp://127.0.0.1:*")
        server_key = keys.server_pair(run).public
        join = JoinFile(str(tmp_path), run.id, "nodea", "boot", [], 0, server_key, pair.public, pair.secret, "0")
        self.mailbox = Mailbox()
        self.commands = Commands(self.context, join, AGENT, lambda: [rank], self.mailbox.post)
        self.commands.connect(self.hub.getsockopt_string(zmq.LAST_ENDPOINT))

    def send(self, identifier: str, verb: str, **args: object) -> None:
        message = wire.encode("hub", 0, 1.0, Command(identifier, verb, args))

        def sent() -> bool:
            try:
                self.hub.send_multipart([AGENT.encode(), *message])
            except zmq.ZMQError:  # not connected yet: the poll has the socket's own events handled
                self.commands.socket.poll(0)
                return False
            return True

        eventually(sent, "the agent connected", LONG / 1000)

    def answer(self) -> Accepted | Result:
        """Run the agent's main loop until it has sent an answer."""
        poller = zmq.Poller()
        for each in (self.hub, self.commands.socket, self.mailbox.fileno()):
            poller.register(each, zmq.POLLIN)
        while self.hub not in (ready := dict(poller.poll(LONG))):
            assert ready, "no answer"
            self.mailbox.drain()
            self.commands.receive()
        message = wire.decode_body(self.hub.recv_multipart()[2])
        assert isinstance(message, Accepted | Result)
        return message

    def close(self) -> None:
        self.commands.close()
        self.hub.close(linger=0)
        self.authenticator.stop()
        self.context.term()


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_a_command_is_answered_twice_done_once_and_refused_where_it_makes_no_sense(tmp_path, monkeypatch):
    monkeypatch.setenv("FTMON_HOME", str(tmp_path))
    with subprocess.Popen(["sleep", "600"]) as rank:
        started = start_ticks(rank.pid)
        assert started is not None
        bench = Bench(tmp_path, Target(3, rank.pid, started))
        try:
            bench.send("1", "ping")
            assert bench.answer() == Accepted("1", True)
            alive = bench.answer()
            assert isinstance(alive, Result)
            assert (alive.ok, alive.verb, alive.text) == (True, "ping", "alive")
            bench.send("1", "ping")
            assert bench.answer() == alive, "asked again, it repeats the result"

            for identifier, verb, args in (
                ("2", "dance", {}),
                ("3", "kill", {"signal": "SIGNONE"}),
                ("4", "kill", {"ranks": "all"}),
            ):
                for _ in range(2):
                    bench.send(identifier, verb, **args)
                    refused = bench.answer()
                    assert isinstance(refused, Accepted)
                    assert (refused.id, refused.ok) == (identifier, False), refused

            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", no_thread)
                bench.send("no thread", "kill", ranks=[3])
                assert bench.answer() == Accepted("no thread", True)
                failed = bench.answer()
            assert isinstance(failed, Result)
            assert (failed.ok, bench.commands.kills_under_way) == (False, 0), failed
            with monkeypatch.context() as patch:
                patch.setattr(agent, "interrupt_ranks", no_thread)
                bench.send("fails", "stop")
                assert bench.answer() == Accepted("fails", True)
                failed = bench.answer()
            assert isinstance(failed, Result)
            assert (failed.id, failed.ok) == ("fails", False)

            begun: list[threading.Thread] = []
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", lambda thread: begun.append(thread))
                bench.send("5", "kill", ranks=[3], signal="SIGTERM")
                assert bench.answer() == Accepted("5", True)
                assert bench.commands.kills_under_way == 1
            begun[0].start()
            killed = bench.answer()
            assert isinstance(killed, Result)
            assert (killed.ok, killed.data["ranks"], killed.data["signal"]) == (True, [3], "SIGTERM"), killed
            assert bench.commands.kills_under_way == 0
            assert rank.wait(LONG / 1000) == -15

            bench.send("6", "look", targets=[[3, rank.pid, started, None]], silent=[3])
            assert bench.answer() == Accepted("6", True)
            looked = bench.answer()
            assert isinstance(looked, Result)
            assert looked.data["why"] == {"3": "its process is gone"}
        finally:
            rank.kill()
            bench.close()
