"""For tests of the hub: start a run of pretended ranks, follow its stream, command it, and see what is left of it."""

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
from eventually import SECONDS, eventually
from ftmon.protocol.host.process import is_alive
from ftmon.protocol.link.sockets import CHANNELS, peer_socket
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import Accepted, Answer, Command, Query, Result
from ftmon.protocol.messages.telemetry import Hello
from ftmon.protocol.messages.wire import Frame, Message
from ftmon.protocol.run.rundir import ExitFile, HubFile, RunDir, RunOptions
from ftmon.protocol.run.start import StartRequest
from ftmon.trainer.host import processes
from ftmon.trainer.launch.start import start_run
from run_picture import pictured

SCRIPTS = Path(__file__).parents[1] / "integration" / "scripts"
M = TypeVar("M", bound=Message)


def fake_ranks(*ranks: dict[str, Any]) -> list[str]:
    options = [json.dumps({"world": len(ranks), **rank}) for rank in ranks]
    return [sys.executable, str(SCRIPTS / "fake_launcher.py"), *options]


def members(run: RunDir) -> list[processes.Process]:
    """List the living processes that carry the run's mark, and what descends from them."""
    return processes.of_run(run.path, [], [])


def hub_of(run: RunDir) -> HubFile:
    return eventually(run.living_hub, "a living hub")


def exit_of(run: RunDir) -> ExitFile:
    return eventually(run.read_exit, "the end of the run")


def hub_gone(run: RunDir) -> None:
    """Wait until the run's launcher, which waits for its hub, has ended, and no hub is left."""
    launcher = run.read_run().launcher
    if launcher is not None:
        eventually(lambda: not is_alive(launcher), "the launcher's end")
    eventually(lambda: run.living_hub() is None, "the hub's end")


@contextmanager
def started(command: list[str], **options: Any) -> Iterator[RunDir]:
    """Start a run; whatever the test does, nothing of it is left afterwards, and its failure shows the run."""
    run = start_run(StartRequest("run", options=RunOptions(**{"logs": False, **options})), "test", command)
    try:
        with pictured(run):
            yield run
    finally:
        launcher = eventually(lambda: run.read_run().launcher, "the launcher")
        for _ in range(3):
            for process in members(run):
                processes.send_signal(process, signal.SIGKILL)
        if is_alive(launcher):
            try:
                exit_of(run)
            finally:
                signal_hub(run, signal.SIGTERM)
                eventually(lambda: not is_alive(launcher), "the launcher's end")
        signal_hub(run, signal.SIGKILL)
        run.remove_sockets(CHANNELS)


def signal_hub(run: RunDir, number: signal.Signals) -> None:
    hub = run.living_hub()
    if hub is not None:
        with suppress(ProcessLookupError):
            os.kill(hub.process.pid, number)


class App:
    """An attached app: the stream, control and query channels of a run's hub."""

    def __init__(self, run: RunDir) -> None:
        self.hub = hub_of(run)
        self.context: zmq.Context[Any] = zmq.Context()
        self.stream, self.control, self.queries = map(self._connected, ("stream", "control", "query"))
        self.frames: list[Frame] = []

    def _connected(self, channel: str) -> "zmq.Socket[Any]":
        socket = peer_socket(self.context, channel)
        socket.connect(self.hub.addresses[channel])
        return socket

    def __enter__(self) -> "App":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)

    def read(self, seconds: float = 0.1) -> None:
        """Take what the stream has, waiting at most ``seconds`` for more."""
        deadline = time.monotonic() + seconds
        while self.stream.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            header, body = self.stream.recv_multipart()
            head = wire.decode_header(header)
            message = wire.decode_body(body)
            assert message is not None
            self.frames.append(Frame(head.seq, head.t, message))
            if time.monotonic() >= deadline:
                return

    def of(self, kind: type[M]) -> list[M]:
        return [frame.message for frame in self.frames if isinstance(frame.message, kind)]

    def wait_for(self, kind: type[M], matches: Callable[[M], bool] = lambda _: True, seconds: float = SECONDS) -> M:
        """Follow the stream until a message of ``kind`` matches; return the first that does."""
        deadline = time.monotonic() + seconds
        seen = 0
        while True:
            for frame in self.frames[seen:]:
                if isinstance(frame.message, kind) and matches(frame.message):
                    return frame.message
            seen = len(self.frames)
            assert time.monotonic() < deadline, (
                f"no such {kind.__name__} in {seconds} s; last: {str(self.frames[-3:])[:600]}"
            )
            self.read()

    def told(self, kind: type[M], matches: Callable[[M], bool] = lambda _: True, seconds: float = SECONDS) -> M:
        """Return the first message of ``kind`` that matches in the recording, even if sent before subscribing."""

        def find() -> M | None:
            messages = (frame.message for frame in self.recorded())
            return next((found for found in messages if isinstance(found, kind) and matches(found)), None)

        return eventually(find, f"a {kind.__name__} of the run", seconds, every=0.2)

    def send(self, verb: str, **args: Any) -> str:
        command = Command(secrets.token_hex(6), verb, args)
        self.control.send_multipart(wire.encode("test", 1, time.time(), command))
        return command.id

    def answer(self, seconds: float = SECONDS) -> Accepted | Result:
        assert self.control.poll(int(seconds * 1000)), f"no answer in {seconds} s"
        message = wire.decode_body(self.control.recv_multipart()[1])
        assert isinstance(message, Accepted | Result)
        return message

    def command(self, verb: str, **args: Any) -> Result:
        accepted = self._asked(verb, **args)
        assert accepted.ok, accepted.text
        result = self.answer()
        assert isinstance(result, Result)
        assert accepted.id == result.id
        return result

    def _asked(self, verb: str, **args: Any) -> Accepted:
        number, accepted = self.send(verb, **args), self.answer()
        assert isinstance(accepted, Accepted)
        assert accepted.id == number
        return accepted

    def answers(self, verb: str, **args: Any) -> bool:
        """Send a command; return whether it was accepted and its result is good."""
        return self._asked(verb, **args).ok and bool(self.answer().ok)

    def refused(self, verb: str, **args: Any) -> str:
        accepted = self._asked(verb, **args)
        assert not accepted.ok
        return accepted.text

    def query(self, name: str, **args: Any) -> Answer:
        self.queries.send_multipart(wire.encode("test", 1, time.time(), Query(secrets.token_hex(6), name, args)))
        assert self.queries.poll(int(SECONDS * 1000))
        answer = wire.decode_body(self.queries.recv_multipart()[1])
        assert isinstance(answer, Answer)
        return answer

    def recorded(self) -> Iterator[Frame]:
        """Ask for everything recorded so far, part by part: a flood is recorded as fast as it is read."""
        last = 0
        while True:
            answer = self.query("frames", after_seq=last, limit=5_000)
            assert answer.ok, answer.error
            part = msgspec.msgpack.decode(answer.data, type=list[Frame])
            if not part:
                return
            yield from part
            last = part[-1].seq
            if len(part) < 5_000:  # more is recorded all the time
                return

    def history(self) -> list[Frame]:
        return list(self.recorded())

    def hellos(self) -> dict[int, Hello]:
        found = [frame.message for frame in self.history()]
        return {message.rank: message for message in found if isinstance(message, Hello)}
