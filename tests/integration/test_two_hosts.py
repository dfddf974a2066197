"""One training on two hosts: watched, one host cut off and joined again, a rank on the other host killed."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from eventually import eventually
from ftmon.protocol.link.sockets import join_path, read_join
from ftmon.protocol.messages.control import Alert, RankState
from ftmon.protocol.messages.hosts import HostState
from ftmon.protocol.messages.telemetry import DeviceSample, Hello, LogLine, Step
from ftmon.protocol.run.rundir import RunDir
from ftmon_process import command_line
from hub_client import SCRIPTS, App, exit_of
from two_hosts import NODES, TwoHosts, two_hosts

pytest.importorskip("deepspeed")

CHEAP = {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE")}
"""What makes five imports of torch cheaper (``tests/conftest.py``)."""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    try:
        with two_hosts(tmp_path, home) as made:
            yield made
    except RuntimeError as error:
        pytest.skip(f"two hosts cannot be made of namespaces here: {error}")


def start(hosts: TwoHosts) -> RunDir:
    (hosts.folder / "hostfile").write_text("".join(f"{name} slots=1\n" for name in NODES))
    settings = {"STEPS": "20000", "PAUSE": "0.03", "STAGE": "0", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "eth0"}
    settings |= {name: CHEAP[name] for name in CHEAP if name != "PYTHONPATH"}  # which the launcher exports itself
    (hosts.folder / ".deepspeed_env").write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    job = ["deepspeed", "--hostfile", "hostfile", "--master_addr", NODES["nodea"], str(SCRIPTS / "deepspeed_loop.py")]
    environ = {"FTMON_HOME": str(hosts.private), "DS_ACCELERATOR": "cpu", **CHEAP}
    started = hosts.on_a("ftmon", "run", "--detach", "--", *job, **environ)
    _, errors = started.communicate(timeout=200)
    assert started.returncode == 0, errors
    (path,) = (hosts.private / "runs").iterdir()
    return RunDir(path)


def orphans_on_b(hosts: TwoHosts) -> list[dict[str, Any]]:
    there = hosts.on_b("ftmon", "cleanup", "--json")
    output, errors = there.communicate(timeout=200)
    assert there.returncode == 0, errors
    return json.loads(output)


def command_lines() -> str:
    return "\n".join(word for process in psutil.process_iter() for word in command_line(process))


def test_a_training_on_two_hosts_is_watched_cut_joined_and_killed(hosts: TwoHosts) -> None:
    run = start(hosts)
    with App(run) as app:
        assert app.told(Hello, lambda hello: hello.rank == 0, 400).host == "nodea"
        assert app.told(Hello, lambda hello: hello.rank == 1, 400).host == "nodeb"
        app.wait_for(Step, lambda step: step.rank == 1 and step.step >= 3)
        app.wait_for(DeviceSample, lambda sample: sample.host == "nodeb" and bool(sample.processes))
        app.wait_for(LogLine, lambda line: line.rank == 1 and line.text.startswith("loss"))
        secret = read_join(join_path(run)).secret
        assert secret not in command_lines(), "the key is on a command line"
        assert secret not in (run.logs / "launcher.log").read_text()
        assert orphans_on_b(hosts) == []

        hosts.cable("down")
        app.wait_for(HostState, lambda host: host.state == "cut off" and host.ranks == [1])
        app.wait_for(RankState, lambda state: state.rank == 1 and state.state == "unreachable")
        app.wait_for(Alert, lambda alert: (alert.kind, alert.evidence["rule"]) == ("hang", "unreachable"))
        orphans = orphans_on_b(hosts)
        assert orphans
        assert {(one["why"], one["sure"]) for one in orphans} == {("whose hub on nodea does not answer", False)}
        hosts.cable("up")
        back = app.wait_for(HostState, lambda host: host.state == "reachable" and host.since > host_cut(app))
        assert back.dropped == 0
        last = max(step.step for step in app.of(Step))
        app.wait_for(Step, lambda step: step.rank == 1 and step.step > last + 2)
        app.wait_for(Alert, lambda alert: alert.kind == "hang" and alert.resolved is not None)
        assert not [state for state in app.of(RankState) if state.rank == 1 and state.state == "hung"]
        steps = [frame.message.step for frame in app.history() if is_step_of(frame.message, 1)]
        assert steps == list(range(1, len(steps) + 1)), "a step of the host that was cut off is missing"

        agent = hosts.kill_on_b("ftmon.trainer.agent")
        app.wait_for(
            HostState, lambda host: host.state == "reachable" and host.since > back.since and host.ranks == [1]
        )
        eventually(lambda: app.answers("stacks", ranks=[1]), "an answer of rank 1 by way of the other agent")
        app.wait_for(Step, lambda step: step.rank == 1 and step.step > steps[-1] + 10)
        assert hosts.kill_on_b("ftmon.trainer.agent", 0) != agent, "no rank started another agent"

        result = app.command("kill", ranks=[1])
        assert result.ok, result.text
        assert result.text.startswith("On nodeb: "), result.text
        assert result.data["ranks"] == [1]
        assert 1 in result.data["stacks_saved"]
        exit_of(run)
    eventually(lambda: not hosts.processes_on_b(), f"the end of {hosts.processes_on_b()}")
    left = subprocess.run([*hosts.enter_b(), "ls", str(run.path)], capture_output=True, text=True, timeout=200).stdout
    assert left.split() == ["hosts"], "the key was left behind"


def host_cut(app: App) -> float:
    return next(host.since for host in app.of(HostState) if host.state == "cut off")


def is_step_of(message: object, rank: int) -> bool:
    return isinstance(message, Step) and message.rank == rank
