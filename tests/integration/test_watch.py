"""``ftmon watch``: real ranks that were started without ftmon."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from eventually import eventually
from ftmon.protocol.host.process import is_alive, this_process
from ftmon.protocol.messages.telemetry import Hello, Step
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run import rundir
from ftmon.protocol.run.start import spawn_hub
from ftmon.trainer.recipe.hardware import free_port
from ftmon_process import Ftmon
from hub_client import SCRIPTS


@pytest.fixture
def launcher(home: Ftmon):
    """Start torchrun with two ranks, which it would start again once."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--master-port", str(free_port()), str(SCRIPTS / "foreign_ranks.py")]
    with subprocess.Popen(command, env=home.environ, start_new_session=True) as process:
        yield process
        for each in [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []:
            each.kill()
        process.kill()


def below(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    return [each for each in psutil.Process(process.pid).children(recursive=True) if each.is_running()]


def test_a_hang_of_foreign_ranks_is_named_and_killed_without_orphans(home: Ftmon, launcher) -> None:
    eventually(lambda: any("time.sleep" in " ".join(each.cmdline()) for each in below(launcher)), "the hang", every=0.5)
    family = below(launcher)
    done = home.run("watch", "--detach", str(launcher.pid))
    assert done.returncode == 0, done.stderr
    assert "2 ranks found" in done.stdout
    assert ("losses, steps: start with ftmon run" in done.stdout) == (sys.version_info < (3, 14))
    run = home.newest()

    def hung() -> list[str]:
        alerts = home.status(run.id)["alerts"] if run.recording.exists() else []
        return [alert["title"] for alert in alerts if alert["kind"] == "hang"]

    (title,) = eventually(hung, "the hang", every=2.0)
    assert title.startswith("rank 1")
    assert "foreign_ranks.py" in title
    assert "in fetch_labels" in title
    answer = json.loads(home.run("stacks", run.id, "--json").stdout)
    assert {tuple(group["ranks"]) for group in answer["groups"]} == {(0,), (1,)}

    again = home.run("watch", "--detach", str(family[0].pid))
    assert run.id in again.stdout, "the same run: it is not watched twice"
    hub = run.read_hub()
    os.kill(hub.process.pid, signal.SIGTERM)
    eventually(lambda: not is_alive(hub.process), "the end of the hub")
    assert all(each.is_running() for each in family), "the end of the watch left the run alone"

    killed = home.run("kill", run.id, "--yes")
    assert killed.returncode == 0, killed.stdout + killed.stderr
    assert "nothing is left of the run" in killed.stdout
    assert launcher.wait(200) != 0
    assert not [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    with Reader(run.recording) as reader:
        found = len({each.rank for each in (f.message for f in reader.frames(0, 10_000)) if isinstance(each, Hello)})
        assert found == 2


def test_the_probe_begins_inside_a_running_loop(home: Ftmon, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FTMON_HOME", str(home.home))
    run = rundir.create("loop", ["loop.py"], "watch")
    with (run.logs / "hub.log").open("ab") as log:
        hub = spawn_hub(run, log)
    report = tmp_path / "report.txt"
    done = subprocess.run([sys.executable, str(SCRIPTS / "attached_loop.py"), str(run.path), str(report)], check=False)
    assert (done.returncode, hub.wait(200)) == (0, 0)
    assert float(report.read_text()) > 0
    with Reader(run.recording) as reader:
        steps = [each for each in (f.message for f in reader.frames(0, 10_000)) if isinstance(each, Step)]
    assert len(steps) >= 20
    assert {"forward", "backward", "optimizer"} >= {phase.name for phase in steps[-1].phases} - {"idle"}
    assert steps[-1].phase("optimizer") is not None
    assert steps[-1].loss is not None


@pytest.mark.skipif(not hasattr(sys, "remote_exec"), reason="needs Python 3.14")
def test_on_python_3_14_the_probe_is_injected(home: Ftmon, spawn) -> None:
    loop = "import torch, time, sys\np = torch.nn.Parameter(torch.zeros(2)); o = torch.optim.SGD([p], lr=0.1)\n"
    loop += "print('ready', flush=True)\nwhile True: p.sum().backward(); o.step(); time.sleep(0.01)"
    done = home.run("watch", "--detach", str(spawn(loop).pid))
    assert "the probe was injected" in done.stdout, done.stdout + done.stderr
    run = home.newest()
    eventually(lambda: run.recording.exists() and home.status(run.id)["step"] > 5, "steps", every=1.0)


def test_a_process_that_does_not_train_is_refused_in_one_line(home: Ftmon) -> None:
    done = home.run("watch", str(this_process().pid))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
