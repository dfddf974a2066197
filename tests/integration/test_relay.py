"""``ftmon attach ssh://``: a run seen, asked and killed through nothing but a relay's standard input and output."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from eventually import eventually
from ftmon.protocol.errors import UsageError
from ftmon.protocol.telemetry import Step
from ftmon.tui.cli.main import parse
from ftmon.tui.cli.ssh import RelayedSource, attach_ssh, commands, parse_place
from ftmon.tui.source.relayed import RelayedEndpoint
from hub_client import App, fake_ranks, started

STAND_IN = """\
#!/bin/sh
while :; do
  case "$1" in
    -o|-p|-l) shift 2 ;;
    --) shift; break ;;
    *) shift ;;
  esac
done
[ "$1" = nowhere ] && { echo "ssh: Could not resolve hostname nowhere: Name or service not known" >&2; exit 255; }
shift
echo "Welcome. You have mail."
exec sh -c "$*"
"""


@pytest.fixture(autouse=True)
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for ssh that runs the command here; what it runs is real."""
    program = tmp_path / "ssh"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    monkeypatch.setenv("FTMON_SSH", str(program))
    monkeypatch.setenv("FTMON_REMOTE", f"{sys.executable} -m ftmon.tui.cli")
    monkeypatch.setenv("FTMON_HOME", str(tmp_path / "home"))


def pumped(source: RelayedSource, condition: Callable[[], object]) -> None:
    eventually(condition, "what was to be shown", each=lambda: source.pump(0.05), state=lambda: source.connection)


def relays() -> list[psutil.Process]:
    """List the relays that this process has started and that live."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found += [child] if "relay" in child.cmdline() else []
    return found


def test_a_run_is_followed_commanded_and_found_again_over_ssh() -> None:
    with started(fake_ranks({"rank": 0, "rate": 20}, {"rank": 1, "rate": 20})) as run:
        with App(run) as app:
            app.wait_for(Step, lambda step: step.step > 5)
        endpoint = RelayedEndpoint(*commands(parse_place(f"ssh://me@there:22/{run.id}")))
        assert endpoint.open().id == run.id
        source = RelayedSource(endpoint)
        source.start()
        try:
            pumped(source, lambda: len(source.model.ranks) == 2 and source.model.step > 5)
            assert source.connection.state == "live"
            assert source.model.info.command
            (relay,) = relays()
            relay.kill()
            pumped(source, lambda: source.connection.state == "hub-gone")
            assert "connection" in source.connection.text
            pumped(source, lambda: source.connection.state == "live")
            seen = source.model.leading_step
            pumped(source, lambda: source.model.leading_step > seen + 5)
            sent = source.send("kill")
            pumped(source, lambda: source.commands[sent].result is not None)
            result = source.commands[sent].result
            assert result is not None
            assert result.ok, result.text
            pumped(source, lambda: source.model.ended)
            pumped(source, lambda: source.connection.state == "ended")
        finally:
            source.close()
        assert not relays()


def test_who_leaves_is_told_how_to_come_back_to_that_very_run() -> None:
    with started(fake_ranks({"rank": 0, "rate": 20})) as run:
        with App(run) as app:
            app.wait_for(Step, lambda step: step.step > 5)
        words = [sys.executable, "-m", "ftmon.tui.cli", "attach", "--plain", "ssh://me@there:22"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as attached:
            assert attached.stdout is not None
            assert next(line for line in attached.stdout if " step " in line)
            attached.send_signal(signal.SIGINT)
            *_, last = attached.stdout
            assert attached.wait(20) == 130
        assert last == f"{run.id} continues; attach again: ftmon attach ssh://me@there:22/{run.id}\n"


@pytest.mark.parametrize(
    ("address", "remote", "words"),
    [
        ("ssh://nowhere", "", "nowhere: ssh: Could not resolve hostname"),
        ("ssh://there", "/no/such/ftmon", "no 'ftmon' there on the PATH of a command"),
        ("ssh://there/none", "", "there: no runs in "),
        ("ssh://there", """echo '{"ftmon":"9","protocol":[9,0],"id":"x"}'; cat; true""", "speaks protocol 9.0"),
        ("ssh://there", "echo usage: invalid choice: >&2; exit 2 #", "has no command 'relay'"),
        ("ssh://-oProxyCommand=x", "", "must be ssh://"),
        ("ssh://there:99999", "", "must be ssh://"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    address: str, remote: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if remote:
        monkeypatch.setenv("FTMON_REMOTE", remote)
    with pytest.raises(UsageError, match=words.replace("[", r"\[").replace("(", r"\(")) as error:
        attach_ssh(parse(["attach", "--plain", address]))
    assert "\n" not in str(error.value)


def test_nothing_is_left_of_a_relay_that_never_began(tmp_path: Path) -> None:
    before = set(os.listdir("/tmp"))
    with pytest.raises(UsageError):
        attach_ssh(parse(["attach", "--plain", "ssh://nowhere"]))
    assert not [name for name in set(os.listdir("/tmp")) - before if name.startswith("ftmon-relay-")]
