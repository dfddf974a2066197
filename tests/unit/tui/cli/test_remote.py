"""Addresses and keys of runs on other hosts."""

from argparse import Namespace

import pytest
from ftmon.protocol.errors import UsageError
from ftmon.protocol.link import keys
from ftmon.protocol.messages.control import RunState
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.run.rundir import ExitFile, RunDir
from ftmon.tui.cli.main import main
from ftmon.tui.cli.remote import parse_address, read_server_key, watch_remote
from ftmon.tui.source.live import LiveSource
from streams import RUN, Stream, write


def test_an_address_gives_a_port_for_each_channel_and_a_key_is_taken_as_it_is_or_from_a_file(tmp_path):
    found = parse_address("tcp://gpu7:7420")
    assert (found["telemetry"], len(set(found.values()))) == ("tcp://gpu7:7420", 6)
    assert parse_address("tcp://[::1]:7420")["ranks"] == "tcp://[::1]:7421"
    for text in ("tcp://gpu7", "tcp://gpu7:0", "tcp://gpu7:65534", "tcp://:7420", "tcp://a b:1"):
        with pytest.raises(UsageError, match="must be tcp://HOST:PORT"):
            parse_address(text)
    public = keys.make_pair().public
    file = tmp_path / "hub.json"
    file.write_text(f'{{\n  "read_only": false,\n  "server_key": "{public}"\n}}\n')
    assert read_server_key(public) == public
    assert read_server_key(str(file)) == public
    (tmp_path / "empty").write_text("nothing here")
    for key, words in ((None, "needs --key"), ("none", "neither a public key"), ("empty", "no public key")):
        with pytest.raises(UsageError, match=words):
            read_server_key(key and str(tmp_path / key))


def test_keys_are_let_in_and_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FTMON_HOME", str(tmp_path))
    public = keys.make_pair().public
    assert main(["keys", f"--allow={public}", "--remark", "the laptop"]) == 0
    assert f"{public}  the laptop" in capsys.readouterr().out
    assert main(["keys", f"--remove={public}"]) == 0
    assert "no other key" in capsys.readouterr().out


@pytest.mark.parametrize(("told", "code", "status"), [(True, -9, 137), (False, 0, 1)], ids=["connected", "not"])
def test_a_run_watched_from_elsewhere_ends_with_the_training_s_status_or_without_a_connection_too(
    tmp_path, monkeypatch, capsys, told, code, status
):
    monkeypatch.setattr("ftmon.tui.cli.remote.CONNECT_SECONDS", 200.0)
    run = RunDir(tmp_path / RUN.id)
    run.path.mkdir(mode=0o700)
    run.write_run(RUN)
    run.write_exit(ExitFile(code, RUN.created, "failed" if code else "finished"))
    frames = list(Stream(ranks=1, steps=8, finished=False).frames())
    end = Frame(frames[-1].seq + 1, frames[-1].t, RunState("failed", frames[-1].t, "killed by SIGKILL", code))
    write(run.recording, [*frames, end] if told else frames)
    arguments = Namespace(plain=True, ascii=True, read_only=False)
    assert watch_remote(LiveSource(run), arguments, [], lambda: UsageError("no answer")) == status
    lines = capsys.readouterr().out.splitlines()
    assert any(" step " in line for line in lines)
    assert "attach again" not in lines[-1]
