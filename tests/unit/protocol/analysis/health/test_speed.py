"""Detectors of a run's own series: losses, gradient norms, the loss scaler, waiting for data."""

import math
import random
import sys
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from ftmon.protocol.analysis.findings.finding import Finding
from ftmon.protocol.analysis.health.monitor import HealthMonitor
from ftmon.protocol.analysis.health.nonfinite import UNEXAMINED
from ftmon.protocol.analysis.health.series import Join
from ftmon.protocol.analysis.health.speed import CompileFacts, Recompilation, workers_needed
from ftmon.protocol.analysis.kinds import words_of
from ftmon.protocol.messages import telemetry
from ftmon.trainer.probe.link import publisher
from ftmon.trainer.probe.link.publisher import SlowFacts, loader_info


def compiled(*steps: int, name: str = "forward (model.py:40)", reason: str = "size mismatch") -> telemetry.Compiles:
    return telemetry.Compiles(0, 1.0, 9, [telemetry.Compilation(name, step, 0.5, reason) for step in steps])


def test_a_function_that_is_compiled_again_and_again_is_told_with_the_reason():
    judge = Recompilation()
    assert judge.compiles(compiled(1, 1, 1, 1, 1, 1)) == [], "warm-up"
    assert judge.compiles(compiled(*range(2, 40), reason="")) == [], "never compiled before"
    assert [one for number in range(30) for one in judge.compiles(compiled(2, 50, 400, name=f"f{number}"))] == []
    assert judge.compiles(compiled(2, 5, 9)) == []
    (found,) = judge.compiles(compiled(12))
    assert (found.kind, found.severity, found.ranks, found.step) == ("recompilation", "warning", (0,), 12)
    assert found.facts == CompileFacts("forward (model.py:40)", 4, 2.0, "size mismatch", 2)
    assert [one.state for one in judge.step(200)] == ["resolved"]


def test_dynamos_own_metrics_are_read_once_each(monkeypatch):
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
    assert (first.total, first.functions) == (1, [telemetry.Compilation("forward (model.py:40)", 1, 0.5)])
    assert facts.compiles() is None
    kept.append(metric("forward", 250.0, "size mismatch"))
    assert facts.compiles().functions == [telemetry.Compilation("forward (model.py:40)", 8, 0.5, "size mismatch")]


def test_the_settings_of_a_real_dataloader_are_read_off_its_iterator():
    found = loader_info(iter(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4)))))
    assert isinstance(found, telemetry.DataLoaderInfo)
    assert (found.workers, found.prefetch_factor, found.persistent_workers) == (0, 0, False)
    assert found.cpus >= 1
    assert loader_info(iter([1])) is None


ZERO = telemetry.Span(0, 0, 0)


def hello(rank: int = 0, ranks: int = 1, pid: int = 100, **fields) -> telemetry.Hello:
    kind = fields.pop("kind", "cpu")
    return telemetry.Hello(
        rank, rank, ranks, "host", pid + rank, 7, telemetry.DeviceInfo(kind, 0, "d", 1), "glibc", 1e9, **fields
    )


def step(number: int, rank: int = 0, data_ms: float = 1.0, **fields) -> telemetry.Step:
    phases = [
        telemetry.PhaseRecord("data", 0, int(data_ms * 1000), ZERO, ZERO),
        telemetry.PhaseRecord("forward", 0, 99_000, ZERO, ZERO, device_us=fields.pop("busy_us", None)),
    ]
    return telemetry.Step(rank, number, 1e9, int(data_ms * 1000) + 99_000, phases, **fields)


def fed(steps: Iterable[telemetry.Step], *hellos: telemetry.Hello) -> list[Finding]:
    monitor = HealthMonitor()
    found = [one for each in hellos or (hello(),) for one in monitor.hello(each)]
    for each in steps:
        found += monitor.step(each)
    return found


def kinds(found: list[Finding], state: str = "raised") -> list[str]:
    return [one.kind for one in found if one.state == state]


def falling(at: int, seed: int = 0) -> float:
    return (2.0 + 3.0 * math.exp(-at / 100)) * (1 + random.Random(seed * 10_000 + at).gauss(0, 0.05))


