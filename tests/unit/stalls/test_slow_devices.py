import random
from typing import Any

import pytest
from ftmon.protocol.analysis import kinds
from ftmon.protocol.analysis.findings.finding import Finding
from ftmon.protocol.analysis.stalls.stragglers import SlowDevices, SlowRankFacts, StragglerFacts
from ftmon.protocol.messages import control
from ftmon.protocol.messages.control import Result
from ftmon.protocol.messages.telemetry import DeviceInfo, DeviceSample, Hello, ProcessMemory
from ftmon.protocol.messages.wire import Frame


def cpu_step(sim: Any, works: dict[int, float], noise: random.Random, slow_at: str = "forward") -> Any:
    """Phases of a step whose wall time collectives make the same on every rank: who is early waits in backward."""
    longest = max(works.values())

    def phases(rank: int, step: int) -> list[Any]:
        work = works[rank] * noise.uniform(0.97, 1.03)
        wait = max(0.0, longest - works[rank])
        shares = {"data": 2.0, "forward": 30.0, "backward": 60.0, "optimizer": 8.0}
        shares[slow_at] += work - 100.0
        return [
            sim.phase(
                name,
                ms=ms + (wait if name == "backward" else 0),
                collective_us=int(wait * 1000) if name == "backward" else 0,
                collectives=1,
            )
            for name, ms in shares.items()
        ]

    return phases


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_an_alert_names_the_slow_rank_its_phase_and_both_figures_and_ends(make_sim: Any, ranks: int, phase: str):
    sim = make_sim(ranks, cuda=False)
    sim.begin()
    noise = random.Random(1)
    usual = dict.fromkeys(range(ranks), 100.0)
    sim.train(1, 19, cpu_step(sim, usual, noise))
    sim.train(20, 48, cpu_step(sim, {**usual, ranks - 1: 200.0}, noise, phase))
    (alert,) = sim.alerts("slow")
    assert alert.rank == ranks - 1
    assert alert.evidence["slow_at"] == phase
    assert alert.evidence["ratio"] == pytest.approx(2.0, rel=0.1)
    assert alert.evidence["others_waited_ms"] - alert.evidence["waited_ms"] == pytest.approx(100, rel=0.2)
    sim.train(49, 80, cpu_step(sim, usual, noise))
    assert sim.alerts("slow")[0].resolved is not None
    assert sim.sends("slow") == 2, "raised once, resolved once"


@pytest.mark.parametrize(("in_loader", "where"), [(0.98, "data"), (0.02, "batch")])
def test_the_loader_is_told_apart_from_work_on_the_batch_it_delivered(make_sim: Any, in_loader: float, where: str):
    sim = make_sim(2, cuda=False)
    sim.begin()
    noise = random.Random(3)
    phases = cpu_step(sim, {0: 100.0, 1: 200.0}, noise, "data")
    for number in range(1, 49):
        for rank in (0, 1):
            made = phases(rank, number)
            step = sim.step(rank, number, made, fetch_us=int(made[0].host_us * in_loader))
            sim.feed(step, sim.beat(rank, number + 1, "data", moved=True))
        sim.tick()
    (alert,) = sim.alerts("slow")
    assert (alert.rank, alert.evidence["slow_at"]) == (1, where)
    assert alert.evidence["own_ms_by_phase"][where] == pytest.approx(100, rel=0.1)


def test_a_rank_that_ended_is_no_longer_compared(make_sim: Any):
    sim = make_sim(4, cuda=False)
    sim.begin()
    noise = random.Random(2)
    sim.train(1, 10, cpu_step(sim, dict.fromkeys(range(4), 100.0), noise))
    sim.fact(0, alive=False, exit_code=0)
    sim.wait(2)
    for step in range(11, 40):
        make = cpu_step(sim, {0: 100.0, 1: 100.0, 2: 100.0, 3: 200.0}, noise)
        for rank in (1, 2, 3):
            sim.feed(sim.step(rank, step, make(rank, step)))
        sim.tick()
    assert [alert.rank for alert in sim.alerts("slow")] == [3]


def test_new_processes_under_the_same_ranks_are_judged_anew(make_sim: Any):
    sim = make_sim(2, cuda=False)
    sim.begin()
    noise = random.Random(2)
    for generation in range(1, 12):
        make = cpu_step(sim, {0: 100.0, 1: 200.0} if generation % 2 else {0: 200.0, 1: 100.0}, noise)
        sim.train(1, 6, make)
        for rank in range(2):
            sim.feed(sim.hello(rank, pid=1000 * generation + rank))
    assert sim.alerts("slow") == []


