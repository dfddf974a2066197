"""The hub's sockets over TCP."""

import contextlib
import os
import socket
import stat
from pathlib import Path

import pytest
import zmq
from eventually import eventually
from ftmon.protocol.errors import RunDirError, UsageError
from ftmon.protocol.link import keys, sockets
from ftmon.protocol.link.sockets import read_join
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import Command
from ftmon.protocol.run import rundir
from ftmon.protocol.run.environment import JOIN_ENV, monitor_environment
from ftmon.protocol.run.rundir import RunDir, RunOptions
from ftmon.trainer.host.sockets import parse_listen
from ftmon.trainer.launch.environment import free_listen, job_environment, joined_environment, prepare
from ftmon.trainer.probe.link.output import read_options


@pytest.fixture
def loopback() -> str:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error.strerror}")
    return "[::1]"


@pytest.mark.parametrize("name", ["loopback", "127.0.0.1", "localhost"])
def test_a_rank_reaches_the_hub_at_any_kind_of_address(name, request, context):
    host = request.getfixturevalue(name) if name == "loopback" else name
    with sockets.hub_socket(context, "telemetry") as hub, sockets.peer_socket(context, "telemetry") as rank:
        sockets.bind(hub, f"tcp://{host}:*")
        port = hub.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        rank.connect(f"tcp://{host}:{port}")
        rank.send(b"a step")
        assert hub.poll(200_000)
        assert hub.recv() == b"a step"


def test_whether_an_address_is_bound_is_seen_without_a_message(context, tmp_path):
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
def test_nobody_comes_in_where_no_authenticator_guards_the_server(context):
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


def test_a_server_key_that_is_none_and_a_taken_port_are_refused_in_words(context):
    client = sockets.peer_socket(context, "control")
    with pytest.raises(UsageError, match=r"not a hub's public key.*hub\.json"):
        sockets.secure_client(client, keys.make_pair(), "abc")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1:{port}: already in use; choose another port"):
            sockets.bind(sockets.hub_socket(context, "control"), f"tcp://127.0.0.1:{port}")


@pytest.fixture
def run(private_home: Path) -> RunDir:
    return rundir.create("two", ["deepspeed", "train.py"], "run", RunOptions(on_oom="hold", listen="0.0.0.0:7420"))


def test_the_file_tells_where_the_hub_is_with_a_key_for_agents_alone_and_the_environment_only_names_it(run):
    path = prepare(run, "0.0.0.0:7420")
    join = read_join(path)
    assert (join.run, join.host, join.port) == (str(run.path), os.uname().nodename, 7420)
    assert join.addresses
    assert not [address for address in join.addresses if address.startswith("127.")]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert join.secret not in repr(join)
    assert prepare(run, "10.1.2.3:7500") == path
    assert read_join(path).addresses == ["10.1.2.3"]
    environment = job_environment(run, {"PATH": "/bin"})
    secret = read_join(path).secret
    assert environment[JOIN_ENV] == str(path)
    assert secret not in str(environment)
    exported = Path(environment["DS_ENV_FILE"]).read_text()
    assert f"FTMON_JOIN={path}\n" in exported
    assert secret not in exported
    assert '"' not in exported, "a quote does not survive a remote shell"
    assert JOIN_ENV not in monitor_environment(environment)


def test_a_file_that_others_can_read_is_refused(run, tmp_path):
    path = prepare(run, "0.0.0.0:7420")
    path.chmod(0o644)
    with pytest.raises(RunDirError, match="chmod 600"):
        read_join(path)
    link = tmp_path / "link.json"
    link.symlink_to(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_join(link)
    with pytest.raises(UsageError, match=r"copy join\.json"):
        read_join(tmp_path / "none.json")


def test_a_further_host_gets_the_same_marks_and_options(run, tmp_path, monkeypatch):
    path = prepare(run, "0.0.0.0:7420").rename(tmp_path / "join.json")
    environment = joined_environment(path, read_join(path), {"PATH": "/bin"})
    assert environment["FTMON_RUN"] == str(run.path)
    assert environment[JOIN_ENV] == str(tmp_path / "join.json")
    assert "inject" in environment["PYTHONPATH"]
    monkeypatch.setenv("FTMON_RUN", "/not/at/hand/there")
    monkeypatch.setenv(JOIN_ENV, str(path))
    assert read_options() == run.read_run().options
    path.write_text("damaged")
    assert read_options() == RunOptions()
    assert parse_listen(free_listen()).host == "0.0.0.0"
