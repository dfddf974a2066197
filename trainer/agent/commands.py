"""Receives the hub's commands to this agent: kill, stop, inspect, ping. Each is a coroutine of the main loop."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from ...protocol.errors import ProtocolError, UsageError
from ...protocol.link import sockets
from ...protocol.link.join import JoinFile
from ...protocol.messages import verbs, wire
from ...protocol.messages.control import Accepted, Command, Result
from ...protocol.text import all_ranks
from ..host import flow
from ..host.end.interrupt import interrupt_job, interrupt_ranks
from ..host.end.kill import KillScope, Outcome, Target, kill
from ..host.flow import Flow, Post
from ..host.inspection.rank_inspection import answer_look

_ANSWERS_KEPT = 64


class Commands:
    """Executes the hub's commands on this host. Main loop only.

    ``identity`` is this agent's name on the ``ranks`` channel; ``targets`` returns the living processes of its ranks.
    """

    def __init__(
        self,
        context: "zmq.Context[Any]",
        join: JoinFile,
        identity: str,
        targets: Callable[[], list[Target]],
        post: Post,
    ) -> None:
        self._context = context
        self._join = join
        self._identity = identity
        self._targets = targets
        self._post = post
        self._run = Path(join.run)
        self.socket: zmq.Socket[Any] | None = None
        self.kills_under_way = 0
        self._answers: dict[str, Accepted | Result] = {}
        """The last answer to each command, by its id. The hub repeats a command until it has a result, but it is
        executed only once."""

    def connect(self, address: str) -> None:
        """Reconnect to the hub's ``ranks`` channel at ``address``."""
        self.close()
        self.socket = sockets.peer_socket(self._context, "ranks", self._identity.encode())
        sockets.secure_client(self.socket, self._join.pair, self._join.server_key)
        self.socket.connect(address)

    def close(self) -> None:
        """Close the connection; pending answers are sent first, within half a second."""
        if self.socket is not None:
            self.socket.close(linger=500)
            self.socket = None

    def receive(self) -> None:
        """Receive all waiting commands, and start their execution."""
        while self.socket is not None:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            with contextlib.suppress(ProtocolError, IndexError):
                wire.decode_header(frames[0])
                command = wire.decode_body(frames[1])
                if isinstance(command, Command):
                    flow.start(self._answer(command))

    async def _answer(self, command: Command) -> None:
        """Execute a command, or repeat the answer to a known one."""
        if command.id in self._answers:
            self._send(self._answers[command.id])
            return
        try:
            work = self._work(command)
        except UsageError as error:
            self._send(Accepted(command.id, False, str(error)))
            return
        self._send(Accepted(command.id, True))
        try:
            outcome = await work
        except Exception as error:  # the hub repeats the command until it has a result
            outcome = Outcome(False, f"{type(error).__name__}: {error}", {})
        self._send(Result(command.id, outcome.ok, command.verb, outcome.text, outcome.data, time.time()))

    def _work(self, command: Command) -> Flow[Outcome]:
        """Return the coroutine that executes a command.

        Raises:
            UsageError: unknown verb, or invalid arguments.
        """
        match verbs.decode(command, verbs.AGENT):
            case verbs.Kill() as verb:
                return self._kill(verb)
            case verbs.Stop():
                return self._stop()
            case verbs.Look() as verb:
                return self._inspect(verb)
            case verbs.Ping():
                return self._ping()

    async def _kill(self, verb: verbs.Kill) -> Outcome:
        ranks, known = verb.ranks, self._targets()
        targets = [target for target in known if not ranks or target.rank in ranks]
        others, spared = set(known) - set(targets), [os.getpid()]
        self.kills_under_way += 1
        try:
            scope = KillScope(self._run, targets, spared, not ranks, others=others)
            return await kill(scope, verb.number, verb.on_gpu, self._post)
        finally:
            self.kills_under_way -= 1

    async def _stop(self) -> Outcome:
        """Send INT to the ranks here; without any, to all other processes of the run."""
        told = interrupt_ranks(self._targets())
        groups = [] if told else interrupt_job(self._run, [], [os.getpid()])
        ranks = all_ranks(target.rank for target in told)
        text = f"sent SIGINT to {ranks}" if told else "sent SIGINT to the job" if groups else "nothing was running"
        return Outcome(True, text, {"signalled": len(told) or len(groups)})

    async def _inspect(self, verb: verbs.Look) -> Outcome:
        no_thread = Outcome(False, "no thread can be started on this host", {})
        return await flow.in_thread(lambda: _inspected(verb), self._post, "inspect", no_thread)

    async def _ping(self) -> Outcome:
        return Outcome(True, "alive", {"pid": os.getpid()})

    def _send(self, message: Accepted | Result) -> None:
        self._answers[message.id] = message
        while len(self._answers) > _ANSWERS_KEPT:
            self._answers.pop(next(iter(self._answers)))
        if self.socket is not None:
            with contextlib.suppress(zmq.ZMQError):
                self.socket.send_multipart(wire.encode(self._identity, 0, time.time(), message), zmq.NOBLOCK)


def _inspected(verb: verbs.Look) -> Outcome:
    try:
        return Outcome(True, "", answer_look(verb))
    except Exception as error:  # a process table that changes while it is read
        return Outcome(False, f"{type(error).__name__}: {error}", {})
