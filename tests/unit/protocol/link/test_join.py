"""What another host is given to join a run, and how."""

import os
import stat
from pathlib import Path

import pytest
from ftmon.protocol.errors import RunDirError, UsageError
from ftmon.protocol.link.join import read_join
from ftmon.protocol.run import rundir
from ftmon.protocol.run.environment import JOIN_ENV, monitor_environment
from ftmon.protocol.run.rundir import RunDir, RunOptions
from ftmon.trainer.host.sockets import parse_listen
from ftmon.trainer.launch.environment import free_listen, job_environment, joined_environment, prepare
from ftmon.trainer.probe.link.output import read_options


@pytest.fixture
def run(private_home: Path) -> RunDir:
    return rundir.create("two", ["deepspeed", "train.py"], "run", RunOptions(on_oom="hold", listen="0.0.0.0:7420"))


def test_the_file_tells_where_the_hub_is_and_holds_a_key_for_agents_alone(run: RunDir) -> None:
    path = prepare(run, "0.0.0.0:7420")
    join = read_join(path)
    assert (join.run, join.host, join.port) == (str(run.path), os.uname().nodename, 7420)
    assert join.addresses
    assert not [address for address in join.addresses if address.startswith("127.")]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert join.secret not in repr(join)
    assert prepare(run, "10.1.2.3:7500") == path
    assert read_join(path).addresses == ["10.1.2.3"]


def test_a_file_that_others_can_read_is_refused(run: RunDir, tmp_path: Path) -> None:
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


def test_the_environment_names_the_file_and_never_holds_the_key(run: RunDir) -> None:
    path = prepare(run, "0.0.0.0:7420")
    environment = job_environment(run, {"PATH": "/bin"})
    secret = read_join(path).secret
    assert environment[JOIN_ENV] == str(path)
    assert secret not in str(environment)
    exported = Path(environment["DS_ENV_FILE"]).read_text()
    assert f"FTMON_JOIN={path}\n" in exported
    assert secret not in exported
    assert '"' not in exported, "a quote does not survive a remote shell"
    assert JOIN_ENV not in monitor_environment(environment)


def test_a_further_host_gets_the_same_marks_and_options(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = prepare(run, "0.0.0.0:7420").rename(tmp_path / "join.json")
    join = read_join(path)
    environment = joined_environment(path, join, {"PATH": "/bin"})
    assert environment["FTMON_RUN"] == str(run.path)
    assert environment[JOIN_ENV] == str(tmp_path / "join.json")
    assert "inject" in environment["PYTHONPATH"]
    monkeypatch.setenv("FTMON_RUN", "/not/at/hand/there")
    monkeypatch.setenv(JOIN_ENV, str(path))
    assert read_options() == run.read_run().options
    path.write_text("damaged")
    assert read_options() == RunOptions()
    assert parse_listen(free_listen()).host == "0.0.0.0"
