"""What two runs differ by: planted regressions are found, equal runs raise no alarm, noise is named."""

import math
import random

import pytest
from ftmon.protocol.analysis.report import Measure, Side, compare, comparison_lines, side_of_ranks, side_of_rows
from ftmon.protocol.analysis.sweep.summary import figures
from ftmon.protocol.messages.telemetry import PhaseRecord, Span, Step
from ftmon.protocol.sweep.rows import PhaseFigures, RankRow, Row

GIB = 1 << 30
GATE = 0.03


def run(seed: int, slower: float = 1.0, larger: float = 1.0, scatter: float = 0.03, steps: int = 300) -> Side:
    """Return a run whose steps scatter, neighbours alike, with an outlier now and then."""
    draw = random.Random(seed)
    drift, taken, losses = 0.0, list[Step](), list[float]()
    for number in range(steps):
        drift = 0.7 * drift + draw.gauss(0, scatter * math.sqrt(1 - 0.7**2))
        us = round(200_000 * slower * (1 + drift) * (2.5 if draw.random() < 0.01 else 1))
        peak = round(20 * GIB * larger)
        record = PhaseRecord("backward", 0, us, Span(GIB, GIB, peak), Span(GIB, GIB, peak + GIB))
        losses.append(2.0 + draw.gauss(0, 0.02))
        taken.append(Step(0, number + 1, 0.0, us, [record], tokens=4096))
    return side_of_ranks("run", [figures(0, taken, 5)], losses)


def alarms(*, slower: float = 1.0, larger: float = 1.0) -> int:
    found = [compare(run(seed), run(1000 + seed, slower, larger), GATE) for seed in range(60)]
    return sum(bool(one.regressions) for one in found)


def test_equal_runs_raise_an_alarm_in_less_than_1_of_20_and_a_regression_of_the_gate_in_19():
    assert alarms() <= 3
    assert alarms(slower=1.03) >= 57
    assert alarms(larger=1.03) >= 57


def test_an_improvement_or_a_run_without_a_gate_is_no_regression_and_too_much_noise_is_not_judged():
    found = compare(run(1), run(2, slower=0.9, larger=0.9), GATE)
    assert found.regressions == []
    assert {one.name for one in found.differences if one.judgement == "better"} >= {"step time", "highest peak"}
    assert compare(run(1), run(2, slower=1.5)).regressions == []
    before, after = (Side("c", {"loss": Measure(value, 0.001, "loss", gated=True)}) for value in (-1.0, -1.5))
    assert compare(after, before, GATE).regressions == ["loss +33.3%"]
    assert compare(before, after, GATE).differences[0].judgement == "better", "a negative loss that falls"
    found = compare(run(1, scatter=0.5, steps=30), run(2, scatter=0.5, steps=30), GATE)
    assert "step time" in found.undecided
    lines = comparison_lines(found, GATE)
    assert "no regression of 3% found; cannot tell of step time" in lines[-1]
    assert next(line for line in lines if line.startswith("  step time ")).endswith("  cannot tell: too noisy")


def test_a_configuration_that_fails_now_and_one_without_a_figure_in_common_are_reported() -> None:
    before = side_of_rows("c", [Row({}, "done", 0.0, ranks=[RankRow(0, 3, 100.0)])])
    after = side_of_rows("c", [Row({}, "out-of-memory", 0.0)])
    assert compare(before, after, GATE).regressions == ["out-of-memory, was done"]
    found = compare(Side("a", {}), Side("b", {}), GATE)
    assert comparison_lines(found, GATE)[-1] == "  nothing to compare: no figure in common"


def test_the_scatter_of_repeats_is_the_noise_and_configuration_and_alerts_that_differ_are_listed():
    rows = [
        Row({}, "done", 0.0, repeat=repeat, ranks=[RankRow(0, 3, ms, phases={"forward": PhaseFigures(GIB)})])
        for repeat, ms in enumerate((100.0, 110.0, 90.0))
    ]
    side = side_of_rows("c", rows)
    assert side.measures["step time"].error == pytest.approx(10 / math.sqrt(3))
    assert side.measures["highest peak"].error == 0
    measures = {"step time": Measure(100.0, 0.1, "ms", gated=True)}
    before = Side("a", measures, {"zero.stage": "2", "same": "1"}, {"spike": 1})
    after = Side("b", measures, {"zero.stage": "3", "same": "1", "new": "x"}, {"spike": 4, "leak": 1})
    found = compare(before, after, GATE)
    assert found.settings == [("zero.stage", "2", "3"), ("new", "-", "x")]
    assert found.alerts == [("leak", 0, 1), ("spike", 1, 4)]
    assert "no regression of 3%" in comparison_lines(found, GATE)[-1]
