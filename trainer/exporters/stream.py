"""The stream of a run's hub, for a process that exports it: the newest messages, across restarts of the hub.

The process subscribes as an app does. ZeroMQ's queues, of 10,000 messages at each end, are the only ones: the hub never
waits, and what does not fit is missing from the numbering of the stream. After a gap, and at first, the hub is asked
for the state of the run, so that an exporter's figures are the current ones again.
"""

import os
import secrets
import select
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from ...protocol.errors import FtmonError, ProtocolError
from ...protocol.host.process import is_alive
from ...protocol.link.sockets import peer_socket, received
from ...protocol.messages import wire
from ...protocol.messages.control import Answer, ExporterState, Query, RunState
from ...protocol.messages.wire import Frame
from ...protocol.recording.results import decode_answer
from ...protocol.run.rundir import RunDir

_CHECK_SECONDS = 2.0
_REPORT_SECONDS = 10.0
_ANSWER_SECONDS = 10.0
_LATER_SECONDS = 86_400.0  # Added to now in the query for the newest state: the clock may have been set back


def yield_cpu() -> None:
    """Give this process, and those it starts, a low priority: ranks that compute on CPUs come first."""
    os.nice(10)
    with suppress(OSError):  # Linux compares sessions, not processes, where autogroups are on; see sched(7)
        Path("/proc/self/autogroup").write_text("10")


class RunStream:
    """The stream of one run's hub; ``close`` it in the end. ``FtmonError``: the run directory cannot be read."""

    def __init__(self, run: RunDir) -> None:
        self.dropped = 0  # Messages of the stream that did not arrive here
        self.over = False  # The run has ended, or no process of it is left that would record its end
        self._run = run
        self._launcher = run.read_run().launcher
        self._context: zmq.Context[Any] = zmq.Context()
        self._stream, self._query, self._telemetry = (
            self._connected(channel) for channel in ("stream", "query", "telemetry")
        )
        self._reported, self._next_report = "", 0.0
        self._reports = 0
        self._last_seq = 0
        self._must_ask = False
        self._asked = ("", 0.0)  # Id of the query without an answer (empty: none), and when it was sent
        self._next_check = 0.0

    def _connected(self, channel: str) -> "zmq.Socket[Any]":
        socket = peer_socket(self._context, channel)
        socket.connect(self._run.ipc_address(channel))
        return socket

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)

    def read(self, seconds: float, woken: int | None = None) -> Iterator[tuple[Frame, bool]]:
        """Gather messages for ``seconds``; yield those that arrived, and whether they are from the stream.

        The others are of the run's state, and may be older than what was in the stream before. The process sleeps
        meanwhile, instead of waking up with each message; ``woken``: a descriptor that is readable if it must not.
        """
        select.select([] if woken is None else [woken], [], [], seconds)
        for parts in received(self._query):
            yield from ((frame, False) for frame in self._state(parts))
        found = False
        for parts in received(self._stream):
            found = True
            frame = self._decode(parts)
            if frame is not None:
                self.over |= isinstance(frame.message, RunState) and frame.message.is_over
                yield frame, True
        self._ask()
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + _CHECK_SECONDS
            self.over = self.over or (not found and self._abandoned())

    def report(self, target: str, dropped: int, error: str) -> None:
        """Send the exporter's state to the hub, if due; see ``ExporterState``. Never waits."""
        now = time.monotonic()
        if error == self._reported and now < self._next_report:
            return
        self._reported, self._next_report = error, now + _REPORT_SECONDS
        state = ExporterState(target, time.time(), dropped, self.dropped, error)
        frames = wire.encode(f"exporter-{target}-{os.getpid()}", self._reports + 1, time.time(), state)
        try:
            self._telemetry.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            return
        self._reports += 1

    def _decode(self, parts: list[bytes]) -> Frame | None:
        if len(parts) != 2:
            return None
        try:
            header = wire.decode_header(parts[0])
            missed = header.seq - self._last_seq - 1
            if missed:
                self._must_ask = True
                self.dropped += max(0, missed) if self._last_seq and not wire.is_leap(missed) else 0
            self._last_seq = header.seq
            message = wire.decode_body(parts[1])
        except ProtocolError:
            return None
        return None if message is None else Frame(header.seq, header.t, message)

    def _ask(self) -> None:
        asked, sent = self._asked
        now = time.monotonic()
        if not self._must_ask or (asked and now - sent < _ANSWER_SECONDS):
            return
        number = secrets.token_hex(8)
        query = Query(number, "state_at", {"t": time.time() + _LATER_SECONDS})
        try:
            self._query.send_multipart(wire.encode("exporter", 0, time.time(), query), zmq.NOBLOCK)
        except zmq.ZMQError:
            return
        self._asked, self._must_ask = (number, now), False

    def _state(self, parts: list[bytes]) -> list[Frame]:
        try:
            answer = wire.decode_answer(parts)
            if not isinstance(answer, Answer) or answer.id != self._asked[0]:
                return []
            self._asked = ("", 0.0)
            if answer.ok:
                return decode_answer("state_at", answer.data)
        except ProtocolError:
            pass
        self._must_ask = True
        return []

    def _abandoned(self) -> bool:
        try:
            launched = self._launcher is not None and is_alive(self._launcher)
            return not launched and self._run.living_hub() is None
        except FtmonError:
            return True