def test_a_standing_alert_of_a_hub_that_died_ends_once_the_rank_is_as_fast_again(make_sim: Any):
    sim = make_sim(2, cuda=False)
    sim.begin()
    noise = random.Random(2)
    sim.train(1, 40, cpu_step(sim, {0: 100.0, 1: 200.0}, noise))
    (alert,) = sim.alerts("slow")
    later = make_sim(2, cuda=False)
    later.begin()
    later.detectors.restore(Frame(1, sim.now, one) for one in [alert])
    later.train(41, 80, cpu_step(later, {0: 100.0, 1: 100.0}, noise))
    (ended,) = later.alerts("slow")
    assert (ended.id, ended.rank) == (alert.id, 1)
    assert ended.resolved is not None


STACK = """Thread 0x00007f0000000001 (most recent call first):
  File "/home/a/run/train.py", line {line} in {function}
  File "/home/a/run/train.py", line 9 in <module>
"""


def test_a_slow_ranks_stack_is_sampled_a_few_times_and_its_line_named(make_sim: Any):
    sim = make_sim(2, cuda=False)
    sim.begin()
    noise = random.Random(2)
    sim.train(1, 24, cpu_step(sim, {0: 100.0, 1: 200.0}, noise))
    sampled = 0
    for _ in range(40):
        for action in sim.detectors.drain_actions():
            assert (action.verb, action.ranks) == (control.Stacks(quiet=True), (1,))
            sampled += 1
            place = (44, "tokenize") if sampled % 4 else (51, "log")
            text = STACK.format(line=place[0], function=place[1])
            answer = Result("", True, "stacks", "", {"text": text, "thread": "0x00007f0000000001"})
            sim.sent += sim.detectors.stacks(sim.now, action, {1: answer})
        sim.tick()
    assert sampled == 10
    (alert,) = sim.alerts("slow")
    assert alert.evidence["at"] == "train.py:44 in tokenize"


def gpu(rank: int, **fields: Any) -> DeviceSample:
    given = {"uuid": f"GPU-{rank}", "sm_clock_mhz": 1980, "processes": [ProcessMemory(100 + rank, 1, rank)], **fields}
    return DeviceSample("host", "gpu", rank, "H200", 1.0, 1, 2, **given)


def hindrance(devices: SlowDevices, rank: int) -> str:
    """Return what the title of a slow rank says of its device."""
    straggler = StragglerFacts(rank, 9, 8, 2, 1, 0, 0, 3, "forward", {"forward": 2}, {"forward": 1})
    said = kinds.words_of(Finding("straggler", SlowRankFacts(straggler, devices.why(rank)), rank=rank))
    return said.title.partition("; ")[2]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"throttle_reasons": ["thermal (hardware)"]}, "its GPU is throttled: thermal (hardware)"),
        ({"sm_clock_mhz": 1200}, "its GPU is clocked at 1200 MHz, others 1980"),
        ({"processes": [ProcessMemory(7, 1)]}, "its GPU is shared with 1 process of others"),
        ({}, ""),
    ],
)
def test_a_slow_rank_is_told_with_what_hinders_its_gpu(fields: dict[str, Any], words: str):
    hindered = SlowDevices()
    for rank in range(3):
        hindered.hello(
            Hello(rank, rank, 3, "host", 1, 1, DeviceInfo("cuda", rank, "H200", 1, f"GPU-{rank}"), "cuda", 1.0)
        )
        hindered.sample(gpu(rank, **(fields if rank == 1 else {})))
    assert hindrance(hindered, 1) == words
    assert hindrance(hindered, 0) == ""


def test_a_slow_device_is_the_reason_of_slow_computing(make_sim: Any):
    sim = make_sim(2)
    sim.begin()
    sim.feed(gpu(0, uuid=""), gpu(1, uuid="", sm_clock_mhz=900))

    def phases(rank: int, step: int) -> list[Any]:
        work = 60.0 if rank else 30.0
        return [
            sim.phase("forward", ms=work),
            sim.phase("backward", ms=150.0 - work, collectives=4),
            sim.phase("optimizer", ms=10.0),
        ]

    for step in range(1, 40):
        for rank in range(2):
            sim.feed(sim.step(rank, step, phases(rank, step), device_us=160_000))
        sim.tick()
    (alert,) = sim.alerts("slow")
    assert (alert.rank, alert.evidence["slow_at"]) == (1, "forward")
    assert alert.evidence["device"]["sm_clock_mhz"] == 900


def test_what_holds_all_devices_down_alike_is_no_reason_for_one():
    hindered = SlowDevices()
    for rank in range(2):
        hindered.hello(
            Hello(rank, rank, 2, "host", 1, 1, DeviceInfo("cuda", rank, "H200", 1, f"GPU-{rank}"), "cuda", 1.0)
        )
        hindered.sample(gpu(rank, throttle_reasons=["power cap"]))
    assert hindrance(hindered, 1) == ""
