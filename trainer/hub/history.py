"""Commits the recording, and answers the apps' history queries in a separate thread with its own reader.

The main loop commits before a query is answered, so that the answer contains everything published before the query. An
app that subscribes first and then queries misses nothing.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import zmq

from ...protocol.analysis.findings.finding import Finding
from ...protocol.analysis.hub_facts import RemovedRecordingFacts
from ...protocol.errors import FtmonError, ProtocolError
from ...protocol.link.sockets import received
from ...protocol.messages import wire
from ...protocol.messages.control import Answer, Query
from ...protocol.recording.reader import Reader
from ...protocol.recording.results import answer_query
from ..host.loop import Post
from .agents import Agents
from .analyses import Analysis
from .telemetry import Stream


class Commits:
    """Commits the stream, and reports losses and errors of the disk. Main loop only, except ``then_set``.

    ``last_recorded`` is when the earlier hub's last message was recorded, or the run began, seconds since the epoch.
    """

    def __init__(
        self,
        stream: Stream,
        agents: Agents,
        analysis: Analysis,
        report: Callable[[], None],
        post: Post,
        last_recorded: float,
    ) -> None:
        self._stream = stream
        self._agents = agents
        self._analysis = analysis
        self._report = report
        self._post = post
        self._last_recorded = last_recorded
        self._unreported = False  # Whether messages lost between two hubs are not reported yet
        self._disk_trouble = False
        self._disk_notice = ""

    def missed(self, count: int) -> None:
        """Record the loss of ``count`` messages that an earlier hub had received or that were in flight to it."""
        self._stream.recorder.writer.lose(
            count, self._last_recorded, time.time(), "a hub ended before it had recorded them"
        )
        self._unreported = True

    def commit(self) -> None:
        """Commit the messages appended since the last call."""
        self._report_missed()
        numbers = self._agents.unconfirmed()
        self._stream.commit((lambda: self._post(lambda: self._agents.confirm(numbers))) if numbers else None)
        notice = self._stream.recorder.writer.notice
        if notice != self._disk_notice:
            self._disk_notice = notice
            self._analysis.put(Finding("recording_removed", RemovedRecordingFacts(notice), severity="error"))
        trouble = bool(self._stream.recorder.error)
        if trouble != self._disk_trouble:  # report at once, not with the next regular report
            self._disk_trouble = trouble
            self._report()

    def commit_all(self, seconds: float) -> None:
        """Commit, and wait at most ``seconds`` for the disk."""
        self.commit()
        written = threading.Event()
        self._stream.commit(written.set)
        written.wait(seconds)

    def commit_when_due(self) -> None:
        """Commit at once if too many messages are uncommitted to wait for the next tick."""
        if self._stream.waiting >= _ENOUGH_ROWS:
            self.commit()

    def then_set(self, done: threading.Event) -> None:
        """Commit everything published so far, then set the event; called by the history thread."""

        def commit() -> None:
            self._report_missed()
            self._stream.commit(done.set)

        self._post(commit)

    def _report_missed(self) -> None:
        """Report a loss in the transaction that records it, since this hub too may be killed at any moment."""
        if self._unreported:
            self._unreported = False
            self._report()


MOST = 5_000  # Maximum frames, points or columns in one answer; the app requests the rest with another query

_COMMIT_SECONDS = 5.0
_ENOUGH_ROWS = 4_000  # Uncommitted messages above which a commit is due at once, so that memory stays bounded
_POLL_MS = 500


class HistoryServer(threading.Thread):
    """Serves the query channel from bound ROUTER ``sockets``, which it owns from ``start`` on.

    ``request_commit`` gets an event to set once everything published so far is committed; any thread.
    """

    def __init__(
        self, sockets: "Sequence[zmq.Socket[Any]]", recording: Path, request_commit: Callable[[threading.Event], None]
    ) -> None:
        super().__init__(name="history", daemon=True)
        self._sockets = list(sockets)
        self._recording = recording
        self._request_commit = request_commit
        self._reader: Reader | None = None
        self._opened: tuple[int, int] | None = None
        self._ending = threading.Event()

    def stop(self) -> None:
        """End the thread and close its sockets."""
        self._ending.set()
        if self.is_alive():
            self.join(timeout=5)

    def run(self) -> None:
        """Answer queries until stopped."""
        poller = zmq.Poller()
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)
        while not self._ending.is_set():
            for socket, _ in poller.poll(_POLL_MS):
                self._serve(socket)
        for socket in self._sockets:
            socket.close()
        self._close_reader()

    def _there(self) -> tuple[int, int] | None:
        try:
            info = os.stat(self._recording)
        except OSError:
            return None
        return info.st_dev, info.st_ino

    def _close_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _serve(self, socket: "zmq.Socket[Any]") -> None:
        """Answer the waiting queries of one socket, after one commit for all of them."""
        waiting = list(islice(received(socket), 64))
        committed = threading.Event()
        self._request_commit(committed)
        committed.wait(_COMMIT_SECONDS)
        for frames in waiting:
            answer = self._answer(frames)
            # The app may have gone (EHOSTUNREACH), or not have read for long (EAGAIN).
            with contextlib.suppress(zmq.ZMQError):
                socket.send_multipart([frames[0], *wire.encode("hub", 0, time.time(), answer)], zmq.NOBLOCK)

    def _answer(self, frames: list[bytes]) -> Answer:
        if len(frames) != 3:
            return Answer("", False, error=f"a query has 3 frames, not {len(frames)}")
        try:
            wire.decode_header(frames[1])
            query = wire.decode_body(frames[2])
        except ProtocolError as error:
            return Answer("", False, error=str(error))
        if not isinstance(query, Query):
            return Answer("", False, error=f"the query channel takes queries, not {type(query).__name__}")
        try:
            if self._reader is not None and self._opened != self._there():
                self._close_reader()  # the file was replaced
            if self._reader is None:
                self._opened = self._there()
                self._reader = Reader(self._recording)
            return Answer(query.id, True, data=answer_query(self._reader, query.name, _bounded(query.args)))
        except Exception as error:  # a query must not end the thread that serves all apps
            if not isinstance(error, ProtocolError):
                self._close_reader()
            where = "" if isinstance(error, FtmonError) else f"{query.name}: {type(error).__name__}: "
            return Answer(query.id, False, error=f"{where}{error}")


def _bounded(args: dict[str, Any]) -> dict[str, Any]:
    """Limit a query's arguments to the size of one answer. Raises ``ProtocolError`` if a limit is no number."""
    asked = {name: args[name] for name in ("limit", "columns") if name in args}
    for name, number in asked.items():
        if not isinstance(number, int | float):
            raise ProtocolError(f"{name} must be a number, not {type(number).__name__}")
    return args | {name: number if 0 <= number <= MOST else MOST for name, number in asked.items()}
