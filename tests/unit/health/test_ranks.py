"""Compilations that go on, and what the probe reads for them."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ftmon.protocol.analysis.health.speed import CompileFacts, Recompilation
from ftmon.protocol.messages.telemetry import Compilation, Compiles, DataLoaderInfo
from ftmon.trainer.probe.link import publisher
from ftmon.trainer.probe.link.publisher import SlowFacts, loader_info


def compiled(*steps: int, name: str = "forward (model.py:40)", reason: str = "size mismatch") -> Compiles:
    return Compiles(0, 1.0, 9, [Compilation(name, step, 0.5, reason) for step in steps])


def test_a_function_that_is_compiled_again_and_again_is_told_with_the_reason():
    judge = Recompilation()
    assert judge.compiles(compiled(1, 1, 1, 1, 1, 1)) == [], "warm-up"
    assert judge.compiles(compiled(2, 5, 9)) == []
    (found,) = judge.compiles(compiled(12))
    assert (found.kind, found.severity, found.ranks, found.step) == ("recompilation", "warning", (0,), 12)
    assert found.facts == CompileFacts("forward (model.py:40)", 4, 2.0, "size mismatch", 2)
    assert [one.state for one in judge.step(200)] == ["resolved"]


def test_a_few_compilations_of_many_functions_are_healthy():
    judge = Recompilation()
    for number in range(30):
        assert judge.compiles(compiled(2, 50, 400, name=f"f{number}")) == []
    assert judge.compiles(compiled(*range(2, 40), reason="")) == [], "never compiled before"


def test_dynamos_own_metrics_are_read_once_each(monkeypatch: pytest.MonkeyPatch):
    def metric(name: str, began: float, reason: str = "") -> Any:
        return SimpleNamespace(
            co_name=name, co_filename="/a/model.py", co_firstlineno=40, recompile_reason=reason, fail_type=None,
            start_time_us=int(began * 1e6), entire_frame_compile_time_s=0.5,
        )  # fmt: skip

    kept = [metric("forward", 100.0), metric("", 100.0)]
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(_compilation_metrics=kept))
    monkeypatch.setattr(publisher, "wall_offset_ns", lambda: 150_000_000_000)
    introduction: Any = SimpleNamespace(facts={})
    tracker: Any = SimpleNamespace(step=7)
    facts = SlowFacts(3, introduction, tracker, lambda: None)
    facts.note_step(50_000_000_000)
    facts.note_step(500_000_000_000)  # not the first
    first = facts.compiles()
    assert first is not None
    assert (first.total, first.functions) == (1, [Compilation("forward (model.py:40)", 1, 0.5)])
    assert facts.compiles() is None
    kept.append(metric("forward", 250.0, "size mismatch"))
    second = facts.compiles()
    assert second is not None
    assert second.functions == [Compilation("forward (model.py:40)", 8, 0.5, "size mismatch")]


def test_the_settings_of_a_real_dataloader_are_read_off_its_iterator():
    found = loader_info(iter(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4)))))
    assert isinstance(found, DataLoaderInfo)
    assert (found.workers, found.prefetch_factor, found.persistent_workers) == (0, 0, False)
    assert found.cpus >= 1
    assert loader_info(iter([1])) is None
