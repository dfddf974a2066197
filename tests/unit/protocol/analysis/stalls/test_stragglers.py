"""Numbers of ranks in, stragglers out."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from ftmon.protocol.analysis import kinds
from ftmon.protocol.analysis.findings.finding import Finding
from ftmon.protocol.analysis.stalls import stragglers
from ftmon.protocol.analysis.stalls.slow_ranks import SlowDevices, SlowRankFacts
from ftmon.protocol.analysis.words import Words
from ftmon.protocol.messages import control
from ftmon.protocol.messages.control import Result
from ftmon.protocol.messages.telemetry import DeviceInfo, DeviceSample, Hello, PhaseRecord, ProcessMemory, Span, Step
from ftmon.protocol.messages.wire import Frame
from simulated_run import Sim

PARTS = {"idle": 2.0, "data": 8.0, "forward": 30.0, "backward": 50.0, "optimizer": 10.0}
NOTHING = Span(0, 0, 0)
TRANSFER = 3.0

Parts = dict[str, float]
Make = Callable[[int, int], Parts]


def play(
    make: Make,
    *,
    ranks: int = 2,
    steps: int = 60,
    judge: stragglers.Stragglers | None = None,
    first: int = 1,
    more: Callable[[int, int], dict[str, Any]] = lambda rank, step: {},
) -> tuple[stragglers.Stragglers, list[stragglers.StragglerFinding]]:
    """Run steps in which ``make`` says how many milliseconds a rank works in each phase; the others wait."""
    judge = judge or stragglers.Stragglers()
    found: list[stragglers.StragglerFinding] = []
    t = 0.0
    for step in range(first, first + steps):
        works = {rank: make(rank, step) for rank in range(ranks)}
        wall = max(sum(work.values()) for work in works.values()) + TRANSFER
        t += wall / 1e3
        for rank, work in works.items():
            own = {name: round(ms * 1e3) for name, ms in work.items()}
            waited = round(wall * 1e3) - sum(own.values())
            found += judge.step(
                t, rank, step, stragglers.Work(own, waited, True, round(wall * 1e3), **more(rank, step))
            )
    return judge, found


def slow(rank: int, **excess: float) -> Make:
    """Ranks that work alike, within 3 %, but ``rank``, by ``excess`` milliseconds of some phases."""
    noise = random.Random(1)

    def make(one: int, step: int) -> Parts:
        more = excess if one == rank else {}
        return {name: ms * noise.uniform(0.97, 1.03) + more.get(name, 0.0) for name, ms in PARTS.items()}

    return make


def said(found: list[stragglers.StragglerFinding]) -> Words:
    return kinds.words_of(Finding("straggler", SlowRankFacts(found[0].facts)))


def drawn(noise: random.Random, seconds: list[float]) -> Make:
    """Ranks each with its own draw."""
    return lambda rank, step: {"idle": 1e3 * noise.choice(seconds)}


@pytest.mark.parametrize(("excess", "steps", "found"), [(100.0, 20, 1), (50.0, 20, 0), (50.0, 60, 1), (20.0, 300, 0)])
def test_the_smaller_the_excess_the_longer_it_must_last(excess, steps, found):
    _, findings = play(slow(1, forward=excess), steps=steps)
    assert len(findings) == found


def test_a_rank_grossly_slower_is_found_after_four_long_steps_and_four_that_differ_make_none():
    judge, found = play(slow(-1), steps=40)
    _, found = play(slow(1, data=900.0), steps=5, judge=judge, first=41)
    assert [(one.facts.rank, one.facts.slow_at, one.facts.steps) for one in found] == [(1, "data", 4)]
    assert found[0].facts.own_us == pytest.approx(1_000_000, rel=0.05), "the steps before do not count"
    _, found = play(lambda rank, step: {"data": 500.0 + 8_000.0 * rank}, steps=6)
    assert [finding.facts.rank for finding in found] == [1], "from the start, after the steps of warm-up"
    assert play(lambda rank, step: {"data": 500.0 + rank * (1_000.0, 8_000.0)[step % 2]}, steps=9)[1] == []


@pytest.mark.parametrize("ranks", [2, 8])
def test_random_lengths_of_two_values_do_not_make_a_straggler_of_who_draws_the_longer_one_four_times(ranks):
    alarms = 0
    for seed in range(40):
        alarms += bool(play(drawn(random.Random(seed), [0.5, 0.5, 0.5, 2.0]), ranks=ranks, steps=100)[1])
    assert alarms <= 1


def test_a_rank_slow_in_all_phases_is_slow_everywhere_and_of_two_the_one_others_wait_for_is_found():
    _, found = play(slow(1, **{name: 2 * ms for name, ms in PARTS.items() if ms >= 8}))
    assert found[0].facts.slow_at == stragglers.EVERYWHERE
    assert said(found).title.startswith("rank 1 is slow everywhere: 29")
    base = slow(2, forward=200.0)
    _, found = play(lambda rank, step: base(rank, step) | ({"data": 80.0} if rank == 1 else {}), ranks=4)
    assert [finding.facts.rank for finding in found] == [2]


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("sigma", [0.1, 0.25, 0.5, 1.0])
def test_ranks_that_draw_their_work_at_random_are_never_stragglers(ranks, sigma):
    noise = random.Random(7)
    _, found = play(lambda rank, step: {"forward": 400 * noise.lognormvariate(0, sigma)}, ranks=ranks, steps=500)
    assert found == []


def test_steps_of_any_length_by_each_ranks_own_draw_and_more_micro_steps_are_no_stragglers():
    for seed in range(20):
        assert play(drawn(random.Random(seed), [0.1, 0.1, 0.1, 0.2, 0.5, 1, 2, 4, 8]), steps=100)[1] == []
    for excess, findings in ((90.0, 0), (400.0, 1)):
        _, found = play(slow(1, forward=excess), more=lambda rank, step: {"micro_steps": 2 if rank else 1})
        assert len(found) == findings


def test_a_straggler_ends_once_it_is_as_fast_and_spells_of_slowness_raise_a_handful_of_findings():
    judge, found = play(slow(1, data=150.0), steps=40)
    assert [finding.state for finding in found] == ["raised"]
    _, found = play(slow(-1), steps=60, judge=judge, first=41)
    assert [finding.state for finding in found] == ["resolved"]
    assert judge.standing == {}
    _, found = play(slow(0, data=150.0), steps=60, judge=judge, first=101)
    assert [(finding.state, finding.facts.rank) for finding in found] == [("raised", 0)]

    def make(rank: int, step: int) -> Parts:
        return {"forward": 300.0 + (400.0 if step // 30 % 2 == rank else 0.0)}

    _, found = play(make, steps=3000)
    assert len(found) <= 4


@pytest.mark.parametrize(
    ("waited", "walls"), [(0, (205_000, 205_000)), (5000, (105_000, 205_000))], ids=["is not seen", "in no common step"]
)
def test_ranks_whose_waiting_supports_no_verdict_are_not_compared(waited, walls):
    judge = stragglers.Stragglers()
    for step in range(1, 80):
        for rank, own in enumerate((100_000, 200_000)):
            assert judge.step(step, rank, step, stragglers.Work({"forward": own}, waited, True, walls[rank])) == []


def test_steps_with_an_evaluation_on_one_rank_are_left_out():
    def make(rank: int, step: int) -> Parts:
        return {"forward": 100.0, "eval": 300.0 if rank == 0 else 0.0}

    _, found = play(make, steps=200, more=lambda rank, step: {"comparable": rank != 0})
    assert found == []
    base = slow(-1)
    longer = {"idle": 900.0}
    _, found = play(lambda rank, step: base(rank, step) | (longer if rank == 0 and step % 5 == 0 else {}), steps=400)
    assert found == [], "nor do a few long steps make a straggler where the phase is not known"


def test_a_lost_step_or_a_rank_that_comes_and_goes_stops_nothing():
    judge = stragglers.Stragglers()
    make = slow(1, forward=150.0)
    found: list[stragglers.StragglerFinding] = []
    for step in range(1, 60):
        for rank in range(2):
            if (rank, step) in ((1, 9), (0, 14)):
                continue
            own = {name: round(ms * 1e3) for name, ms in make(rank, step).items()}
            found += judge.step(step, rank, step, stragglers.Work(own, 256_000 - sum(own.values()), True, 256_000))
    assert [finding.facts.rank for finding in found] == [1]
    ended = judge.remove(1)
    assert (ended and ended.state) == "resolved"
    assert judge.step(60.0, 0, 60, stragglers.Work({"forward": 1}, 0, True, 1)) == []


def test_the_words_hold_the_figures_and_what_is_known_of_the_cause():
    _, found = play(slow(1, idle=100.0), more=lambda rank, _: {"cpu": 100_000, "tokens": 900 if rank else 512})
    title, text, *_ = said(found)
    assert title == "rank 1 is slow between phases: 102 ms a step, others 2 ms"
    assert "Of a step of 203 ms rank 1 works 200 ms and waits 3 ms for other ranks" in text
    assert "the others work 100 ms and wait 103 ms" in text
    assert "used no CPU for 100 ms" in text
    assert "900 tokens, the others' 512" in text


def record(name: str, host: int, device: int | None = None, **fields: Any) -> PhaseRecord:
    return PhaseRecord(name, 0, host, NOTHING, NOTHING, device, **fields)


def test_waiting_is_collectives_on_the_cpu_and_on_a_device_what_was_measured_and_is_taken_off():
    phases = [record("data", 100), record("forward", 200), record("backward", 500, collective_us=400)]
    work = stragglers.work_of(Step(0, 3, 0.0, 1000, phases), device=False)
    assert work.own == {"data": 100, "forward": 200, "backward": 100, "idle": 200}
    assert (work.waited, work.wall, work.measured, work.comparable) == (400, 1000, True, True)
    phases = [record("idle", 40, 45), record("data", 10, 0), record("forward", 5, 30)]
    phases += [record("backward", 5, 90, waited_us=50), record("optimizer", 3, 5)]
    work = stragglers.work_of(Step(0, 3, 0.0, 170, phases, device_us=170), device=True)
    assert work.own == {"idle": 35, "data": 10, "forward": 30, "backward": 40, "optimizer": 5}
    assert (work.waited, work.measured, work.comparable) == (50, True, True)
    phases = [record("data", 10, 0), record("forward", 5, 30), record("backward", 5, 100, collectives=3)]
    work = stragglers.work_of(Step(0, 3, 0.0, 160, phases, device_us=160), device=True)
    assert work.own == {"idle": 20, "data": 10, "forward": 30}
    assert (work.waited, work.measured, work.comparable) == (100, False, True)


@pytest.mark.parametrize(
    "phases",
    [
        [record("forward", 5, 30, collectives=2), record("backward", 5, 90, collectives=3)],  # parameters are gathered
        [record("forward", 5, 30), record("backward", 5, 90)],  # nothing says where waiting is
        [record("forward", 5, 30), record("eval", 5, 30), record("backward", 5, 90, collectives=3)],
    ],
)
def test_on_a_device_a_step_that_supports_no_verdict_is_not_compared(phases):
    assert not stragglers.work_of(Step(0, 3, 0.0, 160, phases, device_us=160), device=True).comparable
    assert not stragglers.work_of(Step(0, 3, 0.0, 160, phases), device=True).comparable, "nor one without device times"


def cpu_step(sim: Sim, works: dict[int, float], noise: random.Random, slow_at: str) -> Any:
    """Phases of a step whose wall time collectives make the same on every rank: who is early waits in backward."""
    longest = max(works.values())

    def phases(rank: int, step: int) -> list[Any]:
        work = works[rank] * noise.uniform(0.97, 1.03)
        wait = max(0.0, longest - works[rank])
        shares = {"data": 2.0, "forward": 30.0, "backward": 60.0, "optimizer": 8.0}
        shares[slow_at] += work - 100.0
        waits = {name: wait if name == "backward" else 0.0 for name in shares}
        return [
            sim.phase(name, ms=ms + waits[name], collective_us=int(waits[name] * 1000), collectives=1)
            for name, ms in shares.items()
        ]

    return phases


def begun(ranks: int = 2, *, cuda: bool = False) -> Sim:
    sim = Sim(ranks, cuda=cuda)
    sim.begin()
    return sim


def train(sim: Sim, first: int, last: int, slow: int = -1, at: str = "forward") -> None:
    """Run steps in which a rank works twice as long as the others, in one phase."""
    works = {rank: 200.0 if rank == slow else 100.0 for rank in range(sim.count)}
    sim.train(first, last, cpu_step(sim, works, random.Random(2), at))


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_an_alert_names_the_slow_rank_its_phase_and_both_figures_and_ends(ranks, phase):
    sim = begun(ranks)
    train(sim, 1, 19)
    train(sim, 20, 48, ranks - 1, phase)
    (alert,) = sim.alerts("slow")
    assert (alert.rank, alert.evidence["slow_at"]) == (ranks - 1, phase)
    assert alert.evidence["ratio"] == pytest.approx(2.0, rel=0.1)
    assert alert.evidence["others_waited_ms"] - alert.evidence["waited_ms"] == pytest.approx(100, rel=0.2)
    train(sim, 49, 80)
    assert sim.alerts("slow")[0].resolved is not None
    assert sim.sends("slow") == 2, "raised once, resolved once"


@pytest.mark.parametrize(("in_loader", "where"), [(0.98, "data"), (0.02, "batch")])
def test_the_loader_is_told_apart_from_work_on_the_batch_it_delivered(in_loader, where):
    sim = begun()
    phases = cpu_step(sim, {0: 100.0, 1: 200.0}, random.Random(3), "data")
    for number in range(1, 49):
        for rank in (0, 1):
            made = phases(rank, number)
            step = sim.step(rank, number, made, fetch_us=int(made[0].host_us * in_loader))
            sim.feed(step, sim.beat(rank, number + 1, "data", moved=True))
        sim.tick()
    (alert,) = sim.alerts("slow")
    assert (alert.rank, alert.evidence["slow_at"]) == (1, where)
    assert alert.evidence["own_ms_by_phase"][where] == pytest.approx(100, rel=0.1)


def test_new_processes_are_judged_anew_and_a_rank_that_ended_is_no_longer_compared():
    sim = begun()
    for generation in range(1, 12):
        train(sim, 1, 6, generation % 2)
        sim.feed(*(sim.hello(rank, pid=1000 * generation + rank) for rank in range(2)))
    assert sim.alerts("slow") == []
    sim = begun(4)
    train(sim, 1, 10)
    sim.fact(0, alive=False, exit_code=0)
    sim.wait(2)
    make = cpu_step(sim, {0: 100.0, 1: 100.0, 2: 100.0, 3: 200.0}, random.Random(2), "forward")
    for step in range(11, 40):
        sim.feed(*(sim.step(rank, step, make(rank, step)) for rank in (1, 2, 3)))
        sim.tick()
    assert [alert.rank for alert in sim.alerts("slow")] == [3]


def test_a_standing_alert_of_a_hub_that_died_ends_once_the_rank_is_as_fast_again():
    sim, later = begun(), begun()
    train(sim, 1, 40, 1)
    (alert,) = sim.alerts("slow")
    later.detectors.restore([Frame(1, sim.now, alert)])
    train(later, 41, 80)
    (ended,) = later.alerts("slow")
    assert (ended.id, ended.rank, ended.resolved is not None) == (alert.id, 1, True)


STACK = """Thread 0x00007f0000000001 (most recent call first):
  File "/home/a/run/train.py", line {line} in {function}
  File "/home/a/run/train.py", line 9 in <module>
