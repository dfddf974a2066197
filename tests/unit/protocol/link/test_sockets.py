"""The hub's sockets over TCP."""

import socket
from pathlib import Path
from typing import Any

import pytest
import zmq
from eventually import eventually
from ftmon.protocol.link import sockets


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
