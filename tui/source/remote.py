"""Reads a run's history through the hub's query channel, with the methods of the recording's reader."""

import secrets
import time
from collections.abc import Callable
from typing import Any

import zmq

from ...protocol.errors import HubError, RecordingError
from ...protocol.link.sockets import peer_socket
from ...protocol.messages import wire
from ...protocol.messages.control import Alert, Answer, Query
from ...protocol.messages.wire import Frame
from ...protocol.recording.phase_peaks import PeakMark
from ...protocol.recording.results import MemoryColumn, RecordingInfo, StepPoint, TrainingPoint, decode_answer

TIMEOUT_S = 10.0
"""Time limit of an answer, seconds; a hub on a slow disk needs that long."""

_POLL_MS = 50


class RemoteReader:
    """A ``Reader`` at the other end of a query socket. Use it from one thread.

    ``cancelled`` is polled while waiting; True cancels the query.
    """

    def __init__(
        self,
        context: "zmq.Context[Any]",
        address: str,
        timeout_s: float = TIMEOUT_S,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._context = context
        self._address = address
        self._timeout_s = timeout_s
        self._cancelled = cancelled
        self._socket: zmq.Socket[Any] | None = None
        self._asked = 0

    def info(self) -> RecordingInfo:
        return self._ask("info")

    def frames(self, after_seq: int, limit: int, until_t: float | None = None) -> list[Frame]:
        return self._ask("frames", after_seq=after_seq, limit=limit, until_t=until_t)

    def state_at(self, t: float) -> list[Frame]:
        return self._ask("state_at", t=t)

    def memory(self, t0: float, t1: float, columns: int) -> list[MemoryColumn]:
        return self._ask("memory", t0=t0, t1=t1, columns=columns)

    def series(self, rank: int, t0: float, t1: float, limit: int) -> list[StepPoint]:
        return self._ask("series", rank=rank, t0=t0, t1=t1, limit=limit)

    def training(self, rank: int, t0: float, t1: float, limit: int) -> list[TrainingPoint]:
        return self._ask("training", rank=rank, t0=t0, t1=t1, limit=limit)

    def alerts(self, t0: float | None = None, t1: float | None = None) -> list[Alert]:
        return self._ask("alerts", t0=t0, t1=t1)

    def logs(
        self, before_seq: int | None = None, rank: int | None = None, text: str = "", limit: int = 500
    ) -> list[Frame]:
        return self._ask("logs", before_seq=before_seq, rank=rank, text=text, limit=limit)

    def marks(self) -> list[PeakMark]:
        return self._ask("marks")

    def sampled(self, kind: str, rank: int, limit: int = 240) -> list[Frame]:
        return self._ask("sampled", kind=kind, rank=rank, limit=limit)

    def jobs(self) -> list[Frame]:
        return self._ask("jobs")

    def step_time(self, step: int) -> float | None:
        return self._ask("step_time", step=step)

    def seq_at(self, t: float) -> int:
        return self._ask("seq_at", t=t)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _ask(self, name: str, **args: Any) -> Any:
        """Send a query and return the decoded answer.

        Raises:
            HubError: no answer in time.
            RecordingError: the hub answered with an error.
            ProtocolError: the answer is invalid.
        """
        self._asked += 1
        query = Query(f"{secrets.token_hex(4)}-{self._asked}", name, args)
        deadline = time.monotonic() + self._timeout_s
        try:
            self._connect()
            self._send(wire.encode("app", self._asked, time.time(), query), deadline)
            answer = self._receive(query.id, deadline)
        except zmq.ZMQError as error:  # the context ends, and its users with it
            self.close()
            raise HubError(f"the hub cannot be asked: {error.strerror}") from None
        except HubError:
            self.close()  # a late answer must not be mistaken for that of a later query
            raise
        if not answer.ok:
            raise RecordingError(answer.error)
        return decode_answer(name, answer.data)

    def _connect(self) -> None:
        if self._socket is None:
            self._socket = peer_socket(self._context, "query")
            # A query to a hub that is gone must not be queued and reach the next hub.
            self._socket.setsockopt(zmq.IMMEDIATE, 1)
            self._socket.connect(self._address)

    def _send(self, frames: list[bytes], deadline: float) -> None:
        socket = self._socket
        assert socket is not None
        while not socket.poll(_POLL_MS, zmq.POLLOUT):
            self._give_up(deadline)
        socket.send_multipart(frames, zmq.NOBLOCK)

    def _receive(self, query_id: str, deadline: float) -> Answer:
        socket = self._socket
        assert socket is not None
        while True:
            while not socket.poll(_POLL_MS):
                self._give_up(deadline)
            frames = socket.recv_multipart()
            if len(frames) != 2:
                continue
            wire.decode_header(frames[0])
            answer = wire.decode_body(frames[1])
            if isinstance(answer, Answer) and answer.id == query_id:
                return answer

    def _give_up(self, deadline: float) -> None:
        if self._cancelled():
            raise HubError("no longer asked")
        if time.monotonic() > deadline:
            raise HubError(f"the hub did not answer within {self._timeout_s:.0f} s")
