"""``ftmon attach ssh://``: a run seen, asked and killed through OpenSSH's client and a real SSH server."""

import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest
from eventually import SECONDS, eventually
from ftmon.protocol.errors import UsageError
from ftmon.protocol.messages import control
from ftmon.protocol.messages.telemetry import Step
from ftmon.tui.cli.main import parse
from ftmon.tui.cli.remote import attach_ssh, command, parse_place
from ftmon.tui.source.live import LiveSource
from ftmon.tui.source.ssh import SshEndpoint
from ftmon_process import command_line
from hub_client import App, exit_of, fake_ranks, hub_gone, started
from ssh_server import SshServer

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs OpenSSH's client")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshServer]:
    """An SSH server on a port of this host."""
    monkeypatch.setenv("FTMON_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FTMON_REMOTE", f"{shlex.quote(sys.executable)} -m ftmon.tui.cli")
    with SshServer(tmp_path) as server:
        monkeypatch.setenv("FTMON_SSH", server.client)
        yield server


def pumped(source: LiveSource, condition: Callable[[], object]) -> None:
    eventually(condition, "what was to be shown", each=lambda: source.pump(0.05), state=lambda: source.connection)


@contextmanager
def followed(address: str) -> Generator[tuple[SshEndpoint, LiveSource]]:
    with closing(SshEndpoint(command(parse_place(address)))) as endpoint:
        endpoint.open()
        with closing(LiveSource(endpoint=endpoint, info=endpoint.info)) as source:
            source.start()
            yield endpoint, source


def relays() -> list[psutil.Process]:
    """List the relays that this process has started and that live."""
    return [child for child in psutil.Process().children(recursive=True) if "relay" in command_line(child)]


def test_a_run_is_followed_commanded_and_found_again_over_ssh(server):
    with started(fake_ranks({"rank": 0, "rate": 20}, {"rank": 1, "rate": 20})) as run:
        with App(run) as app:
            app.wait_for(Step, lambda step: step.step > 5)
        with followed(f"{server.url}/{run.id}") as (endpoint, source):
            assert endpoint.info.id == run.id
            pumped(source, lambda: source.connection.state == "live")
            pumped(source, lambda: len(source.model.ranks) == 2 and source.model.step > 5)
            assert source.connection.state == "live"
            assert source.model.info.command
            (relay,) = relays()
            endpoint._next = math.inf  # no other connection before the loss of this one was seen
            relay.kill()
            pumped(source, lambda: source.connection.state == "hub-gone")
            assert "connection" in source.connection.text
            endpoint._next = 0.0
            pumped(source, lambda: source.connection.state == "live")
            seen = source.model.leading_step
            pumped(source, lambda: source.model.leading_step > seen + 5)
            sent = source.send(control.Kill())
            pumped(source, lambda: source.commands[sent].result is not None)
            result = source.commands[sent].result
            assert result.ok, result.text
            pumped(source, lambda: source.model.ended)
            pumped(source, lambda: source.connection.state == "ended")
        eventually(lambda: not relays(), "the end of the relay")


def test_a_run_that_ends_while_there_is_no_connection_is_over_and_not_tried_again(server):
    with started(fake_ranks({"rank": 0, "rate": 20})) as run, followed(server.url) as (_, source):
        pumped(source, lambda: source.connection.state == "live" and source.model.step > 5)
        (relay,) = relays()
        relay.suspend()  # it cannot report the end
        source.send(control.Kill())
        exit_of(run)
        hub_gone(run)
        relay.kill()
        pumped(source, lambda: source.connection.state == "ended")
        assert str(run.recording) in source.connection.text


def test_an_interrupt_while_connecting_leaves_no_folder(server, monkeypatch):
    monkeypatch.setenv("FTMON_REMOTE", "cat >&2;")  # until the connection ends
    words = [sys.executable, "-m", "ftmon.tui.cli", "attach", "--plain", server.url]
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is too long for the socket of the connection
        monkeypatch.setenv("TMPDIR", folder)
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as attached:
            eventually(lambda: list(Path(folder).glob("ftmon-ssh-*/control")), "the connection")
            attached.send_signal(signal.SIGINT)
            assert attached.wait(SECONDS) == 130
        assert not list(Path(folder).glob("ftmon-ssh-*"))


