"""The allocator's numbers found in memory, laid out as PyTorch's allocator does it; and a CPU rank's memory."""

import ctypes
import gc
import random
import resource
from typing import Any

import pytest
from ftmon.trainer.probe.device import memory as module
from ftmon.trainer.probe.device.cuda import CudaMemory
from ftmon.trainer.probe.device.memory import CpuMemory

GROUPS = [
    *("allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes"),
    *("inactive_split_bytes", "requested_bytes"),
]
DEVICES = 2
PEAK = ("allocated_bytes", "all", "peak")
MIB = 2**20

Declared = list[tuple[str, str, str]]


def declared(version: str) -> Declared:
    """List the integers of ``DeviceStats`` in the order of its declaration; a name that begins with "-" is not told."""
    pools = ("all", "small_pool", "large_pool")
    figures = ("current", "peak", "allocated", "freed")
    fields: Declared = []
    for group in GROUPS:
        fields += [(group, pool, figure) for pool in pools for figure in figures]
        if group == "reserved_bytes" and version == "2.13":
            fields += [("-table", "", str(number)) for number in range(6)]
    fields += [("num_alloc_retries", "", ""), ("num_ooms", "", "")]
    fields += [(name, "", figure) for name in ("oversize_allocations", "oversize_segments") for figure in figures]
    fields += [(name, "", "") for name in ("num_sync_all_streams", "num_device_alloc", "num_device_free")]
    if version == "2.13":
        fields.append(("-num_oom_rejections", "", ""))
    return [*fields, ("max_split_size", "", "")]


class Allocator:
    """An allocator in memory: a vector among other words, and for each device an object with its struct inside."""

    def __init__(self, version: str = "2.13") -> None:
        draw = random.Random(0)
        self.fields = declared(version)
        size = len(self.fields)
        self.parts = [(ctypes.c_int64 * 400)(*(draw.randrange(1, 2**40) for _ in range(400))) for _ in range(DEVICES)]
        self.structs = [(ctypes.c_int64 * size).from_buffer(part, 17 * 8) for part in self.parts]
        self.pointers = (ctypes.c_uint64 * DEVICES)(*map(ctypes.addressof, self.parts))
        begin, length = ctypes.addressof(self.pointers), 8 * DEVICES
        self.words = (ctypes.c_uint64 * 1200)(*(draw.randrange(2**64) for _ in range(1200)))
        self.address = ctypes.addressof(self.words)
        # Two other vectors of this size: an unmapped address, and objects without the struct.
        self.words[40:43] = [64, 64 + length, 64 + length]
        self.words[90:93] = [self.address, self.address + length, 2**63]
        self.words[900:903] = [begin, begin + length, begin + length]

    def place(self, *names: str) -> int:
        return self.fields.index((*names, *[""] * (3 - len(names))))  # type: ignore[arg-type]

    def set(self, device: int, value: int, *names: str) -> None:
        self.structs[device][self.place(*names)] = value

    def stats(self, device: int) -> dict[str, Any]:
        """Return what ``torch._C._cuda_memoryStats`` makes of the struct."""
        found: dict[str, Any] = {}
        for (group, pool, figure), value in zip(self.fields, self.structs[device], strict=True):
            if group.startswith("-"):
                continue
            if not figure:
                found[group] = value
                continue
            level = found.setdefault(group, {})
            (level.setdefault(pool, {}) if pool else level)[figure] = value
        return found


@pytest.mark.parametrize("version", ["2.11", "2.13"])
def test_the_numbers_are_found_by_their_contents_and_read_in_place(version: str) -> None:
    allocator = Allocator(version)
    layout = module.search(allocator.address, allocator.stats(1), 1, DEVICES)
    assert layout is not None
    places = [place for place in allocator.fields if not place[0].startswith("-") and place[0] != "max_split_size"]
    read, pick = layout.reader(), layout.picker(places)
    assert list(pick(read())) == [module.value_of(allocator.stats(1), place) for place in places]
    allocator.set(1, 7, "reserved_bytes", "all", "peak")
    assert layout.picker([("reserved_bytes", "all", "peak"), ("num_ooms", "", "")])(read())[0] == 7


@pytest.mark.parametrize(
    "change", ["another figure", "a figure less", "a peak elsewhere", "nothing allocated", "devices"]
)
def test_another_layout_is_not_taken_for_a_known_one(change: str) -> None:
    allocator = Allocator()
    stats, devices = allocator.stats(0), DEVICES
    if change == "another figure":
        stats["active"]["large_pool"]["freed"] += 1
    elif change == "a figure less":
        del stats["num_device_free"]
    elif change == "a peak elsewhere":
        stats["by_pool"] = {"7": {"peak": 1}}
    elif change == "nothing allocated":
        ctypes.memset(allocator.structs[0], 0, ctypes.sizeof(allocator.structs[0]))
        stats = allocator.stats(0)
    else:
        devices = 3
    assert module.search(allocator.address, stats, 0, devices) is None
    assert [module.search(unmapped, Allocator().stats(0), 0, 1) for unmapped in (64, 2**63)] == [None, None]


