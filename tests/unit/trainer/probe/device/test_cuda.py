"""CUDA comes up under way, without a GPU: the rank's phases, hello and watch for failures; and buffers of copies."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ftmon.protocol.messages.telemetry import Oom
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.probe.device import cuda
from ftmon.trainer.probe.link.publisher import first_has_passed
from ftmon.trainer.probe.loop.training import Training
from ftmon.trainer.probe.memory.snapshots import PhaseMarks
from ftmon.trainer.probe.oom.console import Hold
from ftmon.trainer.probe.oom.report import AllocationFailures, OomHistory, OomReporter
from ftmon.trainer.probe.phases.tracker import Counts, Mark, Notes, StepRaw
from ftmon.trainer.probe.rank.context import RankContext

GIB = 2**30


class Core:
    """PyTorch's C functions of an allocator in which ``held`` bytes are allocated; there is no GPU to ask."""

    held = 3 * GIB
    resets = 0
    observer: Any = None

    def _cuda_memoryStats(self, _: int) -> dict[str, Any]:  # noqa: N802
        figures = {"current": self.held, "peak": self.held, "allocated": self.held, "freed": 0}
        names = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes", "allocation")
        return {**{name: {"all": dict(figures)} for name in names}, "num_alloc_retries": 0, "num_ooms": 0}

    def _cuda_resetPeakMemoryStats(self, _: int) -> None:  # noqa: N802
        self.resets += 1

    def _cuda_getCurrentRawStream(self, _: int) -> int:  # noqa: N802
        return 0

    def _cuda_attach_out_of_memory_observer(self, observer: Any) -> None:
        self.observer = observer

    class _CudaEventBase:
        @staticmethod
        def record(event: Any, stream: Any) -> None:
            event.stream = stream


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    found = Core()
    properties = SimpleNamespace(name="a GPU", total_memory=80 * GIB, uuid="1")
    monkeypatch.setattr(torch, "_C", found)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda, "install", lambda: None)
    for name, value in {
        "is_initialized": lambda: False,
        "current_device": lambda: 1,
        "get_device_properties": lambda _: properties,
        "current_stream": lambda _: "stream",
        "Event": lambda **_: SimpleNamespace(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return found


def test_cuda_that_comes_up_is_met_once_and_what_its_allocator_refuses_is_reported(core, monkeypatch, tmp_path):
    rank = RankContext(1, 1, 2, RunDir(tmp_path))
    training = Training(rank, Counts())
    outbox, tracker, phases, hold = training.outbox, training.tracker, training.phases, Hold(rank.options)
    reporter = OomReporter(rank, tracker, training.trained, outbox, hold, OomHistory(), PhaseMarks())
    failures = AllocationFailures(rank, reporter, hold, phases.check_device)
    phases.met_cuda = failures.watch_cuda
    phases.enter("data")
    assert (rank.device.info.kind, core.observer) == ("cpu", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for phase in ("forward", "backward", "optimizer"):
        phases.enter(phase)
    info = rank.device.info
    assert (info.kind, info.index, info.uuid, info.capacity_bytes) == ("cuda", 1, "GPU-1", 80 * GIB)
    assert rank.device.memory.measure == training.introduction.hello().memory_measure == "cuda"
    assert list(outbox.items) == ["hello"]
    timed = {mark.phase: mark.event is not None for mark in tracker.marks}
    assert timed == {"data": False, "forward": True, "backward": True, "optimizer": True}
    assert phases.enter == tracker.enter, "nothing is asked of the device any more"
    core._cuda_resetPeakMemoryStats(1)  # the script's own reset
    assert [mark.phase for mark in tracker.marks][-1] == ""
    core.observer(1, 2 * GIB, 80 * GIB, GIB)
    oom = outbox.items[-1]
    assert isinstance(oom, Oom)
    assert (oom.rank, oom.phase, oom.requested_bytes, oom.allocated_bytes) == (1, "optimizer", 2 * GIB, 3 * GIB)
    assert (reporter.ooms, rank.guard.enabled) == (1, True)
    training.updates.updated()
    assert isinstance(outbox.items[-1], StepRaw)
    assert outbox.steps_done == 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the buffers that were made; the device is the host here, so its memory is not pinned."""
    sizes: list[int] = []
    empty = torch.empty

    def pageable(size: int, *, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory
        sizes.append(size)
        return empty(size, **options)

    monkeypatch.setattr(cuda.torch, "empty", pageable)
    monkeypatch.setattr(cuda, "_free", {})
    monkeypatch.setattr(cuda, "_total", 0)
    monkeypatch.setattr(cuda, "_scalars", deque())
    monkeypatch.setattr(cuda, "_is_sought", True)
    monkeypatch.setattr(cuda, "_driver", None)
    return sizes


def test_a_value_that_is_never_read_returns_its_buffer(made):
    for number in range(100):
        cuda.fetch_scalar(torch.tensor(7.0))
        norm = cuda.fetch_scalar(torch.tensor(float(number)))
        assert cuda.read(norm) == number
    assert len(made) <= 3
    assert cuda._total == sum(made)


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the device has passed the copies of what was kept."""
    answer = [True]
    event = SimpleNamespace(record=lambda: None, query=lambda: answer[0])
    monkeypatch.setattr(cuda.torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(cuda.torch.cuda, "set_stream", lambda _: None)
    return answer


def test_kept_scalars_are_copied_together_but_for_those_that_were_overwritten(made, passed, monkeypatch):
    values = [torch.tensor(float(number)) for number in range(4)]
    kept = [cuda.Kept(value) for value in values]
    assert all(cuda.can_be_kept(value) for value in values)
    assert not cuda.arrived(kept[:1])
    assert cuda.arrived_value(kept[0]) is None
    values[1].add_(1)
    assert [each.is_overwritten() for each in kept] == [False, True, False, False]
    with monkeypatch.context() as captured:
        captured.setattr(cuda, "under_way", 1)
        assert cuda.fetch_kept_on(None, list(kept)) is None
    assert not cuda.arrived(kept[:1]), "it waits for the end of the capture"
    assert cuda.fetch_kept_on(None, list(kept)) is False
    assert cuda.arrived(kept)
    assert [cuda.read(each) for each in kept] == [0.0, None, 2.0, 3.0]
    assert not cuda.can_be_kept(torch.ones(2)[0]), "it would keep more than a number"
    assert cuda.fetch_kept([cuda.Kept(torch.tensor(1.0))])
    monkeypatch.setattr(cuda, "has_captured", True)
    assert not cuda.can_be_kept(values[0]), "a replay overwrites it unseen"


def test_a_step_is_sent_once_its_kept_loss_is_here_though_events_of_its_block_have_passed(made, passed, monkeypatch):
    def step(number: int, loss: Any) -> StepRaw:
        mark = Mark("idle", 0, None, SimpleNamespace(query=lambda: True), 0, 0)
        return StepRaw(number, [mark, mark], 0.0, Notes(losses=[loss]), 0, 0, 200, True, True)

    kept = [cuda.Kept(torch.tensor(float(number))) for number in range(2)]
    steps = [step(number, loss) for number, loss in enumerate(kept, 1)]
    assert not first_has_passed([*steps, step(9, 0.5)]), "nothing is copied yet"
    passed[0] = False
    with monkeypatch.context() as device:
        device.setattr(cuda, "_begin_copy", lambda buffer, _, *others: cuda.Fetched(buffer, *others))
        assert cuda.fetch_kept(list(kept))
    assert not first_has_passed([*steps, step(9, 0.5)])
    assert cuda.read(kept[0]) is None, "not the bytes that wait for it"
    passed[0] = True
    assert first_has_passed(steps), "the device has passed the copy"
    passed[0] = False
    copy: Any = kept[0].copy
    copy.tensor().fill_(0.25)
    assert first_has_passed(steps)
    assert cuda.read(kept[0]) == 0.25
    at_once: Any = cuda.fetch_scalar(torch.tensor(0.5))
    assert first_has_passed([step(1, at_once)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool])
def test_a_number_has_arrived_once_its_bytes_are_other_ones(dtype, made, monkeypatch):
    with monkeypatch.context() as device:
        device.setattr(cuda, "_begin_copy", lambda buffer, _, *others: cuda.Fetched(buffer, *others))
        slow: Any = cuda.fetch_scalar(torch.ones((), dtype=dtype))
        lost: Any = cuda.fetch_scalar(torch.ones((), dtype=dtype))
    assert not slow.arrived()
    assert not cuda.arrived([0.5, slow, None])
    address = lost.buffer.address
    del lost
    for value in (1.0, 0.0, float("nan")):
        here: Any = cuda.fetch_scalar(torch.tensor(value).to(dtype))
        assert here.arrived()
        assert here.buffer.address != address, "its copy may still come"
    slow.tensor().fill_(1)
    assert slow.arrived()
    assert cuda.arrived([slow])
    assert len(made) == 4


def test_a_value_on_its_way_keeps_its_buffer_and_the_longest_free_one_is_used_first(made):
    values: deque[Any] = deque(cuda.fetch(torch.full((100,), float(number))) for number in range(4))
    assert [int(value.tensor()[99]) for value in values] == [0, 1, 2, 3]
    first = values.popleft().buffer.address
    values.popleft()
    later: Any = cuda.fetch(torch.zeros(100))
    assert later.buffer.address == first
    assert [int(value.tensor()[0]) for value in values] == [2, 3]
    assert made == [512] * 4


def test_beyond_the_limit_nothing_is_fetched(made, monkeypatch):
    monkeypatch.setattr(cuda, "MOST_BYTES", 2 * cuda.SMALLEST)
    kept = [cuda.fetch_scalar(torch.tensor(1.0)) for _ in range(3)]
    assert [each is None for each in kept] == [False, False, True]
    kept.clear()
    assert len(made) == 2
    assert cuda.fetch_scalar(torch.tensor(1.0)) is not None
