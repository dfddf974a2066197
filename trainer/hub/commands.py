"""Commands of apps: each is accepted or refused at once, and its result is sent when it is done."""

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import zmq

from ...protocol.analysis.findings.alerts import Action
from ...protocol.errors import FtmonError, ProtocolError, UsageError
from ...protocol.host.process import is_alive
from ...protocol.link.sockets import received
from ...protocol.messages import control, wire
from ...protocol.messages.control import Accepted, Command, Result
from ...protocol.messages.telemetry import Hello
from ...protocol.messages.wire import UNREADABLE, Message
from ...protocol.run.end import write_end_request
from ...protocol.text import all_ranks
from ..host import loop
from ..host.end.kill import KillScope, Outcome, Target, at_once, interrupt_job, interrupt_ranks, kill
from ..host.loop import Flow, Reply
from .agents import BACK_SECONDS, Agent, Agents
from .core import Core
from .inspection import StackRequests
from .ranks import Answers, RankLink

_AGENT_SECONDS = 30.0  # Time limit of an escalation and its check of the GPUs
_CUT_OFF = (
    "cut off: its processes could not be reached; "
    f"they will be ended if the host is back within {BACK_SECONDS / 60:.0f} min"
)


class Kills:
    """Kills ranks on all hosts. Main loop only.

    ``left`` is called in the main loop with the pids of this host that a kill could not end.
    """

    def __init__(self, core: Core, agents: Agents, left: Callable[[list[int]], object]) -> None:
        self._core = core
        self._rank_hosts = core.rank_hosts
        self.agents = agents
        self._left = left

    def check(self, ranks: list[int]) -> None:
        """Refuse to kill ranks that cannot be reached now.

        Raises ``UsageError`` if a rank's host is cut off, or has no agent.
        """
        here = {target.rank for target in self._rank_hosts.targets()}
        for rank in ranks:
            agent = self.agents.of(rank)
            if rank in here or (agent is not None and agent.state == "reachable"):
                continue
            why = f"rank {rank} runs on {self._rank_hosts.hellos[rank].host}, and no agent there answers for it"
            if agent is not None:
                why = f"{agent.host}, where rank {rank} runs, is cut off; it can be killed once it is back"
            raise UsageError(f"kill: {why}")

    async def kill(self, ranks: list[int], number: signal.Signals | None) -> Outcome:
        """Kill ``ranks`` (empty: the whole run), on all hosts at the same time; return the outcome.

        ``number`` is the signal to send, None to escalate INT, TERM, KILL.
        """
        targets = [target for target in self._rank_hosts.targets() if not ranks or target.rank in ranks]
        agents = [agent for agent in self.agents.all() if not ranks or set(ranks) & set(agent.ranks)]
        reachable = [agent for agent in agents if agent.state == "reachable"]
        parts = {agent.host: Outcome(False, _CUT_OFF, {}) for agent in agents if agent not in reachable}
        away = self._kill_away(reachable, ranks, number) if reachable else None
        if targets or not ranks:
            parts[""] = await self._kill_here(targets, not ranks, number)
            self._left(parts[""].data.get("left", []))
        if away is not None:
            answers = await away
            parts |= {agent.host: _outcome_of(answers.get(place), agent.now) for place, agent in enumerate(reachable)}
        return _together(parts)

    def _kill_here(self, targets: list[Target], whole_run: bool, number: signal.Signals | None) -> Reply[Outcome]:
        roots, spared = self.launcher_and_spared()
        others = set(self._rank_hosts.targets()) - set(targets)
        foreign = self._core.file.foreign
        if whole_run and foreign is not None and foreign.launcher is not None and is_alive(foreign.launcher):
            # A launcher of ranks that would restart them.
            roots = [foreign.launcher.pid]
            targets = [*targets, Target(-1, *msgspec.structs.astuple(foreign.launcher))]
        scope = KillScope(self._core.run.path, targets, spared, whole_run, roots, others)
        return kill(scope, number, self._rank_hosts.on_gpu, self._core.post)

    def _kill_away(self, agents: list[Agent], ranks: list[int], number: signal.Signals | None) -> Reply[Answers]:
        verb = control.Kill(ranks, number.name if number else "", self._rank_hosts.on_gpu)
        return self._core.link.ask_agents(
            verb, _places(agents), _AGENT_SECONDS, lambda place: agents[place].now.state != "reachable"
        )

    def interrupt(self) -> bool:
        """Send INT to all ranks on all hosts; return whether any rank is known to have received it."""
        interrupted = interrupt_ranks(self._rank_hosts.targets())
        agents = self.agents.reachable()
        self._core.link.ask_agents(control.Stop(), _places(agents), _AGENT_SECONDS)
        return bool(interrupted or any(agent.alive for agent in agents))

    def launcher_and_spared(self) -> tuple[list[int], list[int]]:
        """Return the launcher's pid, if it is alive, and the pids that a kill must spare."""
        launcher = self._core.run.read_run().launcher
        roots = [launcher.pid] if launcher is not None and is_alive(launcher) else []
        return roots, [*roots, os.getpid()]


