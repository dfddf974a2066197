"""The hub's sockets over TCP."""

import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest
import zmq
from eventually import eventually
from ftmon.protocol.errors import UsageError
from ftmon.protocol.link import keys, sockets
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import Command


@pytest.fixture
def loopback() -> str:
    """The IPv6 loopback address, as it stands in an address of ZeroMQ."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error.strerror}")
    return "[::1]"


@pytest.mark.parametrize("name", ["loopback", "127.0.0.1", "localhost"])
def test_a_rank_reaches_the_hub_at_any_kind_of_address(
    name: str, request: pytest.FixtureRequest, context: "zmq.Context[Any]"
) -> None:
    host = request.getfixturevalue(name) if name == "loopback" else name
    with sockets.hub_socket(context, "telemetry") as hub, sockets.peer_socket(context, "telemetry") as rank:
        sockets.bind(hub, f"tcp://{host}:*")
        port = hub.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        rank.connect(f"tcp://{host}:{port}")
        rank.send(b"a step")
        assert hub.poll(200_000)
        assert hub.recv() == b"a step"


def test_whether_an_address_is_bound_is_seen_without_a_message(context: "zmq.Context[Any]", tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/telemetry"
    assert not sockets.is_listening(address)
    socket = context.socket(zmq.PULL)
    socket.bind(address)
    assert sockets.is_listening(address)
    socket.unbind(address)
    eventually(lambda: not sockets.is_listening(address), "the end of the socket")


REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


@pytest.mark.usefixtures("private_home")
def test_nobody_comes_in_where_no_authenticator_guards_the_server(context: "zmq.Context[Any]") -> None:
    server, made = keys.make_pair(), sockets.hub_socket(context, "control")
    sockets.secure_server(made, server)
    sockets.bind(made, "tcp://127.0.0.1:*")
    client = sockets.peer_socket(context, "control")
    watch = client.get_monitor_socket(REFUSALS)
    sockets.secure_client(client, keys.client_pair(), server.public)
    client.connect(made.getsockopt_string(zmq.LAST_ENDPOINT))
    with contextlib.suppress(zmq.Again):  # refused already: then there is nobody to send it to
        client.send_multipart(wire.encode("app", 1, 0.0, Command(id="1", verb="ping")), zmq.NOBLOCK)
    assert watch.poll(200_000), "the connection was not refused"
    assert not made.poll(100)


def test_a_server_key_that_is_none_and_a_taken_port_are_refused_in_words(context: "zmq.Context[Any]") -> None:
    client = sockets.peer_socket(context, "control")
    with pytest.raises(UsageError, match=r"not a hub's public key.*hub\.json"):
        sockets.secure_client(client, keys.make_pair(), "abc")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1:{port}: already in use; choose another port"):
            sockets.bind(sockets.hub_socket(context, "control"), f"tcp://127.0.0.1:{port}")