"""


def test_a_slow_ranks_stack_is_sampled_a_few_times_and_its_line_named():
    sim = begun()
    train(sim, 1, 24, 1)
    sampled = 0
    for _ in range(40):
        for action in sim.detectors.drain_actions():
            assert (action.verb, action.ranks) == (control.Stacks(quiet=True), (1,))
            sampled += 1
            line, function = (44, "tokenize") if sampled % 4 else (51, "log")
            text = STACK.format(line=line, function=function)
            answer = Result("", True, "stacks", "", {"text": text, "thread": "0x00007f0000000001"})
            sim.sent += sim.detectors.stacks(sim.now, action, {1: answer})
        sim.tick()
    assert sampled == 10
    (alert,) = sim.alerts("slow")
    assert alert.evidence["at"] == "train.py:44 in tokenize"


def gpu(rank: int, **fields: Any) -> DeviceSample:
    given = {"uuid": f"GPU-{rank}", "sm_clock_mhz": 1980, "processes": [ProcessMemory(100 + rank, 1, rank)], **fields}
    return DeviceSample("host", "gpu", rank, "H200", 1.0, 1, 2, **given)


def hindrance(slow: dict[str, Any], others: dict[str, Any]) -> str:
    """Return what the title of slow rank 1 says of its device."""
    devices = SlowDevices()
    for rank in range(3):
        device = DeviceInfo("cuda", rank, "H200", 1, f"GPU-{rank}")
        devices.hello(Hello(rank, rank, 3, "host", 1, 1, device, "cuda", 1.0))
        devices.sample(gpu(rank, **(slow if rank == 1 else others)))
    straggler = stragglers.StragglerFacts(1, 9, 8, 2, 1, 0, 0, 3, "forward", {"forward": 2}, {"forward": 1})
    said = kinds.words_of(Finding("straggler", SlowRankFacts(straggler, devices.why(1)), rank=1))
    return said.title.partition("; ")[2]


CAPPED = {"throttle_reasons": ["power cap"]}


@pytest.mark.parametrize(
    ("slow", "others", "words"),
    [
        ({"throttle_reasons": ["thermal (hardware)"]}, {}, "its GPU is throttled: thermal (hardware)"),
        ({"sm_clock_mhz": 1200}, {}, "its GPU is clocked at 1200 MHz, others 1980"),
        ({"processes": [ProcessMemory(7, 1)]}, {}, "its GPU is shared with 1 process of others"),
        ({}, {}, ""),
        ({}, CAPPED, ""),
        (CAPPED, CAPPED, ""),
    ],
)
def test_a_slow_rank_is_told_with_what_hinders_its_gpu_and_not_the_others(slow, others, words):
    assert hindrance(slow, others) == words


def test_a_slow_device_is_the_reason_of_slow_computing():
    sim = begun(cuda=True)
    sim.feed(gpu(0, uuid=""), gpu(1, uuid="", sm_clock_mhz=900))
    for step in range(1, 40):
        for rank, work in enumerate((30.0, 60.0)):
            backward = sim.phase("backward", ms=150.0 - work, collectives=4)
            phases = [sim.phase("forward", ms=work), backward, sim.phase("optimizer", ms=10.0)]
            sim.feed(sim.step(rank, step, phases, device_us=160_000))
        sim.tick()
    (alert,) = sim.alerts("slow")
    assert (alert.rank, alert.evidence["slow_at"]) == (1, "forward")
    assert alert.evidence["device"]["sm_clock_mhz"] == 900
