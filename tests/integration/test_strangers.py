"""Whoever is not the run's user, or not let in, gets nothing: on loopback, over TCP, by replay, by a planted folder."""

import contextlib
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from eventually import SECONDS, eventually
from ftmon.protocol.errors import RunDirError
from ftmon.protocol.host.process import ProcessId, start_ticks
from ftmon.protocol.link import keys
from ftmon.protocol.link.sockets import peer_socket, secure_client
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import Accepted, Command, Result
from ftmon.protocol.run import rundir
from ftmon.protocol.run.rundir import HubFile, RunDir, RunOptions
from ftmon_process import Ftmon
from hub_client import App, hub_of
from ports import listen_address


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("home")
    before = os.environ.get("FTMON_HOME")
    os.environ["FTMON_HOME"] = str(path)
    yield path
    os.environ.pop("FTMON_HOME") if before is None else os.environ.update(FTMON_HOME=before)


def start_hub(run: RunDir) -> "subprocess.Popen[bytes]":
    hub = subprocess.Popen([sys.executable, "-P", "-m", "ftmon.trainer.hub", str(run.path)], stderr=subprocess.PIPE)
    eventually(lambda: run.living_hub() is not None or hub.poll() is not None, "the hub's start")
    return hub


def end_hub(hub: "subprocess.Popen[bytes]") -> None:
    hub.terminate()
    hub.wait(SECONDS)


@pytest.fixture(scope="module")
def listening(home: Path) -> Iterator[RunDir]:
    """A run whose hub also listens on TCP."""
    run = rundir.create("open", ["true"], "watch", RunOptions(listen=listen_address()))
    # Without a launcher that lives, the hub would leave when a minute has brought no rank.
    launcher = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = ProcessId(launcher.pid, start_ticks(launcher.pid) or 0)
    run.write_run(msgspec.structs.replace(run.read_run(), launcher=process))
    hub = start_hub(run)
    yield run
    end_hub(hub)
    launcher.kill()
    launcher.wait()


def place(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def commands(run: RunDir) -> list[Command]:
    with App(run) as app:
        return [frame.message for frame in app.history() if isinstance(frame.message, Command)]


def test_a_run_that_was_not_told_to_listen_is_on_no_network(home):
    run = rundir.create("closed", ["true"], "watch")
    hub = start_hub(run)
    try:
        assert psutil.Process(hub.pid).net_connections("inet") == []
        assert all(address.startswith("ipc://") for address in hub_of(run).addresses.values())
        assert run.path.stat().st_mode & 0o077 == 0
    finally:
        end_hub(hub)


STRANGE = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + bytes(48) + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER",
    os.urandom(4096),
    b"",
)


def test_a_stranger_on_loopback_gets_no_word_out_of_it(listening):
    lines: list[socket.socket] = []
    for address in hub_of(listening).listen.values():
        for words in STRANGE:
            lines.append(socket.create_connection(place(address), timeout=SECONDS))
            lines[-1].sendall(words)
    deadline = time.monotonic() + 1.5
    heard = dict.fromkeys(lines, b"")
    while lines and (left := deadline - time.monotonic()) > 0:
        for line in select.select(lines, [], [], left)[0]:
            try:
                piece = line.recv(4096)
            except OSError:
                piece = b""
            heard[line] += piece
            if not piece:
                lines.remove(line)
    for line, words in heard.items():
        line.close()
        # The greeting of ZeroMQ (its version and the mechanism it asks for) is all there is.
        assert len(words) <= 64
        assert listening.id.encode() not in words
    with App(listening) as app:
        assert app.command("ping").ok


def knock(
    context: "zmq.Context[Any]", hub: HubFile, channel: str, pair: keys.KeyPair | None, server_key: str
) -> "zmq.Socket[Any]":
    """Come with a key, or without one, and ask for the worst."""
    line = peer_socket(context, channel)
    if pair is not None:
        secure_client(line, pair, server_key)
    line.connect(hub.listen[channel])
    if channel != "stream":
        with contextlib.suppress(zmq.Again):  # refused already: then there is nobody to send it to
            line.send_multipart(wire.encode("stranger", 1, time.time(), Command("x", "shutdown")), zmq.NOBLOCK)
    return line


def test_only_a_key_that_is_let_in_is_answered(listening, context):
    hub = hub_of(listening)
    stranger, friend = keys.make_pair(), keys.client_pair()
    wrong = {
        (channel, case): knock(context, hub, channel, pair, key)
        for channel in ("control", "query", "stream")
        for case, pair, key in (
            ("no key", None, ""),
            ("a stranger's key", stranger, hub.server_key),
            ("a wrong key of the hub", friend, keys.make_pair().public),
            ("the agents' key", keys.agent_pair(listening), hub.server_key),
        )
    }
    right = knock(context, hub, "stream", friend, hub.server_key)
    assert right.poll(int(SECONDS * 1000)), "the user's own key is let in"
    poller = zmq.Poller()
    for line in wrong.values():
        poller.register(line, zmq.POLLIN)
    answered = dict(poller.poll(1500))
    assert [case for case, line in wrong.items() if line in answered] == []
    assert commands(listening) == []


