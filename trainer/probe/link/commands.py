"""Runs commands from the hub on the publisher thread, so that they work while the training thread is stuck."""

import contextlib
import faulthandler
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from ....protocol.errors import ProtocolError, UsageError
from ....protocol.messages import control, wire
from ....protocol.messages.control import Accepted, Command, Result
from ....protocol.messages.telemetry import Stacks
from ...host import processes
from ...host.inspection import inspect
from .. import guard
from ..memory.capture_scheduler import CaptureScheduler
from ..memory.snapshots import Answer, CaptureContext, Snapshots
from ..memory.stacks import StackCapture
from ..oom.console import Hold
from ..phases.tracker import StopRequest
from . import stacks
from .stacks import Dumper


class Captures(NamedTuple):
    """What records memory on request."""

    steps: CaptureScheduler
    snapshots: Snapshots
    stacks: StackCapture

    def tick(self) -> None:
        """Go on with what was requested; called 10 times a second."""
        for each in self:
            each.tick()


class Commands:
    """Answers each command twice, as in ``protocol.messages.control``: accepted (or the refusal), then its result."""

    def __init__(
        self,
        context: CaptureContext,
        captures: Captures,
        stop: StopRequest,
        hold: Hold,
        dumper: Dumper,
        send_hello: Callable[[], None],
    ) -> None:
        self._rank, self._tracker = context.rank, context.tracker
        self._pace, self._send = context.pace, context.send
        self._captures, self._stop_request, self._hold = captures, stop, hold
        self._dumper, self._send_hello = dumper, send_hello
        self._answered = 0

    def receive(self, socket: Any) -> None:
        """Execute every waiting command."""
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                wire.decode_header(frames[0])
                command = wire.decode_body(frames[1])
            except (ProtocolError, IndexError) as error:
                guard.log_error("a command that cannot be read", error)
                continue
            if isinstance(command, Command):
                self._act(socket, command)

    def _act(self, socket: Any, command: Command) -> None:
        def answer(ok: bool, text: str, data: dict[str, Any]) -> None:
            self._answer(socket, Result(command.id, ok, command.verb, text, data, time.time()))

        try:
            verb = control.decode(command, control.RANK)
        except UsageError as error:
            self._answer(socket, Accepted(command.id, False, str(error)))
            return
        if isinstance(verb, control.Console):
            refused = self._hold.run(verb.code, answer)
            self._answer(socket, Accepted(command.id, not refused, refused))
            return
        self._answer(socket, Accepted(command.id, True))
        try:
            self._carry_out(verb, answer)
        except Exception as error:
            guard.log_error(command.verb, error)
            answer(False, f"{type(error).__name__}: {error}", {})

    def _carry_out(self, verb: control.Verb, answer: Answer) -> None:
        match verb:
            case control.Stop():
                answer(*self._stop(verb))
            case control.Stacks():
                answer(*self._stacks(verb))
            case control.Release():
                released = self._hold.release()
                answer(released, "released" if released else "this rank is not held", {})
            case control.Snapshot():
                self._captures.snapshots.want(verb.reason, answer)
            case control.Compose():
                self._captures.steps.want(verb.reason, answer)
            case control.Arm():
                self._captures.stacks.want(verb.phase, verb.steps, verb.from_step, verb.reason, answer)
            case control.Identify():
                self._send_hello()
                answer(True, "", {})
            case _:
                answer(True, "", {})

    def _answer(self, socket: Any, message: Accepted | Result) -> None:
        self._answered += 1
        try:
            frames = wire.encode(self._rank.identity, self._answered, time.time(), message)
            socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            guard.log("an answer found no room and was dropped")

    def _stacks(self, verb: control.Stacks) -> tuple[bool, str, dict[str, Any]]:
        # In memory: a rank's stacks must be available on a full disk, too.
        with open(os.memfd_create("ftmon-stacks"), "w+b") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text = file.read(1 << 20).decode(errors="replace")
        training, prepared, pid = self._rank.guard.thread, self._dumper.prepared, os.getpid()
        text += stacks.stacks_of_workers(pid)
        thread = f"0x{training:016x}"
        data: dict[str, Any] = {"text": text, "thread": thread}
        if verb.calls:
            data |= {
                "calls": stacks.calls(self._tracker.counts),
                "lock": stacks.waits_for(training),
                "timed": stacks.waits_for_a_time(training),
                "wakes": stacks.seconds_until_awake(pid, pid if prepared is None else prepared.training),
                "worker_wakes": stacks.first_worker_awake(pid),
                "loops": stacks.around(training),
                "gathers": self._tracker.counts.gathers,
                "nccl": stacks.ras_address(),
            }
        if verb.activity:
            data["activity"] = list(inspect.measure(pid, prepared, processes.table(), time.monotonic()))
        if not verb.quiet:
            self._send(Stacks(self._rank.rank, time.time(), text, verb.reason, thread, "probe"))
        return True, "", data

    def _stop(self, verb: control.Stop) -> tuple[bool, str, dict[str, Any]]:
        request, done = self._stop_request, self._tracker.step
        if not request.supported:
            return False, "the script does not ask whether to stop; it has to be interrupted", {}
        step = verb.step or agree_on_step(self._rank.run.path / "stop-after", done, self._pace.usual)
        after = step if self._rank.world_size > 1 else done
        request.ask(after)
        return True, f"will stop after step {max(after, done)}", {"step": after}


def agree_on_step(path: Path, step: int, step_seconds: float) -> int:
    """Agree with the run's other ranks on the step to stop after; a rank that stops earlier leaves the others hanging.

    The first rank proposes a step in the run's file, the others adopt it. Ranks are a few steps apart at most, so the
    proposal is a few steps and at least a second ahead of the last finished step.
    """
    with contextlib.suppress(FileNotFoundError):
        return int(path.read_text())
    ahead = 3 + math.ceil(1 / step_seconds) if step_seconds > 0 else 3
    proposal = path.with_name(f".{path.name}-{os.getpid()}")
    proposal.write_text(str(step + ahead))
    try:
        os.link(proposal, path)
    except FileExistsError:
        pass
    finally:
        proposal.unlink()
    return int(path.read_text())
