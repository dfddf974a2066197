"""NVML's figures beside nvidia-smi's, and the memory of a process of ours mapped to its rank."""

import os
import shutil
import subprocess
import sys
import threading

import pytest
from ftmon.protocol.analysis.health.machine import Gpus
from ftmon.protocol.messages.telemetry import DeviceSample
from ftmon.trainer.host.hardware.gpus import Nvml, Xids
from ftmon.trainer.host.hardware.watch import DeviceSampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpu_alone,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no NVIDIA driver on this machine"),
]

MIB = 2**20
_HOLD = """
import sys, torch
held = torch.ones(1 << 30, dtype=torch.uint8, device="cuda:0")
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.readline()
"""


def smi(field: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split("\n")[:-1]


def sample(pids: dict[int, int], rounds: int = 1) -> list[DeviceSample]:
    sampler = DeviceSampler("here", lambda: pids, 0.1)
    sampler.start()
    try:
        found: list[DeviceSample] = []
        for _ in range(300):
            found += [one for one in sampler.poll() if isinstance(one, DeviceSample) and one.kind == "gpu"]
            if len(found) >= rounds * len(smi("index")):
                return found
            threading.Event().wait(0.05)
        raise AssertionError("no GPU sampled within 15 s")
    finally:
        sampler.close()


def test_every_gpu_has_the_figures_that_nvidia_smi_shows():
    latest = {found.index: found for found in sample({})}
    for line, uuid, name, total, used, limit in zip(
        smi("index"), smi("uuid"), smi("name"), smi("memory.total"), smi("memory.used"), smi("power.limit"), strict=True
    ):
        found = latest[int(line)]
        assert (found.uuid, found.name) == (uuid, name)
        assert found.total_bytes // MIB == int(total)
        assert abs(found.used_bytes / MIB - int(used)) <= 64
        assert found.power_limit_w == pytest.approx(float(limit), abs=1)
        assert found.power_w is not None
        assert found.power_w > 0
        assert found.temperature_c is not None
        assert 0 < found.temperature_c < 120
        assert found.sm_clock_mhz is not None
        assert found.memory_clock_mhz is not None
        assert found.utilization_percent is not None


def test_memory_held_by_a_process_of_the_run_is_seen_and_mapped_where_pids_are_the_same():
    pytest.importorskip("torch")
    before = {found.index: found.used_bytes for found in sample({})}
    first = os.environ | {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=first
    ) as child:
        assert child.stdin is not None
        assert child.stdout.readline().strip() == "ready"
        found = {found.index: found for found in sample({5: child.pid})}[0]
        child.stdin.write("\n")
        child.stdin.close()
        child.wait(timeout=60)
    mine = [process for process in found.processes if process.pid == child.pid]
    for process in mine:
        assert process.rank == 5
        assert found.used_bytes >= process.used_bytes >= 1 << 30
    if not mine:
        assert all(process.rank is None for process in found.processes), "another pid namespace maps nothing"
        assert found.used_bytes - before[0] >= 1 << 30


def test_faults_of_every_gpu_can_be_read_and_a_healthy_one_raises_nothing():
    nvml = Nvml()
    try:
        found = {one.index: one for one in nvml.health("here", 1.0)}
        assert set(found) == {int(line) for line in smi("index")}
        for line, errors in zip(smi("index"), smi("ecc.errors.uncorrected.volatile.total"), strict=True):
            one = found[int(line)]
            assert str(one.ecc_uncorrected) == errors.strip() or (one.ecc_uncorrected is None and "N/A" in errors)
        gpus = Gpus()
        raised = [one for t in range(3) for each in nvml.health("here", 10.0 * t) for one in gpus.health(each)]
        raised += [one for each in nvml.samples("here", 1.0, {}) for one in gpus.sample(each)]
        assert [one for one in raised if one.kind != "gpu_memory_errors"] == []
    finally:
        nvml.close()


def test_errors_of_the_driver_can_be_watched_from_its_events_where_the_log_cannot_be_read(tmp_path):
    xids = Xids("here", str(tmp_path / "none"))
    assert xids._events is not None
    assert (len(xids._handles), xids.poll()) == (len(smi("index")), [])
    xids.close()
