"""The host as a device, control groups as the kernel writes them, and a sampler that lives without a GPU."""

import os
from pathlib import Path

import psutil
import pynvml
import pytest
from eventually import eventually
from ftmon.protocol.host import machine
from ftmon.protocol.messages.telemetry import DeviceHealth, DeviceSample
from ftmon.trainer.host.hardware import watch
from ftmon.trainer.host.hardware.gpus import reasons_in_words
from ftmon.trainer.host.hardware.host import HostLoad
from ftmon.trainer.host.hardware.watch import DeviceSampler

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group_files(path: str, limit: int, current: int, inactive: int) -> dict[str, str]:
    folder = f"sys/fs/cgroup/{path}/memory"
    stat = f"anon 5\ninactive_file {inactive}\n"
    return {f"{folder}.max": f"{limit}\n", f"{folder}.current": f"{current}\n", f"{folder}.stat": stat}


def wait_for(sampler: DeviceSampler, kind: str, count: int = 1) -> list[DeviceSample]:
    found: list[DeviceSample] = []

    def take() -> None:
        found.extend(one for one in sampler.poll() if isinstance(one, DeviceSample) and one.kind == kind)

    eventually(lambda: len(found) >= count, f"{count} samples of {kind}", each=take)
    return found


def test_the_host_is_sampled_with_its_ranks_memory_though_their_table_changes_meanwhile():
    load = HostLoad()
    before = psutil.Process().memory_info().rss
    sample = load.sample("here", 5.0, {os.getpid(): 3})
    after = psutil.Process().memory_info().rss
    assert (sample.host, sample.kind, sample.index, sample.time) == ("here", "host", 0, 5.0)
    assert 0 < sample.used_bytes <= sample.total_bytes <= psutil.virtual_memory().total
    assert sample.utilization_percent is not None
    (process,) = sample.processes
    assert (process.pid, process.rank) == (os.getpid(), 3)
    assert min(before, after) - 64 * 2**20 < process.used_bytes < max(before, after) + 64 * 2**20
    assert HostLoad().sample("here", 5.0, {2**22 + 1: 0}).processes == [], "a rank that is gone has no memory"

    def changing() -> dict[int, int]:
        raise RuntimeError("dictionary changed size during iteration")

    sampler = DeviceSampler("here", changing, 0.05)
    sampler.start()
    try:
        assert wait_for(sampler, "host", 2)[0].processes == []
    finally:
        sampler.close()


def test_the_limit_of_a_control_group_of_version_2_is_the_hosts_size(tmp_path: Path):
    files = {"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/step/memory.max": "max\n"}
    root = write(tmp_path, files | group_files("job", limit=4 * GIB, current=3 * GIB, inactive=GIB))
    group = machine.memory_group(root)
    assert group == root / "sys/fs/cgroup/job", "the limit of a group above holds too"
    assert machine.group_memory(group) == (2 * GIB, 4 * GIB)
    sample = HostLoad(root).sample("here", 5.0, {})
    assert (sample.used_bytes, sample.total_bytes) == (2 * GIB, 4 * GIB)


def test_the_limit_of_a_control_group_of_version_1_counts_even_where_our_path_is_not_mounted(tmp_path: Path):
    files = {
        "proc/self/cgroup": "5:devices:/\n4:memory:/docker/abc\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{5 * GIB}\n",
        "sys/fs/cgroup/memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
    }
    group = machine.memory_group(write(tmp_path, files))
    assert group is not None
    assert machine.group_memory(group) == (4 * GIB, 8 * GIB)
    files["sys/fs/cgroup/memory/memory.limit_in_bytes"] = "9223372036854771712\n"
    assert machine.memory_group(write(tmp_path, files)) is None, "no limit"
    assert machine.memory_group(tmp_path / "nowhere") is None


def test_what_a_process_may_use_is_limited_by_its_own_group_and_all_above_it(tmp_path: Path):
    files = {
        "proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {20 * 2**20} kB\n",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 9654\n",
        "proc/self/cgroup": "0::/slurm/job_7/step_0\n",
    }
    files |= group_files("slurm/job_7", limit=16 * GIB, current=15 * GIB, inactive=2 * GIB)
    root = write(tmp_path, files | group_files("slurm/job_7/step_0", limit=8 * GIB, current=3 * GIB, inactive=0))
    assert machine.memory_limit(root) == 8 * GIB, "its own group has the lowest limit"
    assert machine.available_memory(root) == 3 * GIB, "the group above is fuller"
    assert machine.cpu_model(root) == "AMD EPYC 9654"
    first = "sys/fs/cgroup/memory/slurm/job_7/memory"
    write(root, {f"{first}.limit_in_bytes": f"{32 * GIB}\n", f"{first}.usage_in_bytes": f"{GIB}\n"})
    write(root, {"proc/self/cgroup": "4:memory:/slurm/job_7\n"})
    assert machine.memory_limit(root) == 32 * GIB, "version 1"
    assert machine.available_memory(root) == 20 * GIB, "the host has less"
    write(root, {"proc/self/cgroup": "0::/\n"})
    assert (machine.memory_limit(root), machine.available_memory(root)) == (64 * GIB, 20 * GIB), "no limit"
    assert (machine.memory_limit(root / "none"), machine.available_memory(root / "none")) == (0, 0), "unknown"