def test_who_leaves_is_told_how_to_come_back_to_that_very_run(server):
    with started(fake_ranks({"rank": 0, "rate": 20})) as run:
        with App(run) as app:
            app.wait_for(Step, lambda step: step.step > 5)
        words = [sys.executable, "-m", "ftmon.tui.cli", "attach", "--plain", server.url]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as attached:
            assert attached.stdout is not None
            assert next(line for line in attached.stdout if " step " in line)
            attached.send_signal(signal.SIGINT)
            *_, last = attached.stdout
            assert attached.wait(SECONDS) == 130
        assert last == f"{run.id} continues; attach again: ftmon attach {server.url}/{run.id}\n"


def test_a_server_that_does_not_forward_sockets_is_named(server):
    server.forwards = False
    with started(fake_ranks({"rank": 0, "rate": 20})) as run:
        with pytest.raises(UsageError, match="does not forward UNIX sockets; set 'AllowStreamLocalForwarding yes'"):
            attach_ssh(parse(["attach", "--plain", f"{server.url}/{run.id}"]))
        eventually(lambda: not relays(), "the end of the relay")


def test_what_the_users_configuration_adds_neither_fails_nor_outlives_it(server, tmp_path, monkeypatch):
    config = tmp_path / "config"
    config.write_text(
        "Host *\n  ControlMaster auto\n  ControlPersist yes\n"
        f"  ControlPath {tmp_path}/%C\n  LocalForward 127.0.0.1:{server.port} 127.0.0.1:1\n"  # a port that is taken
    )
    monkeypatch.setenv("FTMON_SSH", server.client.replace("-F none", f"-F {config}"))
    with started(fake_ranks({"rank": 0, "rate": 20})) as run:
        with closing(SshEndpoint(command(parse_place(f"{server.url}/{run.id}")))) as endpoint:
            assert endpoint.open().id == run.id
            hub = endpoint.hub()
            folder = str(Path(hub.addresses["query"].removeprefix("ipc://")).parent)
            assert ssh_with(folder)
        eventually(lambda: not ssh_with(folder), "the end of ssh")
        eventually(lambda: not relays(), "the end of the relay")


def ssh_with(folder: str) -> list[psutil.Process]:
    """List the processes whose words or titles name a folder of local sockets, daemons included."""
    return [process for process in psutil.process_iter() if folder in " ".join(command_line(process))]


@pytest.mark.parametrize(
    ("address", "remote", "words"),
    [
        ("ssh://127.0.0.1:1", "", "127.0.0.1: ssh: connect to host 127.0.0.1 port 1: Connection refused"),
        ("URL", "/no/such/ftmon", "no 'ftmon' there on the PATH of a command"),
        ("URL/none", "", "no runs in "),
        ("URL", """echo '{"ftmon":"9","protocol":[9,0],"id":"x"}'; cat; true""", "speaks protocol 9.0"),
        (
            "URL",
            """echo '{"ftmon":"0","protocol":[1,0],"id":"x"}'; cat; true""",
            "of another version: install the same",
        ),
        ("URL", f"{shlex.quote(sys.executable)} -m ftmon.tui.cli not-a-", "has no command 'relay'"),
        ("ssh://-oProxyCommand=x", "", "must be ssh://"),
        ("ssh://there:99999", "", "must be ssh://"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(server, address, remote, words, monkeypatch):
    if remote:
        monkeypatch.setenv("FTMON_REMOTE", remote)
    with tempfile.TemporaryDirectory() as folder:  # another suite's connections have folders in the common one
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with pytest.raises(UsageError, match=re.escape(words)) as error:
            attach_ssh(parse(["attach", "--plain", address.replace("URL", server.url)]))
        assert "\n" not in str(error.value)
        assert not list(Path(folder).glob("ftmon-ssh-*"))
