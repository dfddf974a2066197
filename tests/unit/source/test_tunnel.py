"""The tunnel carries bytes as they are, and one connection that nobody reads holds up no other."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ftmon.tui.source.tunnel import WINDOW, Tunnel


class Pair:
    """Two ends, joined; what connects to ``address`` arrives at ``far``."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "near.sock")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.address)
        listener.listen(8)
        self.far = socket.socket(socket.AF_UNIX)
        self.far.bind(str(folder / "far.sock"))
        self.far.listen(8)
        self.far.settimeout(10)
        down, up = os.pipe(), os.pipe()

        def opener(channel: str) -> socket.socket:
            if channel != "stream":
                raise OSError("no such channel")
            made = socket.socket(socket.AF_UNIX)
            made.connect(str(folder / "far.sock"))
            return made

        self.near_end = Tunnel(down[0], up[1], {"stream": listener})
        self.far_end = Tunnel(up[0], down[1], opener=opener)
        self.near_end.start()
        self.far_end.start()

    def connect(self) -> tuple[socket.socket, socket.socket]:
        near = socket.socket(socket.AF_UNIX)
        near.settimeout(10)
        near.connect(self.address)
        far, _ = self.far.accept()
        far.settimeout(10)
        return near, far


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.near_end.stop()
    made.far_end.stop()
    made.near_end.join(5)
    made.far_end.join(5)
    assert not made.far_end.is_alive()


def receive(source: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count and (more := source.recv(65536)):
        data += more
    return bytes(data)


def test_bytes_go_both_ways_as_they_are(pair: Pair) -> None:
    near, far = pair.connect()
    sent = os.urandom(5 * WINDOW)
    thread = threading.Thread(target=far.sendall, args=(sent,), daemon=True)
    thread.start()
    assert receive(near, len(sent)) == sent
    near.sendall(b"and back")
    assert receive(far, 8) == b"and back"


def test_a_connection_that_nobody_reads_holds_up_no_other(pair: Pair) -> None:
    _unread, flood = pair.connect()
    flood.settimeout(0.5)
    with pytest.raises(TimeoutError):
        flood.sendall(bytes(20 * WINDOW))
    near, far = pair.connect()
    far.sendall(b"a small answer")
    assert receive(near, 14) == b"a small answer"


def test_what_was_sent_before_the_end_arrives_before_the_end(pair: Pair) -> None:
    near, far = pair.connect()
    far.sendall(b"last words")
    far.close()
    assert receive(near, 100) == b"last words"
    assert near.recv(1) == b""


def test_the_end_of_the_pipe_ends_every_connection(pair: Pair) -> None:
    near, _far = pair.connect()
    pair.far_end.stop()
    assert near.recv(1) == b""
    pair.near_end.join(5)
    assert not pair.near_end.is_alive()


def test_what_is_no_frame_ends_the_tunnel(tmp_path: Path) -> None:
    down, up = os.pipe(), os.pipe()
    tunnel = Tunnel(down[0], up[1])
    tunnel.start()
    os.write(down[1], b"\xff" * 100)
    tunnel.join(5)
    assert not tunnel.is_alive()