def test_without_a_driver_the_host_is_sampled_all_the_same(monkeypatch: pytest.MonkeyPatch):
    assert reasons_in_words(0x1 | 0x4 | 0x40) == ["power cap", "thermal (hardware)"], "idle is none"

    def no_driver() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    sampler = DeviceSampler("here", dict, 0.05)
    sampler.start()
    try:
        samples = wait_for(sampler, "host", 3)
        assert all(sample.kind == "host" for sample in samples)
        assert samples[0].time < samples[2].time
    finally:
        sampler.close()
    sampler.join(60)
    assert not sampler.is_alive()


def test_a_driver_that_fails_in_the_middle_is_given_up_and_tried_again(monkeypatch: pytest.MonkeyPatch):
    looks: list[str] = []

    class Failing:
        def __init__(self) -> None:
            looks.append("opened")

        def samples(self, host: str, now: float, rank_of: dict[int, int]) -> list[DeviceSample]:
            if looks.count("sampled") == 2 and "failed" not in looks:
                looks.append("failed")
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            looks.append("sampled")
            return [DeviceSample(host, "gpu", 0, "a GPU", now, 1, 2)]

        def health(self, host: str, now: float) -> list[DeviceHealth]:
            return [DeviceHealth(host, 0, now)]

        def close(self) -> None:
            looks.append("closed")

    monkeypatch.setattr(watch, "Nvml", Failing)
    monkeypatch.setattr(watch, "RETRY_SECONDS", 0.1)
    sampler = DeviceSampler("here", dict, 0.02)
    sampler.start()
    try:
        wait_for(sampler, "gpu", 4)
    finally:
        sampler.close()
    assert looks[:6] == ["opened", "sampled", "sampled", "failed", "closed", "opened"]


def test_the_flops_of_a_packed_step_count_pairs_within_documents_only() -> None:
    # 2 layers, 4 heads of 8: 12 * 2 * 4 * 8 = 768 FLOPs a pair; 1,000 parameters: 6,000 a token.
    flops = machine.ModelFlops(token=6_000.0, pair=768.0)
    pairs = machine.causal_pairs([3, 5])
    assert pairs == 6 + 15
    assert flops.of(8, pairs) == 8 * 6_000 + 21 * 768
    assert flops.of(8, machine.causal_pairs([8])) - flops.of(8, pairs) == 15 * 768


def test_mfu_of_a_llama_1b_shape_is_the_hand_computed_one_and_needs_a_type_flops_and_time():
    # Llama-3.2-1B: 1,235,814,400 parameters, tied; 16 layers, 32 heads of 64; rows of 4,096 tokens.
    flops = machine.ModelFlops(token=6 * 1_235_814_400, pair=12 * 16 * 32 * 64)
    a_second = flops.of(55_296, machine.causal_pairs([4096]) * 13 + machine.causal_pairs([2048]))
    # 55,296 * 7,414,886,400 = 4.100095583e14; pairs 13 * 8,390,656 + 2,098,176 = 111,176,704, times 393,216
    assert a_second == pytest.approx(4.100135583e14 + 4.37164588e13, rel=1e-4)
    assert machine.mfu(a_second, 1.0, machine.peak_flops("NVIDIA H200", "bf16")) == pytest.approx(0.4586, abs=2e-4)
    assert machine.peak_flops("NVIDIA H200", "") is None
    assert machine.mfu(0.0, 1.0, 1e12) is None
    assert machine.mfu(1e12, 0.0, 1e12) is None
    assert machine.mfu(5e11, 1.0, 1e12) == 0.5


def test_rows_of_a_foreign_script_count_as_equal_lengths_and_pairs_beyond_a_sliding_window_do_not():
    assert machine.causal_pairs_of_rows(4096, 2) == machine.causal_pairs([2048, 2048])
    assert machine.causal_pairs_of_rows(100, 0) == 0
    flops = machine.ModelFlops(token=0.0, windowed_pair=1.0, window=4)
    # Rows of the mask: 1, 2, 3, 4, 4, 4 ... against 1 .. 4,096; the exact share is (w/n)(2 - w/n) for long documents.
    exact = sum(min(position, 4) for position in range(1, 4097))
    assert flops.of(4096, machine.causal_pairs([4096]), 4096) == pytest.approx(exact, rel=2e-3)
    assert flops.of(4, machine.causal_pairs([4]), 4) == machine.causal_pairs([4])


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [("NVIDIA H200", "bf16", 989.4), ("NVIDIA H100 80GB HBM3", "tf32", 494.7), ("NVIDIA H100 PCIe", "bf16", 756.0),
     ("NVIDIA H100 NVL", "bf16", 835.5), ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
     ("NVIDIA A100 80GB PCIe", "fp32", 19.5), ("Tesla V100-SXM2-32GB", "fp16", 125.0),
     ("NVIDIA GeForce RTX 4090", "bf16", 165.2), ("NVIDIA L40S", "bf16", 362.05), ("NVIDIA L40", "bf16", 181.05)],
)  # fmt: skip
def test_a_gpu_has_its_data_sheet_peak(name: str, precision: str, tera: float) -> None:
    assert machine.peak_flops(name, precision) == tera * 1e12


@pytest.mark.parametrize(
    "name",
    ["AMD EPYC 9654", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A10G",
     "NVIDIA H300", "Tesla V100-SXM2-32GB"],
)  # fmt: skip
def test_a_device_or_type_without_a_peak_has_no_mfu(name: str) -> None:
    assert machine.peak_flops(name, "bf16") is None
    assert machine.mfu(1e15, 1.0, machine.peak_flops(name, "bf16")) is None
