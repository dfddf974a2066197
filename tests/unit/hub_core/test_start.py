"""What cannot be started is refused in one line before anything is made."""

import socket

import pytest
from ftmon.protocol import rundir
from ftmon.protocol.errors import UsageError
from ftmon.trainer import start
from ftmon.trainer.listen import check_free, parse_listen


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FTMON_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run"], "no command"),
        (["run", "--", "no-such-program-here"], "no-such-program-here: command not found"),
        (["run", "--listen", "nonsense", "--", "true"], "must be HOST:PORT"),
        (["run", "--listen", "127.0.0.1:99999", "--", "true"], "must be HOST:PORT"),
        (["run", "--allow-console", "--", "true"], "need --on-oom hold"),
        (["run", "--hold-timeout", "5", "--", "true"], "need --on-oom hold"),
        (["run", "--on-oom", "hold", "--hold-timeout", "nan", "--", "true"], "must be seconds"),
        (["run", "--on-oom", "hold", "--allow-console", "--read-only", "--", "true"], "runs nobody's code"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2_and_leaves_no_run(words, said, home, capsys):
    assert start.main(words) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert rundir.all_runs() == []


def test_a_script_that_is_not_executable_is_told_how_to_run_it(home, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    assert start.main(["run", "--", str(script)]) == 2
    assert f"python {script}" in capsys.readouterr().err


def test_a_taken_port_is_named(home, capsys):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert start.main(["run", "--listen", f"127.0.0.1:{port}", "--", "true"]) == 2
    assert f"port {port} cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["deepspeed", "--num_gpus", "2", "dir/train.py", "--x"], "train"),
        (["bash", "go.sh"], "go"),
        (["/usr/bin/env"], "env"),
    ],
)
def test_a_run_is_named_after_its_script(command, name):
    assert start.default_name(command) == name


def test_listen_gives_every_channel_a_port_of_its_own():
    addresses = parse_listen("127.0.0.1:7420").addresses()
    assert sorted(addresses.values()) == [f"tcp://127.0.0.1:{port}" for port in range(7420, 7426)]
    assert parse_listen(":7420").host == "0.0.0.0"
    assert parse_listen("[::1]:7420").addresses()["telemetry"] == "tcp://[::1]:7420"


def test_an_address_of_another_host_cannot_be_listened_on():
    with pytest.raises(UsageError, match="cannot be used"):
        check_free(parse_listen("192.0.2.1:7420"))
