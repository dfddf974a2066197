"""Waiting that no wrapper of a call sees: the probe's clock around DDP's reducer, and its way into a step's message."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ftmon.protocol.messages.telemetry import PHASES
from ftmon.trainer.probe import active
from ftmon.trainer.probe.device.memory import Reading
from ftmon.trainer.probe.hooks import torch as reducer
from ftmon.trainer.probe.link import publisher
from ftmon.trainer.probe.loop.training import Training
from ftmon.trainer.probe.phases import tracker as raw
from ftmon.trainer.probe.phases.tracker import Counts

WAIT_S = 0.08


@pytest.fixture
def counts(training: Training, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    """A probe that watches this thread, with a model in DDP."""
    counts = Counts()
    monkeypatch.setattr(active, "counts", counts)
    monkeypatch.setattr(reducer, "_watching", True)
    yield counts
    assert training.guard.enabled


class Compute(torch.autograd.Function):
    """A backward of its own length, at the end of which the engine is to call ``wait``, as DDP's last bucket does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(WAIT_S)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: time.sleep(2 * WAIT_S))
        return gradient


def test_what_a_backward_does_after_its_last_gradient_is_waiting_and_what_it_does_before_is_not(counts: Counts) -> None:
    backward = reducer._timed_backward(torch.autograd.backward)
    leaf = torch.ones(3, requires_grad=True)
    begun = time.perf_counter_ns()
    backward(Compute.apply(leaf * 2).sum())
    lasted = time.perf_counter_ns() - begun
    assert leaf.grad.tolist() == [2.0, 2.0, 2.0]
    assert 2 * WAIT_S * 1e9 <= counts.host_ns <= lasted - WAIT_S * 1e9


def test_a_backward_that_fails_or_takes_no_hook_is_what_it_was(counts: Counts) -> None:
    backward = reducer._timed_backward(torch.autograd.backward)
    with pytest.raises(RuntimeError, match="does not require grad"):
        backward(torch.ones(1))
    loss = Compute.apply(torch.ones(3, requires_grad=True) * torch.ones(3, requires_grad=True)).sum()
    backward([loss])
    with pytest.raises(RuntimeError, match="second time"):
        backward([loss])
    assert reducer._running is None


def test_waits_between_events_become_the_phases_waiting() -> None:
    event = lambda at: SimpleNamespace(at=at, elapsed_time=lambda other: other.at - at)  # noqa: E731
    reading = Reading(0, 0, 0, 0)
    marks = [
        raw.Mark("forward", 0, reading, event(0.0), 0, 0),
        raw.Mark("backward", 10_000_000, reading, event(10.0), 0, 0),
        raw.Mark("idle", 50_000_000, reading, event(50.0), 0, 0),
    ]
    notes = raw.Notes()
    notes.waits = [("backward", event(20.0), event(35.0)), ("backward", event(40.0), event(45.5))]
    step = publisher.step_message(raw.StepRaw(1, marks, 1.0, notes, 0, 7000), 0, lambda sample: sample, 0)
    assert {record.name: record.waited_us for record in step.phases} == {"forward": None, "backward": 20_500}
    assert step.cpu_us == 7
    assert set(PHASES) >= {record.name for record in step.phases}


def test_a_forward_is_awaited_once_and_never_with_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def hooks() -> int:
        return len(torch.nn.modules.module._global_forward_pre_hooks)

    monkeypatch.setattr(active, "become_rank", lambda: ranks.append(1))
    monkeypatch.setattr(reducer, "_compiles", False)
    ranks: list[int] = []
    model, frozen = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False)
    reducer.await_no_forward()
    before = hooks()
    reducer.await_forward()
    reducer.await_forward()
    with torch.no_grad():
        model(torch.ones(1, 2))
    frozen(torch.ones(1, 2))
    assert (hooks(), ranks) == (before + 1, [])
    model(torch.ones(1, 2))
    assert (hooks(), ranks) == (before, [1])
    reducer.await_forward()
    reducer._compiling(lambda _: None)(None)  # as torch.compile makes its context
    reducer.await_forward()
    assert hooks() == before
