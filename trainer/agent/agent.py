"""Per-host agent: forwards telemetry to the hub until it is recorded, and executes the hub's commands.

One process with one main loop; the hub makes all decisions. When the run is over, or no rank is left here and the hub
is unreachable, the agent ends the run's remaining processes on its host, then itself.
"""

import contextlib
import os
import re
import signal
import socket as host_sockets
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import zmq

from ... import __version__
from ...protocol.analysis.stalls.tracker import ProcessFact
from ...protocol.errors import ProtocolError, UsageError
from ...protocol.host.process import this_process
from ...protocol.link import sockets
from ...protocol.link.sockets import JoinFile, boot_id, read_join
from ...protocol.messages import control, wire
from ...protocol.messages.control import Accepted, Command, Result
from ...protocol.messages.hosts import AgentBeat, ProcessState
from ...protocol.messages.wire import Message
from ...protocol.run.rundir import RunDir
from ...protocol.text import all_ranks
from ..host import loop, processes
from ..host.end.kill import NO_THREAD, KillScope, Outcome, Target, at_once, interrupt_job, interrupt_ranks, kill, sweep
from ..host.hardware.watch import DeviceSampler, HostWatch
from ..host.inspection.inspect import answer_look
from ..host.log_tail import LogTail
from ..host.loop import Flow, Mailbox, Post
from ..host.supervisor import Supervisor
from .uplink import Proxies, Route, Uplink

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
        for frames in sockets.received(self.socket):
            with contextlib.suppress(ProtocolError, IndexError):
                wire.decode_header(frames[0])
                command = wire.decode_body(frames[1])
                if isinstance(command, Command):
                    loop.start(self._answer(command))

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
        """Return the coroutine that executes a command; ``UsageError``: an unknown verb, or invalid arguments."""
        match control.decode(command, control.AGENT):
            case control.Kill() as verb:
                return self._kill(verb)
            case control.Stop():
                return self._stop()
            case control.Look() as verb:
                return self._inspect(verb)
            case control.Ping():
                return at_once("alive", {"pid": os.getpid()})

    async def _kill(self, verb: control.Kill) -> Outcome:
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

    async def _inspect(self, verb: control.Look) -> Outcome:
        def inspect() -> Outcome:
            try:
                return Outcome(True, "", answer_look(verb))
            except Exception as error:  # a process table that changes while it is read
                return Outcome(False, f"{type(error).__name__}: {error}", {})

        return await loop.in_thread(inspect, self._post, "inspect", NO_THREAD)

    def _send(self, message: Accepted | Result) -> None:
        self._answers[message.id] = message
        while len(self._answers) > _ANSWERS_KEPT:
            self._answers.pop(next(iter(self._answers)))
        if self.socket is not None:
            with contextlib.suppress(zmq.ZMQError):
                self.socket.send_multipart(wire.encode(self._identity, 0, time.time(), message), zmq.NOBLOCK)


BEAT_SECONDS = 1.0
ALONE_SECONDS = 60.0  # After this many seconds without a rank here and without the hub, the run counts as over
FLUSH_SECONDS = 5.0  # Time limit at the agent's end for the confirmation of all messages
_DRAIN = 512
_RANK = re.compile(r"rank-(\d+)-(\d+)-(\d+)")