def _places(agents: list[Agent]) -> dict[bytes, int]:
    """Return the identities of agents, by which they are asked, with the places under which they answer."""
    return {agent.identity: place for place, agent in enumerate(agents)}


def _outcome_of(result: Result | None, agent: Agent) -> Outcome:
    if result is not None:
        return Outcome(result.ok, result.text, result.data)
    if agent.state == "left":
        return Outcome(True, "ended with the run, and its agent after it", {})
    why = _CUT_OFF if agent.state == "cut off" else f"no answer of the agent there in {_AGENT_SECONDS:.0f} s"
    return Outcome(False, why, {})


def _together(parts: dict[str, Outcome]) -> Outcome:
    """Merge the outcomes of all hosts; this host is not named in the result."""
    if set(parts) <= {""}:
        return parts.get("") or Outcome(True, "no process of the run was left", {})
    data: dict[str, Any] = {"ended": [], "left": [], "ranks": [], "seconds": 0.0, "signal": "", "hosts": {}}
    for host, part in parts.items():
        for key in ("ended", "left", "ranks"):
            data[key] += part.data.get(key, [])
        data["seconds"] = max(data["seconds"], part.data.get("seconds", 0.0))
        data["signal"] = data["signal"] or part.data.get("signal", "")
        data["hosts"][host or "here"] = part.data
    text = ". ".join(f"On {host}: {part.text}" if host else f"Here: {part.text}" for host, part in parts.items())
    return Outcome(all(part.ok for part in parts.values()), text, data)


STACKS_BEFORE_KILL_SECONDS = 5.0  # Like the others a limit for ranks that do not answer; no other is waited for
_STACKS_SECONDS = 5.0
_SNAPSHOT_SECONDS = 60.0
_STOP_SECONDS = 10.0
_RELEASE_SECONDS = 15.0
_CONSOLE_SECONDS = 60.0
_STOP_NOTICE_SECONDS = 5.0
"""Lead time of a stop command to ranks on several hosts: every rank receives it before it finishes the last step."""


class _Caller:
    def __init__(self, socket: "zmq.Socket[Any]", identity: bytes, source: str, command: Command) -> None:
        self._socket = socket
        self._identity = identity
        self.source = source
        self.command = command
        self.away = socket.getsockopt(zmq.MECHANISM) == zmq.CURVE  # Whether the command arrived over TCP

    def answer(self, message: Accepted | Result) -> None:
        frames = [self._identity, *wire.encode("hub", 0, time.time(), message)]
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart(frames, zmq.NOBLOCK)


