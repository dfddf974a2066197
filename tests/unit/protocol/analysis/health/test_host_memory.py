"""Host memory that will be full."""

from collections.abc import Iterable

import pytest
from ftmon.protocol.analysis.findings.finding import Finding
from ftmon.protocol.analysis.health.host_memory import HostMemory
from ftmon.protocol.analysis.kinds import words_of
from ftmon.protocol.messages.telemetry import Activity, DeviceSample, Heartbeat, ProcessMemory
from simulated_run import Sim

GIB = 2**30
TOTAL = 64 * GIB


def watched(
    used: Iterable[float], phase: str, activity: Activity | None = None, interval: float = 1.0, own: float = 0.5
) -> list[tuple[int, str]]:
    """Return the sample and state of each finding; ``used``: GiB, a sample each ``interval`` seconds, ``own`` of it.

    A finding names the rank only if the memory is its own.
    """
    detector = HostMemory()
    detector.hello(Sim(1).hello(0))
    found: list[tuple[int, str]] = []
    for place, gib in enumerate(used):
        now = place * interval
        detector.beat(Heartbeat(0, 5, phase, 0.0, 1, now))
        if activity is not None:
            detector.activity(activity)
        ranks = [ProcessMemory(7, int(gib * GIB * own), 0)]
        sample = DeviceSample("host", "host", 0, "host", now, int(gib * GIB), TOTAL, processes=ranks)
        for one in detector.sample(sample):
            found.append((place, one.state))
            if one.state == "raised":
                assert words_of(one).title.startswith("memory of host will be full in")
                assert ("rank 0" in words_of(one).text) == (own > 0.1)
                assert ("logits" in words_of(one).remedy) == (own > 0.1 and phase == "eval")
                assert one.severity == ("error" if own > 0.1 else "warning")
    return found


@pytest.mark.parametrize("interval", [1.0, 1.5])
def test_an_evaluation_that_keeps_its_logits_is_told_long_before_the_kernel_ends_it(interval):
    used = [20 + 1.0 * place for place in range(40)]
    (first,) = watched(used, "eval", interval=interval)
    assert first[1] == "raised"
    assert TOTAL / GIB - used[first[0]] > 30  # samples, at 1 GiB each


def evaluations(*rises: int) -> list[tuple[int, str]]:
    """Return the evaluation and state of each finding; evaluations take 1 GiB a second for ``rises`` seconds."""
    detector, now, used, found = HostMemory(), 0.0, 30, list[tuple[int, str]]()
    detector.hello(Sim(1).hello(0))
    for number, rise in enumerate(rises):
        for phase, gibs in (("forward", [used] * 10), ("eval", range(used, used + rise + 1))):
            for gib in gibs:
                now += 1.0
                detector.beat(Heartbeat(0, 5, phase, 0.0, 1, now))
                ranks = [ProcessMemory(7, (gib - used + 1) * GIB, 0)]
                sample = DeviceSample("host", "host", 0, "host", now, gib * GIB, TOTAL, processes=ranks)
                found += [(number, one.state) for one in detector.sample(sample)]
    return found


def test_an_evaluation_like_the_one_before_is_told_again_only_where_too_little_is_free_for_its_growth():
    told = [(0, "raised"), (1, "resolved")]
    assert evaluations(15, 15, 16) == told
    assert evaluations(15, 15, 25) == [*told, (2, "raised")]
    assert evaluations(32, 12) == [(0, "raised"), (1, "resolved"), (1, "raised")]


def test_memory_that_others_take_is_a_late_warning_and_a_data_set_that_grows_is_told_until_it_stops():
    ((first, _),) = watched([30 + 0.25 * place for place in range(130)], "eval", own=0.01)
    assert TOTAL / GIB - (30 + 0.25 * first) <= 60 * 0.25
    assert watched([30 + 0.25 * place for place in range(60)], "eval", own=0.01) == []
    grows = [40 + 0.1 * second for second in range(150)]
    found = watched([*grows, *[grows[-1]] * 120], "forward")
    assert [state for _, state in found] == ["raised", "resolved"]


@pytest.mark.parametrize("used", [[40, 41, 42] * 7, [20 + 2 * second for second in range(20)]], ids=["free", "take"])
def test_growth_of_a_rank_is_seen_whether_other_programs_free_memory_or_take_more(used):
    detector = HostMemory()
    detector.hello(Sim(1).hello(0))
    found = list[Finding]()
    for second in range(20):
        detector.beat(Heartbeat(0, 5, "eval", 0.0, 1, second))
        ranks = [ProcessMemory(7, int((1 + second / 2) * GIB), 0), ProcessMemory(8, GIB)]
        sample = DeviceSample("host", "host", 0, "host", second, used[second] * GIB, TOTAL, processes=ranks)
        found += detector.sample(sample)
    assert [one.facts.growing_rank for one in found] == [0]


@pytest.mark.parametrize(("first", "at_once"), [(0, 6), (4, 1)], ids=["uneven", "sampled-late"])
def test_growth_of_a_rank_is_its_own_though_it_is_less_even_or_sampled_later_than_the_hosts(first, at_once):
    detector = HostMemory()
    detector.hello(Sim(1).hello(0))
    found = list[Finding]()
    for second in range(14):
        detector.beat(Heartbeat(0, 5, "eval", 0.0, 1, second))
        ranks = [ProcessMemory(7, (1 + second // at_once * at_once) * GIB, 0)] if second >= first else []
        sample = DeviceSample("host", "host", 0, "host", second, (40 + second) * GIB, TOTAL, processes=ranks)
        found += detector.sample(sample)
    assert [(one.facts.growing_rank, one.severity) for one in found] == [(0, "error")]


def test_memory_that_rises_at_once_steady_memory_and_an_evaluation_that_ends_in_time_are_fine():
    assert watched([40 + 8.0 * (second > 30) + 0.001 * second for second in range(90)], "forward") == []
    used = [20 + 1.0 * second for second in range(20)]
    assert watched(used, "eval", Activity(0, 10.0, "evaluation", done=90, total=100, seconds=9.0)) == []
    assert watched([50 + (second % 3) * 0.1 for second in range(300)], "forward") == []
    assert watched([2 + 0.1 * second for second in range(100)], "eval") == []


@pytest.mark.parametrize("phase", ["init", "checkpoint"])
def test_loading_and_saving_take_much_and_stop(phase):
    assert watched([20 + 1.0 * second for second in range(40)], phase) == []
