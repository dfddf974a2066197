"""Replicas that differ, compilations that go on, and what the probe reads for both."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ftmon.protocol.analysis.findings import Finding
from ftmon.protocol.analysis.health.compiles import CompileFacts, Recompilation
from ftmon.protocol.analysis.health.replicas import Replicas
from ftmon.protocol.messages.health import Checksum, Compilation, Compiles, DataLoaderInfo, ParameterSum
from ftmon.trainer.probe.link import slow_facts
from ftmon.trainer.probe.link.slow_facts import SlowFacts, loader_info
from ftmon.trainer.probe.phases.pace import Pace
from ftmon.trainer.probe.rank.trained import Trained
from ftmon.trainer.probe.values import replicas

SAME = ParameterSum("w", 10.0, 4.0)


def fed(*checks: tuple[int, dict[int, ParameterSum]]) -> list[Finding]:
    judge = Replicas()
    for rank in range(4):
        judge.checksum(Checksum(rank, 1, 1.0, [SAME]))
    return [
        found
        for step, sums in checks
        for rank in range(4)
        for found in judge.checksum(Checksum(rank, step, 1.0, [sums.get(rank, SAME), ParameterSum("b", 1.0, 1.0)]))
    ]


def odd(by: float) -> dict[int, ParameterSum]:
    return {2: ParameterSum("w", 10.0 + by, 4.0)}


def test_a_rank_whose_parameter_differs_is_named_at_the_second_check():
    assert fed((10, odd(0.4))) == []
    (found,) = fed((10, odd(0.4)), (20, odd(0.4)))
    assert (found.severity, found.ranks, found.facts.parameter, found.facts.first_step) == ("error", (2,), "w", 10)
    assert found.facts.difference == pytest.approx(0.1)
    assert (found.kind, found.step, found.facts.odd_ranks) == ("replica_divergence", 20, (2,))
    assert (found.facts.parameters, found.facts.checked, found.facts.ranks_total) == (1, 2, 4)


def test_last_bits_are_a_warning_and_rounding_of_the_sum_is_nothing():
    assert fed((10, odd(1e-12)), (20, odd(1e-12))) == []
    (found,) = fed((10, odd(1e-6)), (20, odd(1e-6)))
    assert found.severity == "warning"


def test_replicas_that_are_equal_again_resolve_and_nan_everywhere_is_no_difference():
    found = fed((10, odd(1)), (20, odd(1)), (30, {}), (40, {}), (50, {}))
    assert [one.state for one in found] == ["raised", "resolved"]
    nan = {rank: ParameterSum("w", float("nan"), float("nan")) for rank in range(4)}
    assert fed((10, nan), (20, nan)) == []
    assert len(fed((10, {0: nan[0]}), (20, {0: nan[0]}))) == 1


def test_half_against_half_names_nobody():
    halves = {0: ParameterSum("w", 11.0, 4.0), 1: ParameterSum("w", 11.0, 4.0)}
    (found,) = fed((10, halves), (20, halves))
    assert (found.kind, found.ranks, found.facts.odd_ranks) == ("replica_divergence", (), ())
    assert (found.facts.parameter, found.facts.first_step) == ("w", 10)


def test_every_rank_takes_the_same_steps_and_in_time_every_parameter():
    steps = [step for step in range(1, 1001) if replicas.due(step)]
    assert steps[:7] == [10, 20, 30, 40, 50, 100, 150]
    assert [replicas.turn(step) for step in steps] == list(range(len(steps)))


def taker_of_sums() -> replicas.Replicas:
    rank: Any = SimpleNamespace(rank=0, world_size=2, device=SimpleNamespace(events=None, mark_event=lambda: None))
    tracker: Any = SimpleNamespace(watchers=(), cost_ns=0)
    return replicas.Replicas(rank, tracker, Trained(), Pace())


def wrapped(module: Any) -> Any:
    class Wrapped:
        process_group = SimpleNamespace(size=lambda: 2)
        parameters_to_ignore = ("skipped",)

    found: Any = Wrapped()
    found.module = module
    return found


def test_sums_are_those_of_the_parameters_large_ones_in_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replicas, "_wrapped", [])
    monkeypatch.setattr(replicas, "MOST", 100)
    model = torch.nn.Linear(50, 5)
    model.skipped = torch.nn.Parameter(torch.ones(3))
    model.counts = torch.nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False)
    parallel = wrapped(model)
    replicas.note_parallel(parallel)
    taker = taker_of_sums()
    taker.compute(7)
    assert taker.ready() == []
    for step in (10, 20, 30):
        taker.compute(step)
    found = taker.ready()
    names = [[one.name for one in message.parameters] for message in found]
    assert names == [["weight[0:100]", "bias"], ["weight[100:200]", "bias"], ["weight[200:250]", "bias"]]
    weight = model.weight.detach().double().view(-1)
    assert found[1].parameters[0].total == pytest.approx(float(weight[100:200].sum()))
    assert found[1].parameters[0].norm == pytest.approx(float(weight[100:200].norm()))


def test_shards_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    model = torch.nn.Linear(3, 3)
    model.weight.ds_id = 1
    model.bias.tensor_model_parallel = True
    parallel = wrapped(model)
    monkeypatch.setattr(replicas, "_wrapped", [lambda: parallel])
    taker = taker_of_sums()
    taker.compute(10)
    assert taker.ready() == []
    engine = SimpleNamespace(
        module=torch.nn.Linear(2, 2), zero_optimization_stage=lambda: 3, mpu=None, dp_world_size=2, world_size=2
    )
    trained = Trained()
    trained.engine = lambda: engine
    assert replicas._replicated(trained, 2) == []
    engine.zero_optimization_stage = lambda: 2
    assert [name for name, _ in replicas._replicated(trained, 2)] == ["weight", "bias"]


def test_an_error_in_taking_sums_ends_them_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(replicas, "_replicated", broken)
    monkeypatch.setattr(replicas.guard, "log_error", lambda *_: None)
    taker = taker_of_sums()
    taker.compute(10)
    taker.compute(20)
    assert taker.ready() == []


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
    monkeypatch.setattr(slow_facts, "wall_offset_ns", lambda: 150_000_000_000)
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