class Core:
    """The two entry points of ``torch._C`` over the struct."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.asked = 0

    def _cuda_memoryStats(self, device: int) -> dict[str, Any]:  # noqa: N802
        self.asked += 1
        return self.allocator.stats(device)

    def _cuda_resetPeakMemoryStats(self, device: int) -> None:  # noqa: N802
        for group, pool, figure in self.allocator.fields:
            if figure == "peak":
                current = self.allocator.structs[device][self.allocator.place(group, pool, "current")]
                self.allocator.set(device, current, group, pool, "peak")


Rig = tuple[CudaMemory, Core]


@pytest.fixture(params=["2.11", "2.13"])
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rig:
    core = Core(Allocator(request.param))

    def locate(stats: dict[str, Any], device: int, devices: int) -> module.Layout | None:
        return module.search(core.allocator.address, stats, device, devices)

    monkeypatch.setattr(module, "locate", locate)
    return CudaMemory(core, 0, DEVICES, lambda _: None), core


def script_peak(core: Core, device: int = 0, group: str = "allocated_bytes") -> int:
    figures = core._cuda_memoryStats(device)[group]
    return figures.get("all", figures)["peak"]


def settle(memory: CudaMemory, core: Core) -> None:
    for _ in range(100):
        memory.sample()
    before = core.asked
    memory.sample()
    assert core.asked == before, "the numbers are read, not the dictionary"


def check(memory: CudaMemory, core: Core) -> None:
    """Compare once; only the training thread asks the allocator, whose lock a stuck one may hold."""
    before = core.asked
    memory.tidy()
    assert core.asked == before
    memory.sample()
    assert core.asked == before + 1
    memory.tidy()
    assert core.asked == before + 1


def test_both_kinds_of_sample_read_alike_and_the_script_sees_its_own_peak(rig: Rig) -> None:
    memory, core = rig
    core.allocator.set(0, 2**50, *PEAK)
    by_dictionary = memory.read(memory.sample())
    assert by_dictionary.allocated_peak == 2**50
    settle(memory, core)
    core.allocator.set(0, 2**49, *PEAK)
    sample = memory.sample()
    assert isinstance(sample, bytes)
    assert memory.read(sample) == by_dictionary._replace(
        allocated_peak=2**49,
        reserved_peak=by_dictionary.reserved,
        active_peak=by_dictionary.active,
        requested_peak=by_dictionary.requested,
    )
    assert script_peak(core) == 2**50
    core._cuda_resetPeakMemoryStats(0)
    core.allocator.set(0, 2**45, *PEAK)
    memory.sample()
    assert script_peak(core) == 2**45


def test_numbers_that_stop_being_what_pytorch_returns_are_given_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, core = rig
    settle(memory, core)
    monkeypatch.setattr(module, "CHECK_SECONDS", -1.0)
    check(memory, core)
    assert isinstance(memory.sample(), bytes)
    real = core.allocator.structs[0]
    core.allocator.structs[0] = (ctypes.c_int64 * len(real))(*(value + 1 for value in real))
    check(memory, core)
    assert isinstance(memory.sample(), dict)


def test_numbers_that_are_not_found_leave_the_dictionary(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []
    monkeypatch.setattr(module, "locate", lambda *_: tries.append(1))
    memory = CudaMemory(Core(Allocator()), 0, DEVICES, lambda _: None)
    for _ in range(500):
        assert isinstance(memory.sample(), dict)
    assert len(tries) == module.ATTEMPTS


@pytest.fixture
def memory():
    gc.collect()  # else a collection between two samples frees what earlier tests left
    memory = CpuMemory()
    yield memory
    memory.close()


def test_memory_that_came_and_went_is_in_the_resident_peak(memory):
    if memory._clear is None:
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
    monkeypatch.setattr(module, "highest_kib", 0)
    marks = iter([900, 850, 1000])
    fields = list(module.real_getrusage(resource.RUSAGE_SELF))
    usage = lambda _: resource.struct_rusage([*fields[:2], next(marks), *fields[3:]])  # noqa: E731
    monkeypatch.setattr(module, "real_getrusage", usage)
    assert [module.getrusage(resource.RUSAGE_SELF).ru_maxrss for _ in range(3)] == [900, 900, 1000]
    monkeypatch.undo()
    with pytest.raises(ValueError, match="invalid who"):
        module.getrusage(12345)


def test_a_dictionary_too_shows_the_script_its_own_peak_and_the_phase_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "locate", lambda *_: None)
    core, resets = Core(Allocator()), list[Any]()
    memory = CudaMemory(core, 0, DEVICES, resets.append)
    oversize = ("oversize_segments", "", "peak")
    for device in (0, 1):
        core.allocator.set(device, 2**50, *PEAK)
    core.allocator.set(0, 2**48, *oversize)
    memory.sample()
    core.allocator.set(0, 2**49, *PEAK)
    memory.sample()
    assert (script_peak(core), script_peak(core, group="oversize_segments")) == (2**50, 2**48)
    core.allocator.set(0, 2**47, *PEAK)
    core._cuda_resetPeakMemoryStats(0)  # the script's own
    assert [memory.read(stats).allocated_peak for stats in resets] == [2**47]
    assert script_peak(core) < 2**40
    core.allocator.set(0, 2**41, *PEAK)
    memory.sample()
    assert script_peak(core) == 2**41
    core.allocator.set(1, 7, *PEAK)
    assert script_peak(core, device=1) == 7, "other devices are left alone"
