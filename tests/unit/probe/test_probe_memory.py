import gc
import resource

import pytest
from ftmon.trainer.probe.device import memory as rusage
from ftmon.trainer.probe.device.cuda import CudaMemory, ScriptPeaks
from ftmon.trainer.probe.device.memory import CpuMemory

MIB = 2**20


@pytest.fixture
def memory():
    gc.collect()  # else a collection between two samples frees what earlier tests left
    memory = CpuMemory()
    yield memory
    memory.close()


def test_memory_that_came_and_went_is_in_the_resident_peak(memory):
    if not memory.has_peaks:
        pytest.skip("this kernel does not let a process reset its high-water mark")
    start = memory.read(memory.sample())
    block = bytearray(96 * MIB)
    block[::4096] = b"x" * len(block[::4096])
    del block
    end = memory.read(memory.sample())
    after = memory.read(memory.sample())
    assert end.resident_peak - max(start.resident, end.resident) > 64 * MIB
    assert after.resident_peak < end.resident_peak - 64 * MIB


def test_allocated_and_reserved_follow_malloc(memory):
    start = memory.read(memory.sample())
    block = bytearray(64 * MIB)
    end = memory.read(memory.sample())
    assert 64 * MIB <= end.allocated - start.allocated < 66 * MIB
    assert end.reserved >= end.allocated
    del block
    assert memory.read(memory.sample()).allocated - start.allocated < MIB


def test_a_peak_that_was_read_never_falls(monkeypatch):
    monkeypatch.setattr(rusage, "highest_kib", 0)
    marks = iter([900, 850, 1000])
    fields = list(rusage.real_getrusage(resource.RUSAGE_SELF))
    monkeypatch.setattr(
        rusage, "real_getrusage", lambda _: resource.struct_rusage([*fields[:2], next(marks), *fields[3:]])
    )
    assert [rusage.getrusage(resource.RUSAGE_SELF).ru_maxrss for _ in range(3)] == [900, 900, 1000]


def test_getrusage_keeps_its_errors():
    with pytest.raises(ValueError, match="invalid who"):
        resource.getrusage(12345)


class Core:
    """The allocator's counters as PyTorch keeps them, driven by the test."""

    def __init__(self):
        self.current = self.peak = 0

    def use(self, current, peak=0):
        self.current = current
        self.peak = max(self.peak, current, peak)

    def _cuda_memoryStats(self, device):  # noqa: N802
        def figures():
            return {"current": self.current, "peak": self.peak, "allocated": 0, "freed": 0}

        group = {pool: figures() for pool in ("all", "small_pool", "large_pool")}
        names = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes", "allocation")
        copies = {name: {pool: dict(group[pool]) for pool in group} for name in names}
        return {**copies, "oversize_segments": figures(), "num_ooms": 0, "max_split_size": -1}

    def _cuda_resetPeakMemoryStats(self, device):  # noqa: N802
        self.peak = self.current


@pytest.fixture
def cuda():
    core = Core()
    resets = []
    memory = CudaMemory(core, 0, 1, resets.append)
    memory.core, memory.resets = core, resets
    return memory


def script_peak(cuda, device=0):
    return cuda.core._cuda_memoryStats(device)["allocated_bytes"]["all"]["peak"]


def test_the_script_sees_its_own_peak_through_the_probe_s_resets(cuda):
    cuda.core.use(10, peak=500)
    cuda.sample()
    cuda.core.use(20, peak=90)
    cuda.sample()
    assert script_peak(cuda) == 500
    assert cuda.core._cuda_memoryStats(0)["oversize_segments"]["peak"] == 500


def test_the_script_s_own_reset_begins_anew_and_the_phase_keeps_what_was(cuda):
    cuda.core.use(10, peak=500)
    cuda.core._cuda_resetPeakMemoryStats(0)
    assert script_peak(cuda) == 10
    cuda.core.use(30, peak=60)
    cuda.sample()
    assert script_peak(cuda) == 60
    assert [cuda.read(stats).allocated_peak for stats in cuda.resets] == [500]


def test_other_devices_are_left_alone(cuda):
    cuda.core.use(10, peak=500)
    cuda.sample()
    assert script_peak(cuda, device=1) == 10


def test_many_samples_keep_the_highest():
    peaks = ScriptPeaks()
    for value in [*range(300), 7]:
        peaks.note({"allocated_bytes": {"all": {"peak": value}}})
    assert peaks.raise_in({"allocated_bytes": {"all": {"peak": 1}}})["allocated_bytes"]["all"]["peak"] == 299
