"""Leaks against what is none: noise, saw teeth, changed levels, longer batches."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from ftmon.protocol.analysis.findings.alerts import AlertStore, DiagnosticRequests
from ftmon.protocol.analysis.kinds import FindingAlerts
from ftmon.protocol.analysis.memory import leak
from ftmon.protocol.analysis.memory.leak import LIKELY, SURE, LeakDetector, footprint
from ftmon.protocol.messages import telemetry
from ftmon.protocol.messages.control import Alert, Arm
from ftmon.protocol.messages.memory import Cause
from hypothesis import given, settings
from hypothesis import strategies as st

MIB = 2**20
GIB = 2**30
H200 = 140 * GIB


class Run:
    """One detector, fed with what ranks hold when their forward begins."""

    def __init__(self, ranks: int = 1, *, cuda: bool = True, total: int = 0) -> None:
        self.store = AlertStore()
        self.alerts = FindingAlerts(self.store)
        self.asks = DiagnosticRequests()
        self.detector = LeakDetector(self.asks)
        self.cuda = cuda
        self.sent: list[Alert] = []
        self.now = 0.0
        for rank in range(ranks):
            device = telemetry.DeviceInfo("cuda" if cuda else "cpu", rank, "", H200 if cuda else 32 * GIB)
            hello = telemetry.Hello(rank, rank, ranks, "host", 1, 1, device, "cuda" if cuda else "glibc", 0.0)
            self.detector.hello(hello)
            self.asks.hello(hello)
        if total:
            self.detector.plan(telemetry.Plan(0, total))

    def step(
        self, number: int, held: float, rank: int = 0, *, in_use: float = -1.0, extra: str = "", batch: int = 2048
    ):
        level = int(held)
        span = telemetry.Span(level, level, level + 2 * GIB)
        other = telemetry.Span(int(in_use), int(in_use), int(in_use)) if in_use >= 0 else span
        resident = None if self.cuda else span
        phases = [telemetry.PhaseRecord("forward", 0, 9000, span if self.cuda else other, span, resident=resident)]
        phases += [telemetry.PhaseRecord(extra, 0, 9000, span, span)] if extra else []
        self.now += 0.1
        step = telemetry.Step(rank, number, self.now, 9000, phases, batch_shape=[4, batch])
        self.sent += self.alerts.put(self.now, self.detector.step(step))
        self.sent += self.store.tick(self.now)

    def steps(self, count: int, held: Callable[[int], float], first: int = 1, **fields: Any) -> "Run":
        """Feed steps in which rank 0 holds ``held(number)`` MiB more than 20 GiB."""
        for number in range(first, first + count):
            self.step(number, 20 * GIB + MIB * held(number), **fields)
        return self

    @property
    def last(self) -> Alert:
        return self.sent[-1]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.3, 200.0), st.floats(0.0, 0.5), st.integers(0, 300))
def test_a_planted_slope_is_found_with_its_rate(seed: int, rate: float, noise: float, start: int) -> None:
    draw = random.Random(seed)
    run = Run().steps(start + 1400, lambda n: max(0, n - start) * rate + draw.uniform(0, noise * rate * 60))
    found = run.last
    assert found.kind == "leak"
    # A slope through 16 noisy values has an error in proportion to the noise: 5 % (1 sigma) at 30 steps' growth.
    assert found.evidence["bytes_per_step"] == pytest.approx(rate * MIB, rel=0.02 + 0.6 * noise)
    assert found.resolved is None


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.sampled_from([1, 100, 3000]), rare=st.booleans())
def test_stationary_noise_is_no_leak(seed: int, size: int, rare: bool) -> None:
    draw = random.Random(seed)
    noise = lambda _: size * (draw.random() < 0.05) if rare else draw.uniform(0, size)  # noqa: E731
    assert Run().steps(2500, noise).sent == []


def test_a_level_that_wanders_is_no_leak_and_on_the_cpu_the_resident_set_alone_is_not_believed():
    # Each value hangs together with those of some ten steps before: what the test's probability does not assume.
    for seed in range(60):
        draw, held, run = random.Random(seed), 0.0, Run()
        for number in range(1, 2000):
            held = 0.9 * held + draw.gauss(0, 100)
            run.step(number, 20 * GIB + MIB * held)
        assert run.sent == []
    alone, both = Run(cuda=False), Run(cuda=False)
    for number in range(1, 200):
        held = 4 * GIB + 8 * MIB * number
        alone.step(number, held, in_use=2 * GIB)
        both.step(number, held, in_use=2 * GIB + 8 * MIB * number)
    assert alone.sent == []
    assert both.last.evidence["measure"] == "resident"
    assert both.asks.drain() == [], "there is no trace of allocations on the CPU"


@settings(max_examples=40, deadline=None)
@given(period=st.integers(2, 56), size=st.integers(20, 8000), seed=st.integers(0, 2**32))
def test_a_saw_tooth_is_no_leak(period: int, size: int, seed: int) -> None:
    draw = random.Random(seed)
    assert Run().steps(2500, lambda n: (n % period) / period * size + draw.uniform(0, 3)).sent == []


@pytest.mark.parametrize("period", [100, 300, 900])
def test_a_saw_tooth_longer_than_a_window_is_told_once_and_ends_when_it_comes_down(period: int) -> None:
    run = Run().steps(6 * period, lambda n: 3000 * (n % period) / period)
    assert len({alert.id for alert in run.sent}) == 1
    assert (run.last.resolved is not None, run.last.count) == (True, 1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(10, 2000), st.integers(-4000, 6000)), max_size=3, unique_by=lambda jump: jump[0] // 250
    ),
    st.integers(0, 2**32),
)
def test_a_level_that_changes_is_no_leak(jumps: list[tuple[int, int]], seed: int) -> None:
    draw = random.Random(seed)
    levels = lambda n: sum(size for at, size in jumps if n >= at) + draw.uniform(0, 2)  # noqa: E731
    assert Run().steps(2300, levels).sent == []


def test_a_leak_is_told_with_its_rate_and_the_step_at_which_the_device_is_full() -> None:
    run = Run(2)
    for number in range(1, 201):
        for rank in range(2):
            run.step(number, 20 * GIB + 8 * MIB * number, rank)
    assert len({alert.id for alert in run.sent}) == 1, "all ranks share one alert"
    alert = run.last
    assert (alert.kind, alert.severity, alert.ranks, alert.resolved) == ("leak", "warning", [0, 1], None)
    # Full: 118 GiB are left beside the peak of 2 GiB above the level, 8 MiB a step.
    assert alert.evidence["full_at_step"] == pytest.approx((140 - 22) * 128, rel=0.01)
    assert alert.evidence["bytes_per_step"] == pytest.approx(8 * MIB, rel=0.01)
    first = run.sent[0].step
    assert first is not None
    assert first <= 80, "two windows of 64 steps that overlap, after the first steps"


def test_where_most_steps_are_coarse_a_leak_is_found_by_the_end_of_their_updates() -> None:
    run, level = Run(), 20 * GIB
    for number in range(1, 96):
        coarse = number > 30 and number % 20 != 0
        level += 2 * MIB
        span = telemetry.Span(level, level, level + GIB)
        phases = [telemetry.PhaseRecord("forward", 0, 9000, span, span, coarse=coarse)]
        phases += [telemetry.PhaseRecord("optimizer", 0, 900, span, span)]
        step = telemetry.Step(0, number, 0.1 * number, 9000, phases, memory_every=20 if number > 30 else 1)
        run.sent += run.alerts.put(0.1 * number, run.detector.step(step))
    assert run.last.kind == "leak"
    assert run.last.evidence["bytes_per_step"] == pytest.approx(2 * MIB, rel=0.01)


def test_a_leak_that_stops_is_resolved_and_one_that_the_run_outlives_is_information():
    run = Run().steps(120, lambda n: 8 * n)
    assert run.last.resolved is None
    assert run.steps(60, lambda _: 8 * 120, first=121).last.resolved is not None
    last = Run(total=500).steps(300, float).last
    assert (last.severity, last.evidence["ends_at_step"]) == ("info", 500)


def test_longer_batches_are_no_leak_and_special_steps_count_for_nothing_unless_each_has_an_evaluation():
    longer, special = Run(), Run()
    for number in range(1, 400):
        longer.step(number, 20 * GIB + 4 * MIB * number, batch=512 + 4 * number)
        special.step(number, 20 * GIB + 9 * MIB * number, extra=("eval", "checkpoint")[number % 2])
    assert longer.sent == special.sent == []
    last = Run().steps(400, lambda number: 9 * number, extra="eval").last
    assert last.kind == "leak"
    assert last.evidence["bytes_per_step"] == pytest.approx(9 * MIB, rel=0.01)


def test_stacks_of_whole_steps_give_a_leak_s_place_and_it_goes_on_under_its_number_after_a_restart():
    run = Run().steps(100, lambda n: 8 * n)
    (asked,) = run.asks.drain()
    assert (asked.verb, asked.ranks) == (Arm(steps=3, reason="leak"), (0,))
    groups = [telemetry.StackGroup(16 * MIB, 2, ["/home/user/loop.py:55 main"], 8 * MIB, 16 * MIB)]
    cause = Cause(0, 103, "", 0.0, "leak", 16 * MIB, groups, armed_us=70_000, usual_us=55_000, read_us=20_000)
    run.sent += run.alerts.put(run.now, run.detector.cause(cause))
    run.steps(60, lambda n: 8 * n, first=101)
    alert = run.last
    assert alert.evidence["place"] == "loop.py:55 main"
    assert (alert.evidence["armed_us"], alert.evidence["usual_us"]) == (70_000, 55_000)
    run = Run().steps(100, lambda n: 8 * n)
    later = Run()
    later.store.restore(run.last)
    restored = later.alerts.restore(run.last)
    assert restored is not None
    later.detector.restore(restored)
    later.steps(60, lambda n: 8 * n, first=101)
    assert {alert.id for alert in later.sent} <= {run.last.id}
    ended = later.steps(60, lambda _: 0, first=161).last
    assert (ended.id, ended.resolved is not None) == (run.last.id, True)


def test_the_stated_significance_is_exact() -> None:
    # Of n values, the number of orders with k inversions follows from that of n - 1; S = pairs - 2 k.
    counts = {0: 1}
    for size in range(2, 17):
        grown: dict[int, int] = {}
        for more in range(size):
            for inversions, count in counts.items():
                grown[inversions + more] = grown.get(inversions + more, 0) + count
        counts = grown

    def chance(least: int) -> float:
        reached = (count for inversions, count in counts.items() if 120 - 2 * inversions >= least)
        return sum(reached) / sum(counts.values())

    assert chance(SURE) == pytest.approx(6e-7, rel=0.1)
    assert chance(LIKELY) == pytest.approx(1 / 175, rel=0.1)
    assert "6e-7" in (leak.__doc__ or "")


def sample(used, *processes):
    return telemetry.DeviceSample("node", "gpu", 0, "H200", 1.0, used, 140 * GIB, processes=list(processes))


def test_each_part_is_one_subtraction_and_with_what_is_reserved_they_add_up_to_what_is_used():
    processes = (
        telemetry.ProcessMemory(11, 36 * GIB, 1),
        telemetry.ProcessMemory(12, 5 * GIB, 0),
        telemetry.ProcessMemory(99, 3 * GIB),
    )
    assert footprint(34 * GIB, sample(45 * GIB, *processes), 1) == (2 * GIB, 8 * GIB, GIB)
    assert footprint(2, sample(GIB, telemetry.ProcessMemory(11, GIB)), 0) is None, "NVML does not list the rank"


@given(*[st.integers(0, 2**40)] * 3, st.integers(1, 2**40))
def test_the_parts_add_up_whatever_was_read_when(reserved, used, other, own):
    found = footprint(reserved, sample(used, telemetry.ProcessMemory(1, own, 0), telemetry.ProcessMemory(2, other)), 0)
    assert found is not None
    assert reserved + sum(found) == used