class Commands:
    """Receives commands from ROUTER sockets. Main loop only. ``shut_down`` ends only the hub, soon."""

    def __init__(
        self, core: Core, stack_requests: StackRequests, kills: Kills, shut_down: Callable[[], object]
    ) -> None:
        self._core = core
        self._rank_hosts = core.rank_hosts
        self._stack_requests = stack_requests
        self._kills = kills
        self._shut_down = shut_down
        self._under_way = 0
        self._interrupted: set[int] | None = None  # Pids of the ranks that a stop interrupted; None before

    @property
    def busy(self) -> bool:
        """Whether a command is being executed."""
        return self._under_way > 0

    def receive(self, socket: "zmq.Socket[Any]") -> None:
        """Receive every waiting command of one socket."""
        for frames in received(socket):
            if len(frames) == 3:
                self._receive_one(socket, *frames)

    def _receive_one(self, socket: "zmq.Socket[Any]", identity: bytes, header: bytes, body: bytes) -> None:
        nobody = _Caller(socket, identity, "", Command("", ""))
        try:
            source = wire.decode_header(header).src
            command = wire.decode_body(body)
        except ProtocolError as error:
            nobody.answer(Accepted(_id_of(body), False, str(error)))
            return
        if not isinstance(command, Command):
            nobody.answer(Accepted(_id_of(body), False, "the control channel takes commands only"))
            return
        caller = _Caller(socket, identity, source, command)
        try:
            verb = control.decode(command, control.HUB)
            if self._core.file.options.read_only and command.verb not in control.READ_ONLY:
                why = "this run was started with --read-only; its hub refuses commands that act on the run"
                raise UsageError(f"{command.verb}: {why}")
            accepted, done = self._prepare(caller, verb)
        except FtmonError as error:
            caller.answer(Accepted(command.id, False, str(error)))
            return
        caller.answer(Accepted(command.id, True, accepted))
        if command.verb not in control.READ_ONLY:
            self._core.emit(command)
        loop.start(self._carry_out(caller, done))

    async def _carry_out(self, caller: _Caller, done: Flow[Outcome]) -> None:
        command = caller.command
        self._under_way += 1
        try:
            ok, text, data = await done
        except Exception as error:  # the user must get an answer after any error
            traceback.print_exc(file=sys.stderr)
            ok, text, data = False, f"{command.verb}: the hub failed: {type(error).__name__}: {error}", {}
        self._under_way -= 1
        result = Result(command.id, ok, command.verb, text, {**data, "asked_by": caller.source}, time.time())
        caller.answer(result)
        if command.verb not in control.READ_ONLY:
            self._core.emit(result)
        if command.verb == "shutdown":
            self._shut_down()

    def _prepare(self, caller: _Caller, verb: control.Verb) -> tuple[str, Flow[Outcome]]:
        """Check a command's ranks; return the acceptance text and the coroutine that executes it.

        Raises ``UsageError``: invalid arguments.
        """
        match verb:
            case control.Kill():
                return self._prepare_kill(caller, verb)
            case control.Stop():
                return "asking the ranks to stop", self._stop(caller)
            case control.Stacks():
                ranks = self._ranks(verb) or self._rank_hosts.ranks
                return f"asking {all_ranks(ranks)}", self._stacks(verb, ranks)
            case control.Snapshot() | control.Arm() | control.Compose():
                ranks = self._ranks(verb) or self._rank_hosts.ranks
                return f"asking {all_ranks(ranks)}", self._pass_on(verb, ranks)
            case control.Release():
                return "letting go", self._release(self._ranks(verb))
            case control.Console():
                return self._prepare_console(caller, verb)
            case control.Shutdown():
                return "the hub ends; the ranks go on", at_once("the hub ends; the ranks go on unwatched", {})
            case _:
                return "alive", at_once("alive", {"pid": os.getpid()})

    def _ranks(self, verb: control.OnRanks) -> list[int]:
        """Return a command's ranks, which the run must have, sorted; empty means all."""
        unknown = [rank for rank in verb.ranks if rank not in self._rank_hosts.ranks]
        if unknown:
            raise UsageError(f"{verb.name}: no rank {unknown[0]}; the run has {all_ranks(self._rank_hosts.ranks)}")
        return sorted(set(verb.ranks))

    def _prepare_kill(self, caller: _Caller, verb: control.Kill) -> tuple[str, Flow[Outcome]]:
        ranks, number = self._ranks(verb), verb.number
        self._kills.check(ranks)
        what = all_ranks(ranks) if ranks else "the run"
        how = f"with {number.name}" if number else "with INT, then TERM, then KILL"
        return f"saving stacks, then killing {what} {how}", self._kill(caller, ranks, number)

    async def _kill(self, caller: _Caller, ranks: list[int], number: signal.Signals | None) -> Outcome:
        with contextlib.suppress(OSError):  # a full disk must not prevent a kill
            write_end_request(self._core.run, "kill", caller.source, ranks)
        verb = control.Stacks(reason=f"kill asked by {caller.source}")
        stacks = await self._stack_requests.collect(ranks or self._rank_hosts.ranks, STACKS_BEFORE_KILL_SECONDS, verb)
        outcome = await self._kills.kill(ranks, number)
        saved = sorted(rank for rank, answer in stacks.items() if answer.ok)
        return Outcome(outcome.ok, outcome.text, {**outcome.data, "stacks_saved": saved})

    async def _stop(self, caller: _Caller) -> Outcome:
        with contextlib.suppress(OSError):
            write_end_request(self._core.run, "stop", caller.source)
        # Ranks of one host agree on a last step through a file; those of several hosts receive it in the command.
        tracker = self._core.analysis.tracker
        last_step = tracker.step_in(_STOP_NOTICE_SECONDS) if self._rank_hosts.any_elsewhere else 0
        answers = await self._core.link.ask(control.Stop(last_step), self._rank_hosts.ranks, _STOP_SECONDS)
        agreed = sorted(rank for rank, answer in answers.items() if answer.ok)
        if not agreed:
            return await self._interrupt()
        silent = [rank for rank in self._rank_hosts.ranks if rank not in agreed]
        text = f"{all_ranks(agreed)} will save a checkpoint and end after this step"
        if silent:
            text += f"; no answer from {all_ranks(silent)}: if the run does not end, kill it"
        return Outcome(True, text, {"agreed": agreed, "silent": silent})

    async def _interrupt(self) -> Outcome:
        """Interrupt a foreign script, as ctrl-c does.

        Only the ranks are signalled first, so that they can clean up: DeepSpeed's launcher, if signalled directly,
        sends them TERM at once.
        """
        told = interrupt_ranks(self._rank_hosts.targets())
        self._interrupted = {target.pid for target in told}
        agents = self._kills.agents.reachable()
        away = await self._core.link.ask_agents(control.Stop(), _places(agents), _STOP_SECONDS)
        signalled_there = [place for place in sorted(away) if away[place].data.get("signalled")]
        there = [f"on {agents[place].host} {away[place].text}" for place in signalled_there]
        if told or there:
            here = [f"sent SIGINT to {all_ranks([t.rank for t in told])}"] if told else []
            text = f"{'; '.join(here + there)}: the script is not ftmon's own trainer"
            signalled = len(told) + sum(int(answer.data.get("signalled", 0)) for answer in away.values())
            return Outcome(True, text + ", whether it saves anything is up to it", {"signalled": signalled})
        groups = self._interrupt_job()
        text = "sent SIGINT to the job" if groups else "no process of the run was left"
        return Outcome(True, text, {"signalled": len(groups)})

    def rank_started(self, hello: Hello) -> None:
        """Process a rank's ``Hello``: if an elastic launcher restarted the rank after a stop, interrupt the job."""
        if self._interrupted and hello.pid not in self._interrupted:
            self._interrupted.add(hello.pid)
            self._interrupt_job()

    def _interrupt_job(self) -> list[int]:
        """Send INT to all process groups of the run on this host; return them."""
        return interrupt_job(self._core.run.path, *self._kills.launcher_and_spared())

    async def _release(self, asked: list[int]) -> Outcome:
        answers = await self._core.link.ask(control.Release(), asked or self._rank_hosts.ranks, _RELEASE_SECONDS)
        released = sorted(rank for rank, answer in answers.items() if answer.ok)
        missing = [rank for rank in asked if rank not in released]
        none = f"{all_ranks(asked)} {'is' if len(asked) == 1 else 'are'} not held" if asked else "no rank is held"
        text = f"{all_ranks(released)} released" if released else none
        if released and missing:
            text += f"; {all_ranks(missing)} not held, or without an answer"
        return Outcome(bool(released) and not missing, text, {"released": released})

    def _prepare_console(self, caller: _Caller, verb: control.Console) -> tuple[str, Flow[Outcome]]:
        if caller.away:
            raise UsageError("console: not over TCP; attach on the run's host, or by ssh://")
        if not self._core.run.read_run().options.allow_console:
            raise UsageError("console: this run was not started with --allow-console")
        if verb.rank not in self._rank_hosts.ranks:
            raise UsageError(f"console: rank must be one of {all_ranks(self._rank_hosts.ranks)}")
        return "running", self._run_code(verb.rank, verb.code)

    async def _run_code(self, rank: int, code: str) -> Outcome:
        answers = await self._core.link.ask(control.Console(code), [rank], _CONSOLE_SECONDS)
        answer = answers.get(rank)
        if answer is None:
            text = f"no answer from rank {rank} in {_CONSOLE_SECONDS:.0f} s: it still runs; "
            return Outcome(False, f"{text}'ftmon release' interrupts it", {"busy": True})
        return Outcome(answer.ok, answer.text, {"busy": False, **answer.data})

    async def _stacks(self, verb: control.Stacks, ranks: list[int]) -> Outcome:
        return _of_answers(verb.name, ranks, await self._stack_requests.collect(ranks, _STACKS_SECONDS, verb))

    async def _pass_on(self, verb: control.OnRanks, ranks: list[int]) -> Outcome:
        to_rank = msgspec.structs.replace(verb, ranks=[])
        return _of_answers(verb.name, ranks, await self._core.link.ask(to_rank, ranks, _SNAPSHOT_SECONDS))


