"""What the hub asks of an agent: to kill, to interrupt, to answer; done with the hub's own means, on this host."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ...protocol import sockets, wire
from ...protocol.control import Accepted, Command, Result
from ...protocol.errors import ProtocolError
from ...protocol.join import JoinFile
from ..hub.interrupting import interrupt_job, interrupt_ranks
from ..hub.killer import Kill, Outcome, Target
from ..hub.reach import look_as_asked

_ASKED_KEPT = 64


class _KillArgs(msgspec.Struct):
    """The arguments of ``kill``: no ranks means all of the run on this host; an empty signal escalates."""

    ranks: list[int] = []
    signal: str = ""
    on_gpu: bool = False


class Acting:
    """Takes the hub's commands to this agent, on the ``ranks`` channel under the agent's own name.

    Args:
        context: where to make sockets.
        join: the hub's keys, and ours.
        identity: this agent's name.
        targets: gives the processes of this host's ranks that live.
        post: has the main loop make a call; any thread.
    """

    def __init__(
        self,
        context: "zmq.Context[Any]",
        join: JoinFile,
        identity: str,
        targets: Callable[[], list[Target]],
        post: Callable[[Callable[[], object]], None],
    ) -> None:
        self._context = context
        self._join = join
        self._identity = identity
        self._targets = targets
        self._post = post
        self._run = Path(join.run)
        self.socket: zmq.Socket[Any] | None = None
        self.under_way = 0
        self._asked: dict[str, Result | None] = {}
        """What the hub has asked for, and the answers: it asks again until it has one, and nothing is done twice."""

    def connect(self, address: str) -> None:
        """Connect anew."""
        self.close()
        self.socket = sockets.peer_socket(self._context, "ranks", self._identity.encode())
        sockets.secure_client(self.socket, self._join.pair, self._join.server_key)
        self.socket.connect(address)

    def close(self) -> None:
        """Close the connection; answers that are owed are sent first, within half a second."""
        if self.socket is not None:
            self.socket.close(linger=500)
            self.socket = None

    def receive(self) -> None:
        """Take every command that has come."""
        while self.socket is not None:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            with contextlib.suppress(ProtocolError, IndexError):
                wire.decode_header(frames[0])
                command = wire.decode_body(frames[1])
                if isinstance(command, Command):
                    self._act(command)

    def _act(self, command: Command) -> None:
        if command.id in self._asked:
            answer = self._asked[command.id]
            self._answer(Accepted(command.id, True) if answer is None else answer)
            return
        self._asked[command.id] = None
        while len(self._asked) > _ASKED_KEPT:
            self._asked.pop(next(iter(self._asked)))
        if command.verb == "kill":
            try:
                args = msgspec.convert(command.args, _KillArgs)
                number = signal.Signals[f"SIG{args.signal}"] if args.signal.removeprefix("SIG") else None
            except (msgspec.ValidationError, KeyError) as error:
                self._answer(Accepted(command.id, False, f"kill: {error}"))
                return
            self._answer(Accepted(command.id, True))
            self._kill(command, args, number)
            return
        if command.verb == "stop":
            self._answer(Accepted(command.id, True))
            self._stop(command)
            return
        if command.verb == "look":
            self._answer(Accepted(command.id, True))
            threading.Thread(target=self._look, args=(command,), name="look", daemon=True).start()
            return
        known = command.verb == "ping"
        self._answer(Accepted(command.id, known, "" if known else f"an agent does not know {command.verb!r}"))
        if known:
            self._answer(Result(command.id, True, "ping", "alive", {"pid": os.getpid()}, time.time()))

    def _kill(self, command: Command, args: _KillArgs, number: signal.Signals | None) -> None:
        targets = [target for target in self._targets() if not args.ranks or target.rank in args.ranks]
        self.under_way += 1

        def done(outcome: Outcome) -> None:
            self._post(lambda: self._killed(command, outcome))

        Kill(self._run, targets, not args.ranks, [], [os.getpid()], number, args.on_gpu, done).start()

    def _killed(self, command: Command, outcome: Outcome) -> None:
        self.under_way -= 1
        self._answer(Result(command.id, outcome.ok, "kill", outcome.text, outcome.data, time.time()))

    def _look(self, command: Command) -> None:
        """Look at ranks that do not answer; a thread of its own, because they are waited for."""
        try:
            result = Result(command.id, True, "look", "", look_as_asked(command.args), time.time())
        except Exception as error:  # what the process table gives while it changes, or arguments of another version
            result = Result(command.id, False, "look", f"{type(error).__name__}: {error}", {}, time.time())
        self._post(lambda: self._answer(result))

    def _stop(self, command: Command) -> None:
        told = interrupt_ranks(self._targets())
        groups = [] if told else interrupt_job(self._run, [], [os.getpid()])
        ranks = ", ".join(str(target.rank) for target in told)
        text = f"sent SIGINT to rank {ranks}" if told else "sent SIGINT to the job" if groups else "nothing was running"
        data = {"signalled": len(told) or len(groups)}
        self._answer(Result(command.id, True, "stop", text, data, time.time()))

    def _answer(self, message: Accepted | Result) -> None:
        if isinstance(message, Result) and message.id in self._asked:
            self._asked[message.id] = message
        if self.socket is not None:
            with contextlib.suppress(zmq.ZMQError):
                self.socket.send_multipart(wire.encode(self._identity, 0, time.time(), message), zmq.NOBLOCK)