def series(
    count: int, loss: Callable[[int], float] = falling, **fields: Callable[[int], float]
) -> list[telemetry.Step]:
    return [
        step(at, loss=loss(at), **{name: make(at) for name, make in {"lr": lambda _: 1e-4, **fields}.items()})
        for at in range(1, count)
    ]


def test_nan_names_the_first_rank_the_step_and_the_last_good_values():
    steps = [step(at, rank, loss=2.0 + at / 100, grad_norm=0.5, lr=1e-4) for at in range(1, 30) for rank in (0, 1)]
    steps += [step(30, 0, loss=2.3, grad_norm=0.5), step(30, 1, loss=math.nan, grad_norm=0.5)]
    steps += [step(at, rank, loss=math.nan) for at in range(31, 100) for rank in (0, 1)]
    found = [one for one in fed(steps, hello(0, 2), hello(1, 2)) if one.kind == "nan_loss"]
    first = found[0].facts
    assert (first.first_rank, first.first_step, first.last_good_step) == (1, 30, 29)
    assert first.last_good_loss == pytest.approx(2.29)
    assert found[-1].ranks == (0, 1)
    assert (found[0].severity, found[0].ranks, found[0].step) == ("error", (1,), 30)
    assert found[-1].facts.steps >= 100
    assert all(one.facts.finite_elsewhere for one in found), "kept for the whole run"
    assert (first.value, first.first_ranks, first.last_good_grad_norm, first.ranks_total) == ("nan", (1,), 0.5, 2)


def test_the_first_rank_is_that_of_the_lowest_step_and_a_norm_that_is_nan_on_all_at_once_names_all():
    steps = [step(at, rank, loss=1.0) for at in range(1, 5) for rank in (0, 1)]
    late = [step(6, 0, loss=math.nan), step(5, 1, loss=math.nan), step(6, 1, loss=math.nan)]
    found = fed([*steps, *late], hello(0, 2), hello(1, 2))
    assert (found[-1].facts.first_rank, found[-1].facts.first_step) == (1, 5)
    raised = [one for one in found if one.state == "raised"]
    assert [one.facts.first_rank for one in raised] == [1], "no rank is named before all have reported the step"
    steps = [step(at, rank, loss=1.0, grad_norm=1.0 if at < 5 else math.nan) for at in range(1, 8) for rank in (1, 0)]
    (found,) = fed(steps, hello(0, 2), hello(1, 2))
    facts = found.facts
    expected = ("nan_gradient", (0, 1), (0, 1), False)
    assert (found.kind, found.ranks, facts.first_ranks, facts.finite_elsewhere) == expected
    assert (facts.value, facts.first_step, facts.last_good_step) == ("nan", 5, 4)


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_a_loss_that_is_nan_in_the_step_that_ruins_the_weights_of_all_ranks_is_named_in_any_order(ranks):
    rows = {
        0: step(5, 0, loss=1.0, signs=telemetry.Signs(weights="nan")),
        1: step(5, 1, loss=math.nan, signs=telemetry.Signs(weights="nan")),
    }
    found = fed([*(step(at, rank, loss=1.0) for at in range(1, 5) for rank in (0, 1)), *map(rows.get, ranks)])
    assert ("nan_loss", 1) in [(one.kind, getattr(one.facts, "first_rank", None)) for one in found]


def test_a_loss_over_no_labels_is_no_nan_loss_though_the_labels_of_the_next_steps_are_not_examined():
    empty = telemetry.Signs(labelled=1, unlabelled=1)
    steps = [step(at, loss=1.0) for at in range(1, 5)] + [step(5, loss=math.nan, signs=empty)]
    steps += [step(at, loss=math.nan) for at in range(6, 15)] + [step(15, loss=1.0)]
    assert "nan_loss" not in kinds(fed(steps))
    lost = [
        one for one in fed(steps[:-1] + [step(at, loss=math.nan) for at in range(15, 40)]) if one.kind == "nan_loss"
    ]
    assert lost[0].facts.first_step == 5 + UNEXAMINED + 1


