"""A host's agent with pretended ranks: another host in name only, so that the rest can be tried quickly."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from eventually import eventually
from ftmon.protocol.messages.control import HubStats
from ftmon.protocol.messages.hosts import HostState
from ftmon.protocol.messages.telemetry import DeviceSample, LogLine, Step
from ftmon.protocol.run.rundir import RunDir
from ftmon_process import command_line
from hub_client import App, exit_of, fake_ranks, hub_gone, hub_of, started
from ports import listen_address


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTMON_HOME", str(tmp_path))
    refused = "no unshare here"
    if shutil.which("unshare"):
        tried = subprocess.run(["unshare", "-Ur", "--uts", "hostname", "nodeb"], capture_output=True, text=True)
        refused = tried.stderr.strip()
    if refused:
        pytest.skip(f"a host of another name cannot be made here: {refused}")


@contextmanager
def elsewhere(*ranks: dict[str, Any]) -> Iterator[RunDir]:
    """Start a run whose ranks find themselves on ``nodeb``."""
    words = " ".join(f"'{word}'" for word in fake_ranks(*ranks))
    setting = f"hostname nodeb && export WORLD_SIZE={len(ranks)}"
    job = ["unshare", "-Ur", "--uts", "sh", "-c", f"{setting} && exec {words}"]
    with started(job, listen=listen_address(), logs=True) as run:
        try:
            yield run
        finally:
            for pid in agents(run):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def agents(run: RunDir) -> list[int]:
    lines = {process.pid: command_line(process) for process in psutil.process_iter()}
    return [pid for pid, words in lines.items() if "ftmon.trainer.agent" in words and str(run.path) in " ".join(words)]


def test_ranks_elsewhere_are_watched_by_one_agent_asked_and_killed_and_nothing_is_left() -> None:
    with elsewhere({"rank": 0, "rate": 50, "workers": 1, "deaf": True}, {"rank": 1, "rate": 50, "deaf": True}) as run:
        with App(run) as app:
            for rank in (0, 1):
                app.wait_for(Step, lambda step, rank=rank: step.rank == rank and step.step > 5)
            app.told(HostState, lambda host: host.host == "nodeb" and host.ranks == [0, 1])
            app.wait_for(DeviceSample, lambda sample: sample.host == "nodeb" and len(sample.processes) == 2)
            assert len(agents(run)) == 1
            stacks = app.command("stacks")
            assert stacks.ok, stacks.text
            assert sorted(stacks.data["answers"]) == ["0", "1"]
            # Its launcher asks rank 0 to end, which is deaf: the job is not over before the second kill.
            killed = app.command("kill", ranks=[1])
            assert killed.ok, killed.text
            assert killed.data["hosts"]["nodeb"]["signal"] == "SIGKILL"
            result = app.command("kill")
            assert result.ok, result.text
            assert "On nodeb: " in result.text
        assert exit_of(run).state == "stopped"
        hub_gone(run)
        eventually(lambda: not agents(run), "the agent's end")
        place = run.of_host("nodeb")
        assert not list(place.path.glob("*.sock"))
        assert not place.path.joinpath("agent.lock").exists()
        assert place.rank_log(0, "out").exists(), "the ranks' whole output stays"


def test_a_hub_that_is_killed_comes_back_to_its_agents_without_a_step_lost_or_told_twice() -> None:
    with elsewhere({"rank": 0, "rate": 50}) as run:
        with App(run) as app:
            app.wait_for(Step, lambda step: step.step > 20)
            app.told(LogLine, lambda line: line.rank == 0)
            first = app.hub.process
        os.kill(first.pid, signal.SIGKILL)
        eventually(lambda: (hub := run.living_hub()) is not None and hub.process != first, "another hub")
        with App(run) as app:
            assert hub_of(run).process != first
            step = app.wait_for(Step).step
            app.wait_for(Step, lambda later: later.step > step + 50)
            begun = app.hub.started
            app.told(HostState, lambda host: (host.state, host.ranks) == ("reachable", [0]) and host.time >= begun)
            app.wait_for(HubStats, lambda stats: stats.time > time.time() - 1)
            assert app.of(HubStats)[-1].lost == {}
            steps = [frame.message.step for frame in app.history() if isinstance(frame.message, Step)]
            assert steps == list(range(1, len(steps) + 1))
            assert app.command("kill").ok
        exit_of(run)
