"""A hub for tests of what an app makes of one: real sockets, the real Writer and Reader, and a hand on the stream.

It numbers, records and publishes what a test puts in, answers queries after committing as the real one does, and
accepts every command. ``put(..., published=False)`` records a message that no subscriber gets: a hole to be filled;
``put(..., recorded=False)`` is what a hub does whose disk is full.
"""

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any, Self

import zmq
from ftmon import __version__
from ftmon.protocol.errors import FtmonError
from ftmon.protocol.host.process import ProcessId, this_process
from ftmon.protocol.link import sockets
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import Accepted, Answer, Command, Query, Result
from ftmon.protocol.messages.telemetry import Heartbeat
from ftmon.protocol.messages.wire import Frame, Message
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.recording.results import answer_query
from ftmon.protocol.recording.writer import Writer
from ftmon.protocol.run.rundir import HubFile, RunDir


class SmallHub:
    """Serves one run directory from a thread until ``close``; ``put`` may be called from the test's thread."""

    def __init__(self, run: RunDir, process: ProcessId | None = None) -> None:
        self.run = run
        self.commands: list[Command] = []
        self.mute = False  # queries stay without an answer
        self.completes = True  # whether a command has its result, `done`, at once; else a test puts it
        self._lock = threading.Lock()
        self._context: zmq.Context[Any] = zmq.Context()
        self._writer = Writer(run.recording, run.read_run())
        self.seq = self._writer.next_seq - 1
        self._stream, self._control, self._query = map(self._bind, ("stream", "control", "query"))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="small hub", daemon=True)
        self._thread.start()
        addresses = {channel: run.ipc_address(channel) for channel in sockets.CHANNELS}
        self.file = HubFile(process or this_process(), addresses, __version__, "here", time.time())
        run.write_hub(self.file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, message: Message, t: float | None = None, *, published: bool = True, recorded: bool = True) -> Frame:
        """Append one message to the stream."""
        with self._lock:
            self.seq += 1
            frame = Frame(self.seq, time.time() if t is None else t, message)
            if recorded and not isinstance(message, Heartbeat):
                self._writer.append(frame.seq, frame.t, message)
            if published:
                self._stream.send_multipart(wire.encode("hub", frame.seq, frame.t, message))
        return frame

    def close(self) -> None:
        """End: sockets closed, the recording complete; what follows is up to the test."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)
        self._writer.close()
        self.run.remove_sockets(("stream", "control", "query"))

    def _bind(self, channel: str) -> "zmq.Socket[Any]":
        socket = sockets.hub_socket(self._context, channel)
        address = self.run.ipc_address(channel)
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
        sockets.bind(socket, address)
        os.chmod(address.removeprefix("ipc://"), 0o600)
        return socket

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._query, zmq.POLLIN)
        while not self._closing.is_set():
            for socket, _ in poller.poll(20):
                peer, _, body = socket.recv_multipart()
                message = wire.decode_body(body)
                if isinstance(message, Query) and not self.mute:
                    with contextlib.suppress(zmq.ZMQError):  # who asked may be gone by now
                        socket.send_multipart([peer, *wire.encode("hub", 0, time.time(), self._answer(message))])
                elif isinstance(message, Command):
                    self._act(socket, peer, message)

    def _answer(self, query: Query) -> Answer:
        with self._lock:
            self._writer.commit()
        try:
            with Reader(self.run.recording) as reader:
                return Answer(query.id, True, answer_query(reader, query.name, query.args))
        except FtmonError as error:
            return Answer(query.id, False, error=str(error))

    def _act(self, socket: "zmq.Socket[Any]", peer: bytes, command: Command) -> None:
        self.commands.append(command)
        socket.send_multipart([peer, *wire.encode("hub", 0, time.time(), Accepted(command.id, True, "under way"))])
        if self.completes:
            result = Result(command.id, True, command.verb, "done", time=time.time())
            self.put(result)
            socket.send_multipart([peer, *wire.encode("hub", 0, time.time(), result)])
