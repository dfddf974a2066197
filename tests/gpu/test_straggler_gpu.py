"""Stragglers under NCCL: waiting happens on the device, inside DDP's reducer, and is measured between CUDA events."""

import sys
from pathlib import Path

import pytest
import torch
from eventually import eventually
from ftmon.protocol.errors import FtmonError
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run.rundir import RunDir
from ftmon_process import Ftmon, wait_until_nothing_is_left

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
SCRIPT = Path(__file__).parents[1] / "integration" / "scripts" / "straggler.py"


def start(home: Ftmon, library: str, where: str) -> RunDir:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    home.run("run", "--detach", "--", *torchrun, str(SCRIPT), library, where, "cuda", seconds=90)
    return home.newest()


def alerts(run: RunDir) -> list[Alert]:
    try:
        return [alert for alert in Reader(run.recording).alerts() if alert.kind == "slow"]
    except FtmonError:
        return []


def steps(run: RunDir) -> int:
    try:
        return Reader(run.recording).info().steps
    except FtmonError:
        return 0


def end(home: Ftmon, run: RunDir) -> list[Step]:
    home.run("kill", run.id, "--yes", seconds=90)
    wait_until_nothing_is_left(run)
    return [f.message for f in Reader(run.recording).frames(0, 100_000) if isinstance(f.message, Step)]


@pytest.mark.parametrize("where", ["idle", "forward"])
def test_under_nccl_the_rank_that_loses_time_is_named_and_the_others_wait_is_measured(home, where):
    run = start(home, "ddp", where)
    eventually(lambda: alerts(run), "an alert about a slow rank", every=0.5)
    found = end(home, run)
    (alert,) = alerts(run)
    assert (alert.rank, alert.evidence["slow_at"], alert.evidence["waiting"]) == (1, where, "measured")
    assert alert.evidence["others_waited_ms"] - alert.evidence["waited_ms"] >= 20
    waits = [step.phase("backward").waited_us for step in found if step.rank == 0 and step.step > 10]
    assert sorted(waits)[len(waits) // 2] >= 20_000


@pytest.mark.parametrize(("library", "where"), [("ddp", "nowhere"), ("fsdp", "idle")])
def test_equal_ranks_and_ranks_whose_waiting_cannot_be_measured_raise_nothing(home, library, where):
    run = start(home, library, where)
    eventually(lambda: steps(run) >= 800, "400 steps of each rank", 180, every=0.5)
    end(home, run)
    assert alerts(run) == []