def _of_answers(verb: str, ranks: list[int], answers: Answers) -> Outcome:
    good = sorted(rank for rank, answer in answers.items() if answer.ok)
    sentences = [f"{verb} of {all_ranks(good)}"] if good else []
    sentences += [f"rank {rank}: {answer.text or 'refused'}" for rank, answer in answers.items() if not answer.ok]
    absent = [rank for rank in ranks if rank not in answers]
    if absent:
        sentences.append(f"no answer from {all_ranks(absent)}: stuck in native code, stopped or gone")
    silent = sorted([*absent, *(rank for rank, answer in answers.items() if answer.data.pop("silent", False))])
    data = {"answers": {str(rank): answer.data for rank, answer in answers.items()}, "silent": silent}
    return Outcome(len(good) == len(ranks) > 0, "; ".join(sentences) or "no rank is known yet", data)


def _id_of(body: bytes) -> str:
    """Return the id in a body that could not be decoded, so that its sender can match the refusal."""
    try:
        found = msgspec.msgpack.decode(body)
    except UNREADABLE:
        return ""
    return str(found.get("id", "")) if isinstance(found, dict) else ""


ANSWER_SECONDS = 120.0


class Actions:
    """Sends actions and records their results. Main loop only.

    ``allowed`` returns whether a verb may be sent in this run.
    """

    def __init__(self, link: RankLink, emit: Callable[[Message], object], allowed: Callable[[str], bool]) -> None:
        self._link = link
        self._emit = emit
        self._allowed = allowed
        self._sent = 0
        self.answered: Callable[[Action, Answers], None] = lambda action, answers: None
        """Called with the stacks that a detector requested; they are samples and not recorded."""

    def send(self, actions: Iterable[Action]) -> None:
        """Send the actions that detectors requested."""
        for action in actions:
            if self._allowed(action.verb.name):
                self._sent += 1
                loop.start(self._ask(f"hub-action-{self._sent}", action))

    async def _ask(self, number: str, action: Action) -> None:
        answers = await self._link.ask(action.verb, action.ranks, ANSWER_SECONDS)
        if isinstance(action.verb, control.Stacks):
            self.answered(action, answers)
            return
        for rank in action.ranks:
            answer = answers.get(rank)
            ok, text = (answer.ok, answer.text) if answer is not None else (False, "no answer")
            data = {"asked_by": "hub", "why": action.why, "rank": rank}
            self._emit(Result(number, ok, action.verb.name, f"rank {rank}: {text}", data, time.time()))
