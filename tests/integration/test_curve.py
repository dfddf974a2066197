"""CURVE over real TCP: who is on the list comes in, nobody else does, and an eavesdropper reads nothing."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from ftmon.protocol.errors import UsageError
from ftmon.protocol.link import keys, sockets
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import Command

REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)
LONG = 200_000
"""Milliseconds."""
SECRET = "the-word-an-eavesdropper-looks-for"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTMON_HOME", str(tmp_path))


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Iterator["zmq.Context[Any]"]:
    made: zmq.Context[Any] = zmq.Context()
    begun: list[Any] = []
    start = keys.start_authenticator
    monkeypatch.setattr(keys, "start_authenticator", lambda *args: begun.append(start(*args)))
    yield made
    for authenticator in begun:  # first, or its thread finds its sockets gone
        authenticator.stop()
    made.destroy(linger=0)


def hub(context: "zmq.Context[Any]", pair: keys.KeyPair, *, guarded: bool = True) -> tuple["zmq.Socket[Any]", str]:
    if guarded:
        keys.start_authenticator(context)
    made = sockets.hub_socket(context, "control")
    sockets.secure_server(made, pair)
    sockets.bind(made, "tcp://127.0.0.1:*")
    return made, made.getsockopt_string(zmq.LAST_ENDPOINT)


def app(context: "zmq.Context[Any]", address: str, pair: keys.KeyPair, server_key: str) -> "zmq.Socket[Any]":
    made = sockets.peer_socket(context, "control")
    sockets.secure_client(made, pair, server_key)
    made.connect(address)
    made.send_multipart(wire.encode("app", 1, time.time(), Command(id=SECRET, verb="ping")))
    return made


def test_nobody_comes_in_where_nobody_guards_the_server(context: "zmq.Context[Any]") -> None:
    """Who has no key on the list, or a wrong one of the server, is in test_strangers."""
    server = keys.make_pair()
    made, address = hub(context, server, guarded=False)
    client = sockets.peer_socket(context, "control")
    watch = client.get_monitor_socket(REFUSALS)
    sockets.secure_client(client, keys.client_pair(), server.public)
    client.connect(address)
    with contextlib.suppress(zmq.Again):  # refused already: then there is nobody to send it to
        client.send_multipart(wire.encode("app", 1, 0.0, Command(id="1", verb="ping")), zmq.NOBLOCK)
    assert watch.poll(LONG), "the connection was not refused"
    assert not made.poll(100)


def test_an_eavesdropper_reads_nothing(context: "zmq.Context[Any]") -> None:
    server = keys.make_pair()
    made, address = hub(context, server)
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        inner = ("127.0.0.1", int(address.rpartition(":")[2]))
        thread = threading.Thread(target=relay, args=(listener, inner, heard), daemon=True)
        thread.start()
        client = app(context, f"tcp://127.0.0.1:{listener.getsockname()[1]}", keys.client_pair(), server.public)
        assert made.poll(LONG)
        sender, *frames = made.recv_multipart()
        made.send_multipart([sender, *frames])
        assert client.poll(LONG)
        assert SECRET.encode() in client.recv_multipart()[1]
        assert len(heard) > 200
        assert SECRET.encode() not in heard
        assert b"ping" not in heard
        assert keys.client_pair().secret.encode() not in heard


def relay(listener: socket.socket, target: tuple[str, int], heard: bytearray) -> None:
    """Pass one connection on, both ways, and keep what was said."""
    near, _ = listener.accept()
    far = socket.create_connection(target)

    def pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                heard.extend(data)
                sink.sendall(data)
        except OSError:
            return

    back = threading.Thread(target=pump, args=(far, near), daemon=True)
    back.start()
    pump(near, far)
    near.close()
    far.close()


def test_a_server_key_that_is_none_is_refused_in_words(context: "zmq.Context[Any]") -> None:
    client = sockets.peer_socket(context, "control")
    with pytest.raises(UsageError, match=r"not a hub's public key.*hub\.json"):
        sockets.secure_client(client, keys.make_pair(), "abc")


def test_a_taken_port_is_refused_in_words(context: "zmq.Context[Any]") -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1:{port}: already in use; choose another port"):
            sockets.bind(sockets.hub_socket(context, "control"), f"tcp://127.0.0.1:{port}")
