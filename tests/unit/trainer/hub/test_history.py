"""Answers to history queries, by the real thread and a recording."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from ftmon.protocol.link.sockets import hub_socket, peer_socket
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import Answer, Query
from ftmon.protocol.messages.telemetry import LogLine
from ftmon.protocol.messages.wire import Frame
from ftmon.trainer.hub.history import MOST, HistoryServer
from streams import write

Ask = Callable[..., Answer]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    # A garbage collection in the server's thread counts as its processor time.
    monkeypatch.setattr("ftmon.protocol.recording.opening.time", SimpleNamespace(thread_time=lambda: 0.0))
    lines = (Frame(seq, 100.0 + seq, LogLine(0, 100.0, "out", "a line")) for seq in range(1, MOST + 100))
    recording = write(tmp_path / "recording.sqlite", lines, commit_every=MOST)
    with zmq.Context() as context:
        socket, app = hub_socket(context, "query"), peer_socket(context, "query")
        socket.bind("inproc://query")
        app.connect("inproc://query")
        server = HistoryServer([socket], recording, threading.Event.set)
        server.start()

        def query(name: str, **args: Any) -> Answer:
            app.send_multipart(wire.encode("test", 1, time.time(), Query("1", name, args)))
            assert app.poll(200_000)
            answer = wire.decode_body(app.recv_multipart()[1])
            assert isinstance(answer, Answer)
            return answer

        yield query
        app.close()
        server.stop()


@pytest.mark.parametrize("limit", [MOST + 50, -1, 1e9, float("inf"), float("nan")])
def test_one_answer_is_bounded_whatever_number_is_asked_for(ask: Ask, limit: float) -> None:
    answer = ask("frames", limit=limit)
    assert answer.ok, answer.error
    assert len(msgspec.msgpack.decode(answer.data, type=list[Frame])) == MOST


@pytest.mark.parametrize("limit", ["9", None, [1]])
def test_a_limit_that_is_no_number_is_refused(ask: Ask, limit: Any) -> None:
    answer = ask("frames", limit=limit)
    assert not answer.ok
    assert "limit must be a number" in answer.error
