"""What another host is given to join a run, and how."""

import os
import stat
from pathlib import Path

import pytest
from ftmon.protocol import run_store
from ftmon.protocol.environment import monitor_environment
from ftmon.protocol.errors import RunDirError, UsageError
from ftmon.protocol.join import JOIN_ENV, join_path, read_join
from ftmon.protocol.run_options import MultiHost, RunOptions
from ftmon.protocol.rundir import RunDir
from ftmon.trainer.host.listen import parse_listen
from ftmon.trainer.launch.environment import job_environment, joined_environment
from ftmon.trainer.launch.join import free_listen, prepare, push
from ftmon.trainer.probe.link.options import read_options

SSH = """\
#!/bin/sh
# Runs the command here, with {other} in place of the run's own directory's parent.
for word; do last=$word; done
case "$*" in *" broken "*) echo "ssh: connect to host broken: No route to host" >&2; exit 255 ;; esac
echo "$*" >> {log}
sh -c "$(echo "$last" | sed 's|{runs}|{other}|g')"
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("FTMON_HOME", str(tmp_path / "home"))
    return run_store.create("two", ["deepspeed", "train.py"], "run", RunOptions(on_oom="hold", listen="0.0.0.0:7420"))


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


def test_hosts_that_share_no_files_are_given_the_key_over_sshs_input(run: RunDir, tmp_path: Path) -> None:
    path = prepare(run, "0.0.0.0:7420")
    other, log, program = tmp_path / "other", tmp_path / "log", tmp_path / "ssh"
    program.write_text(SSH.format(other=other, log=log, runs=run.path.parent))
    program.chmod(0o755)
    environ = {"PATH": os.environ["PATH"], "FTMON_SSH": str(program)}
    problems = push(run, MultiHost([os.uname().nodename, "there", "broken"], 2222), environ)
    assert problems == ["broken was not given the run's key over ssh (ssh: connect to host broken: No route to host)"]
    copy = other / run.id / "join.json"
    assert read_join(copy).secret == read_join(path).secret
    assert read_join(copy).pushed
    assert stat.S_IMODE(copy.parent.stat().st_mode) == 0o700
    assert read_join(path).secret not in log.read_text()
    assert "-p 2222 there" in log.read_text()
    assert not read_join(path).pushed, "the file of a shared directory was replaced"


def test_where_the_directory_is_shared_the_file_stays(run: RunDir, tmp_path: Path) -> None:
    path = prepare(run, "0.0.0.0:7420")
    program = tmp_path / "ssh"
    program.write_text('#!/bin/sh\nfor word; do last=$word; done\nsh -c "$last"\n')
    program.chmod(0o755)
    assert push(run, MultiHost(["there"]), {"PATH": os.environ["PATH"], "FTMON_SSH": str(program)}) == []
    assert not read_join(join_path(run)).pushed
    assert path.exists()


def test_in_a_slurm_job_srun_brings_the_key_to_every_node(run: RunDir, tmp_path: Path) -> None:
    path = prepare(run, "0.0.0.0:7420")
    other, log = tmp_path / "other", tmp_path / "log"
    program = tmp_path / "srun"
    there = f"sed 's|{run.path.parent}|{other}|g'"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\nfor word; do last=$word; done\nsh -c "$(echo "$last" | {there})"\n'
    )
    program.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert push(run, MultiHost(slurm_nodes=3), environ) == []
    copy = read_join(other / run.id / "join.json")
    assert (copy.secret, copy.pushed) == (read_join(path).secret, True)
    assert "--overlap --nodes=3 --ntasks=3 --ntasks-per-node=1" in log.read_text()
    assert copy.secret not in log.read_text()
    program.write_text("#!/bin/sh\necho srun: error: Invalid job id >&2\nexit 1\n")
    (problem,) = push(run, MultiHost(slurm_nodes=3), environ)
    assert problem == "the job's nodes were not given the run's key by srun (srun: error: Invalid job id)"


def test_free_ports_are_found() -> None:
    assert parse_listen(free_listen()).host == "0.0.0.0"