class Agent:
    """One host's agent: create it, then call ``run``."""

    def __init__(self, place: RunDir, join: JoinFile, join_path: Path) -> None:
        self._place = place
        self._join = join
        self._join_path = join_path
        self._host = host_sockets.gethostname()
        self._me = this_process()
        self._identity = f"agent-{self._host}-{self._me.pid}-{self._me.start_ticks}"
        self._sequence = 0
        self._context: zmq.Context[Any] = zmq.Context()
        self._telemetry = self._bind("telemetry")
        self._ranks = self._bind("ranks")
        self._mailbox = Mailbox()
        self._uplink = Uplink(self._context, join, self._identity)
        self._proxies = Proxies(self._context, join, self._ranks)
        self._commands = Commands(self._context, join, self._identity, self._targets, self._mailbox.post)
        self._supervisor = Supervisor(lambda: self._mailbox.post(self._collect_facts))
        self._devices = DeviceSampler(self._host, self._supervisor.pids)
        self._host_watch = HostWatch(self._host, place.path, self._supervisor.pids)
        self._logs = LogTail(place)
        addresses = [*join.addresses, os.environ.get("MASTER_ADDR", "")]
        self._route = Route(
            list(filter(None, addresses)),
            join.port_of("agents"),
            lambda address: self._mailbox.post(lambda: self._connect(address)),
        )
        self._address = ""
        self._facts: dict[int, ProcessFact] = {}
        self._names: set[str] = set()
        self._needed_at = time.monotonic()
        self._next_beat = 0.0
        self._end_at: float | None = None
        self._ending = False
        self._end_requested = False

    def run(self) -> int:
        """Serve until the run is over; return the exit status."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for thread in (self._supervisor, self._devices, self._host_watch, self._route):
            thread.start()
        self._route.search()
        print(f"{time.ctime()}: agent of {self._join.id} on {self._host}", flush=True)
        try:
            loop.serve(self._turn, self._tick, lambda: self._ending)
            if not self._end_requested:
                self._sweep()
            self._flush()
        finally:
            self._close()
        if not self._end_requested:  # after a failure a rank starts another agent, which needs the key
            self._remove_traces()
        return 0

    def _turn(self, wait_ms: int) -> None:
        poller = zmq.Poller()
        connections = (self._uplink.socket, self._commands.socket, *self._proxies.sockets())
        for each in (self._telemetry, self._ranks, self._mailbox.fileno(), *connections):
            if each is not None:
                poller.register(each, zmq.POLLIN)
        poller.poll(wait_ms)
        self._commands.receive()
        self._proxies.pass_commands()
        self._proxies.pass_answers()
        self._mailbox.drain()  # last: a new connection drops what the old one has received
        self._uplink.receive()
        self._drain()
        self._uplink.pump()

    def _drain(self) -> None:
        for frames in islice(sockets.received(self._telemetry), _DRAIN):
            if len(frames) == 2:
                with contextlib.suppress(ProtocolError):
                    self._register_rank(wire.decode_header(frames[0]).src)
                self._uplink.put(frames[0], frames[1])

    def _register_rank(self, sender: str) -> None:
        found = _RANK.fullmatch(sender) if sender not in self._names else None
        if found is not None:
            self._names.add(sender)
            self._proxies.add(sender.encode())
            self._supervisor.watch(int(found[1]), int(found[2]), int(found[3]))

    def _tick(self, now: float) -> None:
        self._collect_facts()
        for sample in (*self._devices.poll(), *self._host_watch.poll()):
            self._put(msgspec.structs.replace(sample, time=sample.time + self._offset))
        self._put_logs()
        if self._uplink.silent:
            self._search_again()
        if now >= self._next_beat:
            self._beat(now)
        if self._supervisor.alive() or self._uplink.connected or self._commands.kills_under_way:
            self._needed_at = now
        end = self._uplink.run_end
        if end is not None and self._end_at is None:
            self._end_at = now + end.grace
        nothing_left = self._end_at is not None and not self._members()
        past = self._end_at is not None and now >= self._end_at
        self._ending = self._ending or nothing_left or past or now - self._needed_at > ALONE_SECONDS

    def _put_logs(self, last: bool = False) -> None:
        for line in self._logs.poll(last=last):
            self._put(msgspec.structs.replace(line, time=line.time + self._offset))

    def _collect_facts(self) -> None:
        changed = False
        for fact in self._supervisor.poll():
            before = self._facts.get(fact.rank)
            changed = changed or before is None or (before.alive, before.proc_state) != (fact.alive, fact.proc_state)
            self._facts[fact.rank] = fact
            if not fact.alive:
                self._proxies.remove(_sender(fact.rank, fact.pid, fact.start_ticks))
        if changed:
            self._beat(time.monotonic())

    @property
    def _offset(self) -> float:
        return self._uplink.clock_offset or 0.0

    def _put(self, message: Message) -> None:
        self._sequence += 1
        header, body = wire.encode(self._identity, self._sequence, time.time(), message)
        self._uplink.put(header, body)

    def _beat(self, now: float, leaving: bool = False) -> None:
        self._next_beat = now + BEAT_SECONDS
        uplink, me = self._uplink, self._me
        states = [
            ProcessState(f.rank, f.pid, f.start_ticks, f.alive, f.proc_state, f.exit_code, f.signal, f.kernel_kill)
            for f in self._facts.values()
        ]
        process = self._host, me.pid, me.start_ticks, __version__
        figures = uplink.waiting, uplink.waiting_bytes, uplink.dropped, uplink.clock_offset, uplink.round_trip
        uplink.send_beat(AgentBeat(*process, time.time(), states, *figures, leaving, boot_id()))

    def _connect(self, address: str) -> None:
        self._address = address
        host = f"[{address}]" if ":" in address else address
        self._uplink.connect(f"tcp://{host}:{self._join.port_of('agents')}")
        self._proxies.connect(f"tcp://{host}:{self._join.port_of('ranks')}")
        self._commands.connect(f"tcp://{host}:{self._join.port_of('ranks')}")
        for target in self._targets():
            self._proxies.add(_sender(target.rank, target.pid, target.start_ticks))
        self._next_beat = 0.0

    def _search_again(self) -> None:
        """Search for the hub again; unconfirmed messages are resent."""
        if not self._uplink.connected:
            self._route.avoid(self._address)
        self._uplink.disconnect()
        self._route.search()

    def _targets(self) -> list[Target]:
        return [Target(*entry) for entry in self._supervisor.alive()]

    def _members(self) -> list[processes.Process]:
        return processes.of_run(Path(self._join.run), [], [os.getpid()])

    def _bind(self, channel: str) -> "zmq.Socket[Any]":
        socket = sockets.hub_socket(self._context, channel)
        sockets.bind(socket, self._place.ipc_address(channel))
        return socket

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._ending = self._end_requested = True

    def _sweep(self) -> None:
        left = self._members()
        if left:
            names = ", ".join(f"{process.pid} ({process.name})" for process in left[:8])
            print(f"ending what is left: {names}", flush=True)
            left = sweep(self._members)
        for process in left:
            print(f"still there: pid {process.pid} ({process.name}) in state {process.state}", flush=True)

    def _flush(self) -> None:
        deadline = time.monotonic() + FLUSH_SECONDS
        self._drain()
        self._put_logs(last=True)
        self._collect_facts()
        uplink, commands = self._uplink, self._commands
        while time.monotonic() < deadline and (commands.kills_under_way or (uplink.connected and uplink.waiting)):
            self._turn(50)
        self._beat(time.monotonic(), leaving=not self._end_requested)

    def _close(self) -> None:
        self._route.stop()
        self._supervisor.stop()
        self._devices.close()
        self._host_watch.close()
        self._proxies.close()
        self._commands.close()
        if self._uplink.socket is not None:
            self._uplink.socket.close(linger=1000)
        for socket in (self._telemetry, self._ranks):
            socket.close(linger=0)
        self._context.term()

    def _remove_traces(self) -> None:
        """Remove sockets, the lock, and the key if it was copied here for this run only."""
        for name in ("telemetry.sock", "ranks.sock", "agent.lock"):
            (self._place.socket_dir / name).unlink(missing_ok=True)
        if self._join.pushed:
            self._join_path.unlink(missing_ok=True)
        for folder in (self._place.socket_dir, self._place.snapshots):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()


def _sender(rank: int, pid: int, start_ticks: int) -> bytes:
    return f"rank-{rank}-{pid}-{start_ticks}".encode()


def serve(place: str, join: str) -> int:
    """Run the agent of the directory ``place``, for the run of the join file ``join``.

    Raises ``FtmonError`` if one of them is damaged or accessible to others.
    """
    folder = RunDir(place)
    folder.check()
    path = Path(join)
    return Agent(folder, read_join(path), path).run()