@pytest.mark.parametrize("how", ["time", "end"])
def test_nan_is_raised_though_the_other_rank_reports_no_more(how):
    monitor = HealthMonitor()
    for rank in (0, 1):
        monitor.hello(hello(rank, 2))
    for each in (step(1, 0, loss=1.0), step(1, 1, loss=1.0), step(2, 0, loss=math.nan)):
        assert monitor.step(each) == []
    sample = telemetry.DeviceSample("host", "host", 0, "d", 1e9 + 1.0, 1, 2)
    assert monitor.sample(sample) == []
    found = monitor.rank_ended(1) if how == "end" else monitor.sample(msgspec.structs.replace(sample, time=1e9 + 5.2))
    assert [(one.kind, one.facts.first_rank) for one in found] == [("nan_loss", 0)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_no_number_counts_unless_the_scaler_skipped_that_update(value):
    skipped = [step(at, loss=1.0, grad_norm=value if at == 5 else 1.0, overflow=at == 5) for at in range(1, 20)]
    assert fed(skipped) == []
    taken = [step(at, loss=1.0, grad_norm=value if at == 5 else 1.0) for at in range(1, 20)]
    assert kinds(fed(taken)) == ["nan_gradient"]
    steps = [step(at, loss=value if at == 5 else 1.0) for at in range(1, 40)]
    assert kinds(fed(steps)) == kinds(fed(steps), "resolved") == ["nan_loss"], "after twenty finite steps"
    assert kinds(fed(steps[:24]), "resolved") == []


@pytest.mark.parametrize(
    "after",
    [lambda at: 4 * math.exp(min(3.0, at / 15)), lambda at: 10.8, lambda at: 2 * (1 + 3 * min(1.0, at / 120))],
    ids=["exponential", "back to chance", "slow"],
)
def test_a_loss_that_rises_and_stays_is_divergence(after):
    found = fed(series(500, lambda at: falling(at) if at < 300 else after(at - 300)))
    assert kinds(found) == ["diverging_loss"]
    facts = found[0].facts
    assert 290 <= facts.since_step <= 420
    assert facts.lowest == pytest.approx(2.2, abs=0.4)
    assert found[0].severity in ("warning", "error")
    assert (facts.rollouts, facts.stepped, facts.lr) == (False, False, 1e-4)


def cyclic(at: int) -> float:
    return 1 - abs(2 * (at / 600 % 1) - 1)


def norm(at: int) -> float:
    return math.exp(random.Random(at).gauss(0, 0.3))


def noisy(at: int, level: float, share: float = 0.02) -> float:
    return level * (1 + random.Random(at).gauss(0, share))


def flat(at: int) -> float:
    return noisy(at, 2.0 + 3 * math.exp(-min(at, 500) / 100))


RESTARTED = {"lr": lambda at: 1e-4 * (1.02 - at % 400 / 400)}
ONCE, TWICE = ["diverging_loss"], ["diverging_loss"] * 2
SERIES: dict[str, tuple[int, dict[str, Callable[[int], float]], list[str]]] = {
    "ordinary": (900, {}, []),
    "spikes": (900, {"loss": lambda at: falling(at) * (8 if at % 90 < 3 else 1)}, []),
    "curriculum": (900, {"loss": lambda at: falling(at) * (1.4 if at > 300 else 1)}, []),
    "exponential noise": (900, {"loss": lambda at: random.Random(at).expovariate(1.0)}, []),
    "around zero": (900, {"loss": lambda at: 0.05 * random.Random(at).gauss(0, 1)}, []),
    "generator": (900, {"loss": lambda at: 0.7 + at / 800 + random.Random(at).gauss(0, 0.2)}, []),
    "mixture": (900, {"loss": lambda at: 1.0 if random.Random(at).random() < 0.7 else 5.0}, []),
    "memorised": (900, {"loss": lambda at: 3 * math.exp(-at / 60 + random.Random(at).gauss(0, 0.4))}, []),
    "cyclic rate": (
        *(2400, {"loss": lambda at: falling(at) * (1 + cyclic(at)), "lr": lambda at: 1e-4 * (0.05 + cyclic(at))}, []),
    ),
    "warm restarts": (
        2400,
        {"loss": lambda at: falling(at) * (1.2 - at % 500 / 500), "lr": lambda at: 1e-4 * (1.01 - at % 500 / 500)},
        [],
    ),
    "two tasks in turn": (2400, {"loss": lambda at: falling(at) * (4 if at // 60 % 2 else 1)}, []),
    "target networks": (
        *(2400, {"loss": lambda at: falling(at) * (1 + 2 * math.exp(-(at % 200) / 50) * (at > 200))}, []),
    ),
    "swings and rises slowly": (2400, {"loss": lambda at: falling(at) + 0.004 * at + 0.6 * math.sin(at / 30)}, []),
    "comes down after a restart of the rate": (
        *(700, {"loss": lambda at: falling(at) + 3 * math.exp(-(at - 400) / 30) * (at >= 400), **RESTARTED}, []),
    ),
    "does not come down": (700, {"loss": lambda at: falling(at) + 3 * (at >= 400), **RESTARTED}, ONCE),
    "as high again": (1400, {"loss": lambda at: falling(at) * (5 if 300 <= at < 420 or 800 <= at < 920 else 1)}, ONCE),
    "higher": (1400, {"loss": lambda at: falling(at) * (5 if 300 <= at < 420 else 12 if at >= 800 else 1)}, TWICE),
    "longer": (1400, {"loss": lambda at: falling(at) * (5 if 300 <= at < 420 or at >= 800 else 1)}, TWICE),
    "plateau in the tail of a schedule": (4500, {"loss": flat, "lr": lambda at: 1e-4 if at < 800 else 1e-5}, []),
    "a power law goes on falling": (4500, {"loss": lambda at: noisy(at, 8.0 * at**-0.1)}, []),
    "spikes of the norm": (400, {"grad_norm": lambda at: norm(at) * (1000 if at % 50 == 0 else 1)}, []),
    "a few in a row": (400, {"grad_norm": lambda at: norm(at) * (1000 if at % 50 in (0, 1, 3, 4, 5, 7) else 1)}, []),
    "solved": (
        *(600, {"loss": lambda at: 3 * math.exp(-at / 40), "grad_norm": lambda at: 1.0 if at < 300 else 1e-9}, []),
    ),
    "empty batches": (900, {"grad_norm": lambda at: 1e-7 if random.Random(at).random() < 0.5 else norm(at)}, []),
    "two levels of the norm": (
        *(1500, {"grad_norm": lambda at: norm(at) * (40 if at > 200 and at % 200 < 30 else 1)}, ["gradient_explosion"]),
    ),
}
"""Series with the findings that they raise; most are healthy, or move as the run has always moved."""


@pytest.mark.parametrize(("count", "fields", "raised"), SERIES.values(), ids=SERIES)
def test_a_series_raises_only_what_is_wrong_with_it(count, fields, raised):
    assert kinds(fed(series(count, **fields))) == raised


def test_a_rise_that_other_things_than_a_divergence_explain_is_information():
    found = fed(series(900, lambda at: falling(at) + 1.7 * min(1.0, max(0, at - 300) / 150)))
    assert {(one.kind, one.severity) for one in found} == {("diverging_loss", "info")}
    assert not found[0].facts.rollouts
    policy = [step(at, loss=0.3 + 10 * min(1.0, max(0, at - 200) / 100), lr=1e-6) for at in range(1, 500)]
    for one in policy:
        one.phases.insert(1, telemetry.PhaseRecord("generate", 0, 50_000, ZERO, ZERO))
    found = [one for one in fed(policy) if one.kind == "diverging_loss"]
    assert {one.severity for one in found} == {"info"}
    assert found[0].facts.rollouts


def harder(at: int) -> float:
    return falling(at) * (2.2 if at >= 400 else 1)


def test_a_step_to_another_level_is_a_warning_once_it_has_stayed():
    found = [one for one in fed(series(1100, harder)) if one.kind == "diverging_loss"]
    assert (found[0].severity, found[0].facts.stepped) == ("info", True)
    assert 490 < found[0].step < 530
    assert found[-1].severity == "warning"
    back = fed(series(1100, lambda at: harder(at) * (0.4 if at > 600 else 1)))
    assert {one.severity for one in back} == {"info"}
    assert back[-1].state == "resolved"


def test_a_loss_that_turns_while_the_rate_rises_is_a_divergence_and_one_that_came_back_is_resolved():
    steps = series(500, lambda at: falling(at) + 8 * min(1.0, max(0, at - 150) / 60), lr=lambda at: 1e-6 * at)
    assert [(one.kind, one.severity) for one in fed(steps) if one.state == "raised"] == [("diverging_loss", "error")]
    back = fed(series(700, lambda at: falling(at) * (5 if 300 <= at < 400 else 1)))
    assert kinds(back) == kinds(back, "resolved") == ["diverging_loss"]


def test_a_loss_that_leaves_its_range_with_a_rate_that_jumps_is_raised_at_once_with_its_step():
    steps = series(60, lambda at: noisy(at, 1e6) if at > 41 else falling(at), lr=lambda at: 300.0 if at > 40 else 1e-2)
    (found,) = [one for one in fed(steps) if one.kind == "diverging_loss"]
    assert (found.severity, found.facts.since_step) == ("error", 42)
    assert found.step < 56
    assert "resume from a checkpoint before step 41" in words_of(found).remedy


def test_losses_that_alternate_between_engines_are_not_judged_as_one_series():
    rows = [
        one for at in range(1, 400) for one in (step(at, loss=1.0), step(at, loss=9.0 if at > 200 else 1.0, lr=1e-4))
    ]
    assert kinds(fed(rows)) == []
    both = [telemetry.Update("generator", loss=math.nan), telemetry.Update("critic", loss=1.0)]
    folded = [step(at, loss=9.0 if at > 200 else 1.0, updates=[] if at < 3 else both[1:] * 2) for at in range(1, 400)]
    assert kinds(fed(folded)) == []
    assert kinds(fed([*folded, step(400, loss=1.0, updates=both)])) == ["nan_loss"]
    join = Join()
    join.ranks = {0}
    for row in rows[:20]:
        join.add(row)
    assert join.alternating


def test_a_loss_that_never_fell_says_so_and_a_second_plateau_is_compared_with_the_start_of_the_run():
    (found,) = fed(series(4500, flat))
    assert (found.kind, found.severity, found.facts.never_fell) == ("loss_plateau", "info", False)
    (found,) = fed(series(3000, lambda at: 5.0 + random.Random(at).gauss(0, 0.05)))
    facts = found.facts
    assert (found.kind, found.severity, facts.never_fell) == ("loss_plateau", "info", True)
    assert (facts.loss, facts.first_loss) == (pytest.approx(5.0, abs=0.05), pytest.approx(5.0, abs=0.05))

    found = fed(series(4500, lambda at: noisy(at, 8.0 if at < 30 else 3.0 if at < 2000 else 2.9, 0.005)))
    seen = [(one.kind, one.state) for one in found]
    assert seen == [("loss_plateau", state) for state in ("raised", "resolved", "raised")]
    assert found[2].facts.first_loss == pytest.approx(8.0, rel=0.01)
    assert not found[2].facts.never_fell


@pytest.mark.parametrize(
    ("after", "kind"),
    [
        (lambda n: n * 100, "gradient_explosion"),
        (lambda n: n * 1e-6, "gradient_collapse"),
        (lambda n: 0.0, "gradient_collapse"),
    ],
)
def test_norms_that_explode_or_collapse_are_found_and_resolve(after, kind):
    steps = series(400, grad_norm=lambda at: after(norm(at)) if 200 <= at < 260 else norm(at))
    found = [one for one in fed(steps) if one.kind == kind]
    assert [one.state for one in found] == ["raised", "resolved"]
    assert found[0].facts.since_step == 200
    assert found[0].facts.usual == pytest.approx(1.0, rel=0.3)


def test_norms_of_micro_batches_without_labels_are_no_collapse():
    signs = telemetry.Signs(labelled=1, unlabelled=1)
    steps = [
        msgspec.structs.replace(each, grad_norm=0.0, signs=signs) if each.step > 200 else each
        for each in series(400, grad_norm=norm)
    ]
    assert "gradient_collapse" not in kinds(fed(steps))


def test_a_scaler_at_its_floor_is_told_from_one_that_skips_too_often():
    def steps(scale: float, share: float) -> list[telemetry.Step]:
        r = random.Random(1)
        return [
            step(at, loss=2.0, loss_scale=scale if at > 100 else 4096.0, overflow=at > 100 and r.random() < share)
            for at in range(1, 200)
        ]

    floor = fed(steps(1.0, 1.0))
    assert (kinds(floor), floor[0].severity) == (["scaler_floor"], "error")
    assert kinds(fed(steps(256.0, 0.4))) == ["scaler_skipping"]
    assert kinds(fed(steps(128.0, 1.0), hello(deepspeed_config={"fp16": {"min_loss_scale": 128}}))) == ["scaler_floor"]
    back = steps(256.0, 0.4) + [step(at, loss=2.0, loss_scale=256.0) for at in range(200, 260)]
    assert kinds(fed(back), "resolved") == ["scaler_skipping"]
    search = [step(at, loss=2.0, loss_scale=2.0 ** max(8, 32 - at), overflow=at < 24) for at in range(1, 300)]
    assert kinds(fed(search)) == [], "it looks for its scale at the start"
    rare = [step(at, loss=2.0, loss_scale=1024.0, overflow=at % 100 == 0) for at in range(1, 1000)]
    assert kinds(fed(rare)) == []


def test_a_run_that_waits_for_data_is_told_with_what_would_hide_it():
    loader = telemetry.DataLoaderInfo(workers=0, cpus=16)
    found = fed([step(at, data_ms=150) for at in range(1, 100)], hello(loader=loader))
    assert kinds(found) == ["input_bound"]
    facts = found[0].facts
    assert facts.share == pytest.approx(150 / 249, abs=0.01)
    assert (found[0].severity, found[0].ranks) == ("warning", (0,))
    assert (facts.ranks_bound, facts.ranks_total, facts.cuda) == (1, 1, False)
    assert (facts.loader, facts.workers_needed) == (loader, 3)
    workers = [step(at, data_ms=800 if at % 8 == 0 else 1) for at in range(1, 200)]
    assert kinds(fed(workers)) == ["input_bound"], "each worker's batch is late"
    gone = [step(at, data_ms=150 if at < 100 else 1) for at in range(1, 300)]
    assert kinds(fed(gone), "resolved") == ["input_bound"]


def test_the_first_batch_of_an_epoch_and_a_wait_that_the_gpu_does_not_see_are_no_findings():
    assert kinds(fed([step(at, data_ms=5000 if at % 50 == 0 else 2) for at in range(1, 300)])) == []
    refilled = [step(at, data_ms=400 if at % 300 < 20 else 2) for at in range(1, 900)]
    assert kinds(fed(refilled)) == [], "a buffer that is filled again"
    busy = [step(at, data_ms=60, busy_us=155_000, device_us=159_000) for at in range(1, 300)]
    assert kinds(fed(busy, hello(kind="cuda"))) == []
    idle = [step(at, data_ms=60, busy_us=95_000, device_us=159_000) for at in range(1, 300)]
    assert kinds(fed(idle, hello(kind="cuda"))) == ["input_bound"]
    steps = [step(at, rank, data_ms=200 if rank == 2 else 1) for at in range(1, 200) for rank in range(4)]
    assert kinds(fed(steps, *(hello(rank, 4) for rank in range(4)))) == [], "one rank of four"


@pytest.mark.parametrize(
    ("workers", "wait", "whole", "needed"),
    [(0, 100, 200, 2), (0, 300, 400, 4), (4, 50, 150, 6), (2, 100, 100, 0), (8, 190, 200, 160)],
)
def test_the_workers_that_hide_a_wait(workers, wait, whole, needed):
    assert workers_needed(telemetry.DataLoaderInfo(workers=workers), wait * 1e3, whole * 1e3) == needed


def test_another_job_of_the_run_begins_anew_and_a_rank_that_ended_is_not_waited_for():
    monitor = HealthMonitor()
    monitor.hello(hello())
    for each in [step(at, loss=math.nan if at > 5 else 1.0) for at in range(1, 10)]:
        monitor.step(each)
    assert kinds(monitor.hello(hello(pid=900)), "resolved") == ["nan_loss"]
    assert fed([step(at, loss=9.0, grad_norm=9.0) for at in range(1, 50)], hello(), hello(pid=900)) == []
    join = Join()
    join.ranks = {0, 1}
    assert join.add(step(1, 0, loss=1.0)) == []
    assert [row.loss for row in join.add(step(1, 1, loss=3.0))] == [2.0]
    join.drop(1)
    assert [row.step for row in join.add(step(2, 0, loss=1.0))] == [2]
