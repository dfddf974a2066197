import random
from typing import Any

import pytest
from ftmon.protocol.telemetry import DeviceInfo, DeviceSample, Hello, ProcessMemory
from ftmon.trainer.hub.detectors import slow
from ftmon.trainer.hub.detectors.hindered import Hindered


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
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_slow_rank_is_found_by_its_own_work_with_what_it_is_slow_at(make_sim: Any, ranks: int, phase: str):
    sim = make_sim(ranks, cuda=False)
    sim.begin()
    noise = random.Random(1)
    usual = dict.fromkeys(range(ranks), 100.0)
    sim.train(1, 19, cpu_step(sim, usual, noise))
    sim.train(20, 32, cpu_step(sim, {**usual, ranks - 1: 200.0}, noise, phase))
    (alert,) = sim.alerts("slow")
    assert alert.rank == ranks - 1
    assert alert.evidence["slow_at"] == (phase if phase != "forward" else "forward")
    assert alert.evidence["ratio"] == pytest.approx(2.0, rel=0.1)
    assert alert.title.startswith(f"rank {ranks - 1} is slow at {phase}: ")
    assert alert.step is not None
    assert alert.step <= 29, "within ten steps"
    sim.train(33, 50, cpu_step(sim, usual, noise))
    assert sim.alerts("slow")[0].resolved is not None


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_equal_ranks_under_noise_are_never_slow(make_sim: Any, ranks: int):
    sim = make_sim(ranks, cuda=False)
    sim.begin()
    noise = random.Random(7)

    def phases(rank: int, step: int) -> list[Any]:
        return [sim.phase(name, ms=20 * noise.lognormvariate(0, 0.25)) for name in slow.PARTS]

    sim.train(1, 60, phases)
    assert sim.alerts("slow") == []


def test_a_few_slow_steps_are_not_a_slow_rank(make_sim: Any):
    sim = make_sim(4, cuda=False)
    sim.begin()
    noise = random.Random(3)
    usual = dict.fromkeys(range(4), 100.0)
    for start in range(1, 60, 12):
        sim.train(start, start + 8, cpu_step(sim, usual, noise))
        sim.train(start + 9, start + 11, cpu_step(sim, {**usual, 2: 400.0}, noise))
    assert sim.alerts("slow") == []


def test_wall_time_that_collectives_equalise_does_not_hide_or_blame_anybody(make_sim: Any):
    sim = make_sim(4, cuda=False)
    sim.begin()
    noise = random.Random(5)
    works = {0: 100.0, 1: 100.0, 2: 190.0, 3: 100.0}
    sim.train(1, 20, cpu_step(sim, works, noise))
    (alert,) = sim.alerts("slow")
    assert alert.rank == 2


def test_on_a_gpu_the_device_time_of_forward_counts_and_backward_does_not(make_sim: Any):
    sim = make_sim(4)
    sim.begin()

    def phases(rank: int, step: int) -> list[Any]:
        forward = 55.0 if rank == 1 else 30.0
        # The fast ranks' backward holds the wait for the slow one, on the device.
        return [
            sim.phase("data", ms=1.0),
            sim.phase("forward", ms=5.0, device_us=int(forward * 1000)),
            sim.phase("backward", ms=5.0, device_us=int((140 - forward) * 1000)),
        ]

    sim.train(1, 20, phases)
    (alert,) = sim.alerts("slow")
    assert (alert.rank, alert.evidence["slow_at"]) == (1, "forward")


def test_microseconds_of_difference_are_no_matter(make_sim: Any):
    sim = make_sim(2, cuda=False)
    sim.begin()
    sim.train(1, 20, lambda rank, step: [sim.phase("data", ms=0.1 if rank else 0.5), sim.phase("forward", ms=0.2)])
    assert sim.alerts("slow") == []


def test_a_run_of_one_rank_is_never_slow(make_sim: Any):
    sim = make_sim(1, cuda=False)
    sim.begin()
    sim.train(1, 30)
    assert sim.alerts("slow") == []


def test_a_rank_that_ended_no_longer_holds_the_comparison_up(make_sim: Any):
    sim = make_sim(4, cuda=False)
    sim.begin()
    noise = random.Random(2)
    sim.train(1, 10, cpu_step(sim, dict.fromkeys(range(4), 100.0), noise))
    sim.fact(0, alive=False, exit_code=0)
    sim.wait(2)
    for step in range(11, 30):
        make = cpu_step(sim, {0: 100.0, 1: 100.0, 2: 100.0, 3: 200.0}, noise)
        for rank in (1, 2, 3):
            sim.feed(sim.step(rank, step, make(rank, step)))
        sim.tick()
    assert [alert.rank for alert in sim.alerts("slow")] == [3]


def gpu(rank: int, **fields: Any) -> DeviceSample:
    given = {"uuid": f"GPU-{rank}", "sm_clock_mhz": 1980, "processes": [ProcessMemory(100 + rank, 1, rank)], **fields}
    return DeviceSample("host", "gpu", rank, "H200", 1.0, 1, 2, **given)


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
    hindered = Hindered()
    for rank in range(3):
        hindered.hello(
            Hello(rank, rank, 3, "host", 1, 1, DeviceInfo("cuda", rank, "H200", 1, f"GPU-{rank}"), "cuda", 1.0)
        )
        hindered.sample(gpu(rank, **(fields if rank == 1 else {})))
    assert hindered.why(1).words == words
    assert hindered.why(0).words == ""


def test_what_holds_all_devices_down_alike_is_no_reason_for_one():
    hindered = Hindered()
    for rank in range(2):
        hindered.hello(
            Hello(rank, rank, 2, "host", 1, 1, DeviceInfo("cuda", rank, "H200", 1, f"GPU-{rank}"), "cuda", 1.0)
        )
        hindered.sample(gpu(rank, throttle_reasons=["power cap"]))
    assert hindered.why(1).words == ""
