"""``ftmon cleanup`` on the other host of a run: what cannot be told apart from a host that is cut off is left alone."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from eventually import eventually
from ftmon.protocol.link.sockets import CHANNELS, JoinFile, read_join, write_join
from ftmon.protocol.run import rundir
from ftmon.protocol.run.environment import JOIN_ENV, RUN_ENV
from ftmon.protocol.run.rundir import ExitFile, RunDir
from ftmon.trainer.host.end import cleanup
from ftmon.trainer.launch.environment import prepare


@pytest.fixture
def hub() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture
def join(tmp_path: Path, hub: socket.socket, monkeypatch: pytest.MonkeyPatch) -> JoinFile:
    """What another host's run brought here: its file, in a directory of the same name."""
    monkeypatch.setenv("FTMON_HOME", str(tmp_path / "there"))
    run = rundir.create("two", ["train.py"], "run")
    made = read_join(prepare(run, "127.0.0.1:7420"))
    here = RunDir(tmp_path / "here" / run.id)
    here.path.mkdir(mode=0o700, parents=True)
    first = hub.getsockname()[1] - CHANNELS.index("agents")
    made = msgspec.structs.replace(made, run=str(here.path), host="nodea", port=first)
    write_join(here, made)
    return made


@pytest.fixture
def rank(join: JoinFile) -> Iterator["subprocess.Popen[bytes]"]:
    environment = {**os.environ, RUN_ENV: join.run, JOIN_ENV: f"{join.run}/join.json"}
    words = [sys.executable, "-c", "input()"]  # until this test is over, however that comes
    with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE) as process:
        mark, environ = f"{RUN_ENV}={join.run}".encode(), Path(f"/proc/{process.pid}/environ")
        eventually(lambda: mark in environ.read_bytes().split(b"\0"), "the program's start")
        yield process
        process.kill()


def orphans(join: JoinFile) -> list[cleanup.Orphan]:
    return [orphan for orphan in cleanup.find() if orphan.run == join.run]


def test_ranks_are_orphans_once_their_hub_does_not_answer_and_ended_only_if_asked(join, rank, hub, monkeypatch, capsys):
    assert orphans(join) == []
    hub.close()
    (found,) = orphans(join)
    monkeypatch.setattr(cleanup, "find", lambda: [found])  # of all that runs on this machine, ours alone
    assert (found.pid, found.sure, found.why) == (rank.pid, False, "whose hub on nodea does not answer")
    assert cleanup.main(["--yes"]) == 0
    text = capsys.readouterr().out
    assert found.line in text
    assert "1 left alone, as that host may only be cut off; --elsewhere ends these too" in text
    assert rank.poll() is None
    assert cleanup.main(["--yes", "--elsewhere"]) == 0
    assert "ended 1 of 1" in capsys.readouterr().out
    assert rank.wait(20) != 0


def test_on_a_shared_file_system_the_end_of_the_run_tells(join, rank):
    run = RunDir(join.run)
    there = rundir.create("other", ["train.py"], "run").read_run()
    run.write_run(msgspec.structs.replace(there, host="nodea"))
    run.write_exit(ExitFile(1, time.time(), "failed"))
    assert orphans(join) == [], "its agents have a moment to end what is left"
    run.write_exit(ExitFile(1, time.time() - 300, "failed"))
    (found,) = orphans(join)
    assert (found.why, found.sure) == ("which failed", True)


def test_a_run_whose_directory_cannot_be_looked_up_is_passed_over(monkeypatch):
    def refuse(_path: Path) -> bool:  # root on a file system that squashes root
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    assert cleanup.orphan_reason(RunDir("/home/somebody/run")).why == ""