def test_who_may_watch_may_neither_run_code_nor_speak_for_a_rank(listening, context):
    hub = hub_of(listening)
    line = peer_socket(context, "control")
    secure_client(line, keys.client_pair(), hub.server_key)
    line.connect(hub.listen["control"])
    command = Command("c", "console", {"rank": 0, "code": "1"})
    line.send_multipart(wire.encode("app", 1, time.time(), command))
    assert line.poll(int(SECONDS * 1000))
    answer = wire.decode_body(line.recv_multipart()[1])
    assert isinstance(answer, Accepted)
    assert (answer.ok, "not over TCP" in answer.text) == (False, True)
    assert "telemetry" not in hub.listen, "what arrives there counts as sent by a process of the hub's host"
    for channel in ("ranks", "agents"):
        rank = peer_socket(context, channel, b"rank-0-1-1")
        watch = rank.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        secure_client(rank, keys.client_pair(), hub.server_key)
        rank.connect(hub.listen[channel])
        assert watch.poll(int(SECONDS * 1000)), f"{channel} let an app in"
        rank.disable_monitor()
        rank.close()


class Relay:
    """Passes one connection on to the hub and keeps what both sides said; ``again`` says the near side's last twice."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.said, self.answered = bytearray(), bytearray()
        self.last = b""
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._target = target
        self.far: socket.socket | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def again(self) -> None:
        self.far.sendall(self.last)

    def _run(self) -> None:
        near, _ = self._server.accept()
        self.far = socket.create_connection(self._target)
        threading.Thread(target=self._pump, args=(self.far, near, self.answered), daemon=True).start()
        self._pump(near, self.far, self.said)

    def _pump(self, source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
        try:
            while piece := source.recv(65536):
                kept += piece
                if kept is self.said:
                    self.last = piece
                sink.sendall(piece)
        except OSError:
            return


def test_what_was_said_is_read_by_no_eavesdropper_and_does_nothing_when_it_is_said_again(listening, context):
    hub = hub_of(listening)
    relay = Relay(place(hub.listen["control"]))
    line = peer_socket(context, "control")
    secure_client(line, keys.client_pair(), hub.server_key)
    line.connect(relay.address)
    line.send_multipart(wire.encode("app", 1, time.time(), Command("once", "stacks")))
    answers: list[Any] = []
    while not any(isinstance(answer, Result) for answer in answers):
        assert line.poll(int(SECONDS * 1000))
        answers.append(wire.decode_body(line.recv_multipart()[1]))
    assert isinstance(answers[0], Accepted)
    assert answers[0].id == "once"
    heard = bytes(relay.said + relay.answered)
    assert len(heard) > 200
    for secret in (b"once", b"stacks", keys.client_pair().secret.encode()):
        assert secret not in heard
    eventually(lambda: commands(listening), "the command in the recording")
    assert [command.id for command in commands(listening)] == ["once"]

    relay.again()  # the same sealed frame, within the connection
    assert not line.poll(1000)
    with socket.create_connection(place(hub.listen["control"]), timeout=SECONDS) as again:
        again.settimeout(1.0)
        heard = b""
        try:
            again.sendall(relay.said)  # all of it, in another one
            while piece := again.recv(4096):
                heard += piece
        except OSError:
            pass
    assert b"once" not in heard
    with App(listening) as app:
        assert app.command("ping").ok
    assert [command.id for command in commands(listening)] == ["once"]


@pytest.mark.parametrize("case", ["open to others", "a symbolic link", "another user's"])
def test_a_run_directory_that_others_could_have_made_is_refused_by_hub_and_commands(home, case):
    run = rundir.create("planted", ["true"], "watch")
    if case == "open to others":
        run.path.chmod(0o755)
    elif case == "a symbolic link":
        elsewhere = home / f"elsewhere-{run.id}"
        shutil.move(run.path, elsewhere)
        run.path.symlink_to(elsewhere)
    elif os.getuid() != 0:
        pytest.skip("only root can give a directory to somebody else")
    else:
        os.chown(run.path, 12345, 12345)
    words = {"open to others": "is open to other users", "a symbolic link": "is not a directory of its own",
             "another user's": "belongs to another user"}[case]  # fmt: skip
    try:
        hub = start_hub(run)
        assert hub.wait(SECONDS) != 0
        assert words in hub.stderr.read().decode()
        with pytest.raises(RunDirError, match=words):
            run.check()
        for command in (["kill", run.id, "--yes"], ["stacks", run.id], ["attach", run.id, "--plain"]):
            done = Ftmon(home).run(*command)
            assert done.returncode != 0, (command, done.stdout)
            assert words in done.stderr, command
    finally:
        run.path.unlink() if run.path.is_symlink() else shutil.rmtree(run.path)


def test_a_short_socket_directory_that_somebody_else_made_first_is_refused(home, monkeypatch):
    if os.getuid() != 0:
        pytest.skip("only root can give a directory to somebody else")
    deep = home / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("FTMON_HOME", str(deep))
    run = rundir.create("long", ["true"], "watch")
    twin = Path(run.ipc_address("control").removeprefix("ipc://")).parent
    assert twin.stat().st_mode & 0o077 == 0
    os.chown(twin, 12345, 12345)
    try:
        with pytest.raises(RunDirError, match="belongs to another user"):
            run.ipc_address("control")
    finally:
        twin.rmdir()
