"""How the key of a run reaches its other hosts: through ssh and srun, here shell scripts in their place."""

import os
import signal
import stat

from ftmon.protocol.link.sockets import join_path, read_join
from ftmon.protocol.run.rundir import MultiHost
from ftmon.trainer.launch import environment
from ftmon.trainer.launch.environment import prepare, push

SSH = """\
#!/bin/sh
# Runs the command here, with {other} in place of the run's own directory's parent.
for word; do last=$word; done
case "$*" in *" broken "*) echo "ssh: connect to host broken: No route to host" >&2; exit 255 ;; esac
echo "$*" >> {log}
sh -c "$(echo "$last" | sed 's|{runs}|{other}|g')"
"""


def test_hosts_that_share_no_files_are_given_the_key_over_sshs_input(run, tmp_path):
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
    assert "-p 2222 -- there" in log.read_text(), "a name in a hostfile is no option of ssh"
    assert not read_join(path).pushed, "the file of a shared directory was replaced"


def test_where_the_directory_is_shared_the_file_stays(run, tmp_path):
    path = prepare(run, "0.0.0.0:7420")
    program = tmp_path / "ssh"
    program.write_text('#!/bin/sh\nfor word; do last=$word; done\nsh -c "$last"\n')
    program.chmod(0o755)
    assert push(run, MultiHost(["there"]), {"PATH": os.environ["PATH"], "FTMON_SSH": str(program)}) == []
    assert not read_join(join_path(run)).pushed
    assert path.exists()


def test_a_host_that_hangs_holds_up_neither_the_launcher_nor_the_other_hosts(run, tmp_path, monkeypatch):
    prepare(run, "0.0.0.0:7420")
    program, got = tmp_path / "ssh", tmp_path / "got"
    # As ssh does with ControlPersist, both leave a child behind that holds their error output.
    program.write_text(
        f"#!/bin/sh\nsleep 600 &\necho $! >> {tmp_path}/pids\n"
        f'case "$*" in *" hangs "*) exec sleep 600 ;; esac\ncat > {got}; exit 0\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(environment, "_PUSH_SECONDS", 12.0)  # in which the host that answers has done so
    environ = {"PATH": os.environ["PATH"], "FTMON_SSH": str(program)}
    try:
        problems = push(run, MultiHost(["hangs", "there"]), environ)
        assert problems == ["hangs was not given the run's key over ssh (no answer in 12 s)"]
        assert b'"pushed": true' in got.read_bytes()
    finally:
        for pid in (tmp_path / "pids").read_text().split():
            os.kill(int(pid), signal.SIGKILL)


def test_in_a_slurm_job_srun_brings_the_key_to_every_node(run, tmp_path):
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
