"""The remote reader answers what the recording's own reader answers, and says so when nobody does."""

import contextlib
import threading

import pytest
import zmq
from ftmon.protocol.errors import HubError, RecordingError
from ftmon.protocol.link import sockets
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import Answer, Query
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run.rundir import RunDir
from ftmon.tui.source.ssh import RemoteReader
from small_hub import SmallHub
from streams import Stream


def test_every_query_answers_as_the_file_does(run: RunDir, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    frames = list(Stream(ranks=2, steps=80).frames())
    with SmallHub(run) as hub:
        for frame in frames:
            hub.put(frame.message, frame.t)
        remote = RemoteReader(context, run.ipc_address("query"), timeout_s=200)
        info = remote.info()
        t, first = frames[len(frames) // 2].t, frames[0].t
        with Reader(run.recording) as local:
            assert info == local.info()
            assert remote.frames(10, 50) == local.frames(10, 50)
            assert remote.frames(10, 50, t) == local.frames(10, 50, t)
            assert remote.state_at(t) == local.state_at(t)
            assert remote.memory(first, t, 40) == local.memory(first, t, 40)
            assert remote.alerts() == local.alerts()
            assert remote.logs(rank=1, text="step", limit=5) == local.logs(rank=1, text="step", limit=5)
            assert remote.step_time(40) == local.step_time(40)
            assert remote.step_time(999) is None
            assert remote.seq_at(t) == local.seq_at(t)
        remote.close()


def test_a_hub_that_does_not_answer_or_an_address_nobody_listens_at_is_given_up_on(run, context):
    remote = RemoteReader(context, run.ipc_address("query"), timeout_s=0.2)
    with pytest.raises(HubError, match="did not answer"):
        remote.info()
    remote.close()
    silent = sockets.hub_socket(context, "query")
    sockets.bind(silent, run.ipc_address("query"))
    remote = RemoteReader(context, run.ipc_address("query"), timeout_s=0.2)
    with pytest.raises(HubError, match="did not answer"):
        remote.info()
    remote.close()


def test_who_no_longer_waits_gets_away_at_once(run: RunDir, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    leaving = threading.Event()
    remote = RemoteReader(context, run.ipc_address("query"), timeout_s=600, cancelled=leaving.is_set)
    threading.Timer(0.2, leaving.set).start()
    with pytest.raises(HubError):
        remote.info()
    remote.close()


def test_a_late_answer_does_not_meet_a_later_question(run: RunDir, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    """The first question is given up on; the hub answers it only when the second one has come."""
    hub = sockets.hub_socket(context, "query")
    sockets.bind(hub, run.ipc_address("query"))
    came = threading.Event()

    def serve() -> None:
        first = hub.recv_multipart()
        came.set()
        for number, (peer, _, body) in enumerate([first, hub.recv_multipart()]):
            query = wire.decode_body(body)
            assert isinstance(query, Query)
            answer = Answer(query.id, True, data=bytes([7 + number]))
            with contextlib.suppress(zmq.ZMQError):  # who gave up may have closed its socket
                hub.send_multipart([peer, *wire.encode("hub", 0, 0.0, answer)])

    server = threading.Thread(target=serve)
    server.start()
    # Given up on when it is there, and not after a time: it might not have been sent by then.
    remote = RemoteReader(context, run.ipc_address("query"), timeout_s=200, cancelled=came.is_set)
    with pytest.raises(HubError):
        remote.seq_at(1.0)
    came.clear()
    assert remote.seq_at(2.0) == 8
    server.join(timeout=10)
    remote.close()


def test_a_refusal_is_told_in_the_hubs_words(run: RunDir, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    with SmallHub(run):
        remote = RemoteReader(context, run.ipc_address("query"), timeout_s=200)
        with pytest.raises(RecordingError):
            remote._ask("frames", after="x")
        remote.close()
