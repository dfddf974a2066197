"""Checksums of replicas on a GPU: right, without a wait for the device, and without a trace in the step's peaks."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def rank_and_tracker() -> tuple[Any, Any]:
    from ftmon.trainer.probe.device.events import CudaEvents

    events = CudaEvents(0)
    device = SimpleNamespace(events=events, mark_event=events.mark, memory=SimpleNamespace(device_index=0))
    return SimpleNamespace(rank=0, world_size=2, device=device), SimpleNamespace(watchers=(), cost_ns=0)


def test_sums_are_exact_taken_without_waiting_and_leave_no_memory_behind(monkeypatch):
    from ftmon.trainer.probe.phases.pace import Pace
    from ftmon.trainer.probe.rank.trained import Trained
    from ftmon.trainer.probe.values import replicas

    class Wrapped:
        process_group = SimpleNamespace(size=lambda: 2)
        parameters_to_ignore = ()

    wrapped: Any = Wrapped()
    wrapped.module = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).cuda().bfloat16()
    wrapped.module.append(torch.nn.Embedding(40_000, 1024).cuda())  # above what is summed at once
    monkeypatch.setattr(replicas, "_wrapped", [lambda: wrapped])
    taker = replicas.Replicas(*rank_and_tracker(), Trained(), Pace())
    taker.compute(10)  # loads the kernels
    torch.cuda.synchronize()
    assert len(taker.ready()) == 1
    torch.cuda.reset_peak_memory_stats()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda._sleep(2_000_000_000)  # about a second of the device
    begun = time.perf_counter()
    taker.compute(20)
    spent = time.perf_counter() - begun
    assert taker.ready() == [], "the device has not come past it"
    assert spent < 0.5, "the training thread did not wait for the device"
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before < 2**20
    assert torch.cuda.memory_reserved() - reserved <= 2 * 2**20
    (found,) = taker.ready()
    parameters = dict(wrapped.module.named_parameters())
    assert len(found.parameters) == min(replicas.PER_CHECK, len(parameters))
    for one in found.parameters:
        name, _, part = one.name.partition("[")
        values = parameters[name].detach().double().view(-1)
        if part:
            low, high = map(int, part.rstrip("]").split(":"))
            values = values[low:high]
        assert one.total == pytest.approx(float(values.sum()), rel=1e-9, abs=1e-6)
        assert one.norm == pytest.approx(float(values.norm()), rel=1e-6)


def test_a_batch_on_the_device_has_a_fingerprint_and_a_drawn_number_ends_the_comparison():
    from ftmon.trainer.probe.rank.trained import Trained
    from ftmon.trainer.probe.values.batch_losses import BatchLosses

    taker = BatchLosses(*rank_and_tracker(), Trained())

    def step(rows: Any, draw: bool = False, seconds: float = 0.09) -> list[Any]:
        taker.arm(10, is_comparable=True)
        taker.add(((rows,), {}), True)
        if draw:
            torch.rand(1, device="cuda")
        torch.cuda._sleep(200_000_000)
        begun = time.perf_counter()
        taker.end(loss)
        assert time.perf_counter() - begun < seconds, "the training thread did not wait for the device"
        torch.cuda.synchronize()
        return taker.ready()

    rows, loss = torch.randint(0, 32_000, (2, 4096), device="cuda"), torch.tensor(0.5, device="cuda")
    step(rows, seconds=60)  # loads the kernels, which waits for the device
    (first,), (again,), (other,) = step(rows), step(rows.clone()), step(rows.flip(1))
    assert (first.step, first.loss) == (11, 0.5)
    assert first.inputs == again.inputs != other.inputs
    assert step(rows, draw=True) == []
