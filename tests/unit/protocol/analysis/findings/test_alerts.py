from typing import Any

import pytest
from ftmon.protocol.analysis.findings.alerts import DiagnosticRequests, next_step
from ftmon.protocol.messages.control import Arm
from ftmon.protocol.messages.memory import Cause
from ftmon.protocol.messages.telemetry import StackGroup

MIB = 2**20
GIB = 2**30
ADAM = "/opt/venv/lib/python3.12/site-packages/torch/optim/adam.py:640 _multi_tensor_adam"


def spike(sim: Any, at: int, size: int = 952 * MIB, phase: str = "optimizer", **fields: Any) -> None:
    sim.begin()
    for step in range(1, at + 1):
        extra = size if step == at else 0
        sim.feed(sim.step(0, step, [sim.phase(phase, 10 * MIB + extra, ms=4.0)], **(fields if step == at else {})))
        sim.tick()


def cause(step: int, size: int, frames: list[str]) -> Cause:
    given: dict[str, Any] = {"armed_us": 12_000, "usual_us": 9000, "read_us": 31_000, "parameter_bytes": 910 * MIB}
    groups = [StackGroup(size - 40 * MIB, 3, frames, 200 * MIB), StackGroup(40 * MIB, 9, ["loop.py:9 step"])]
    return Cause(0, step, "optimizer", 0.0, "spike", size, groups, peak_bytes=7 * GIB, **given)


def test_an_alert_tells_its_cause_once_stacks_came_and_says_so_where_they_have_no_known_pattern(make_sim):
    sim = make_sim()
    spike(sim, 20)
    (before,) = sim.alerts("spike")
    assert "cause_pattern" not in before.evidence
    assert before.evidence["repeats"] is False
    sim.feed(cause(22, 950 * MIB, ["loop.py:31 main", ADAM]))
    (alert,) = sim.alerts("spike")
    assert alert.id == before.id
    evidence = alert.evidence
    assert (evidence["cause_pattern"], evidence["cause_bytes"]) == ("foreach_temporaries", 910 * MIB)
    assert (evidence["armed_us"], evidence["usual_us"], evidence["saves_bytes"]) == (12_000, 9000, 910 * MIB)
    assert evidence["stacks"][0]["pattern"] == "foreach_temporaries"
    sim = make_sim()
    spike(sim, 20)
    sim.feed(cause(22, 50 * MIB, [ADAM]))
    (alert,) = sim.alerts("spike")
    assert "cause_pattern" not in alert.evidence
    assert (alert.evidence["cause_step"], alert.evidence["cause_transient_bytes"]) == (22, 50 * MIB)
    sim.feed(cause(24, 950 * MIB, ["/home/user/loop.py:31 main"]))
    (alert,) = sim.alerts("spike")
    assert "cause_pattern" not in alert.evidence
    assert alert.evidence["stacks"][0]["frames"] == ["/home/user/loop.py:31 main"]


@pytest.mark.parametrize("later", [0, 3])
def test_logits_are_recognized_by_the_batch_of_their_own_step(make_sim: Any, later: int) -> None:
    vocabulary, length = 128_000, 2048
    size = vocabulary * length * 4
    sim = make_sim()
    spike(sim, 20, size, "forward", batch_shape=[1, length])
    for step in range(21, 21 + later):
        sim.feed(sim.step(0, step, [sim.phase("forward", 10 * MIB, ms=4.0)], batch_shape=[1, 512]))
    group = StackGroup(size, 1, ["/home/user/loop.py:31 main"], size)
    sim.feed(Cause(0, 20, "forward", 0.0, "spike", size, [group], peak_bytes=7 * GIB, vocabulary=vocabulary))
    sim.wait(20)
    (alert,) = sim.alerts("spike")
    assert alert.evidence["cause_pattern"] == "fp32_logits"


def test_a_steady_transient_is_explained_for_all_by_one_rank_s_stacks_and_a_repeat_replaces_no_cause(make_sim):
    sim = make_sim(4)
    sim.begin()
    sim.train(1, 10, lambda rank, step: [sim.phase("optimizer", 2 * GIB)])
    asked = sim.detectors.drain_actions()
    assert [(action.verb.name, action.ranks) for action in asked] == [("arm", (0,)), ("compose", (0,))]
    sim.feed(cause(12, 2 * GIB, [ADAM]))
    sim.wait(6)
    (alert,) = sim.alerts("spike")
    assert (alert.ranks, alert.evidence["cause_pattern"]) == ([0, 1, 2, 3], "foreach_temporaries")
    sim = make_sim()
    spike(sim, 20)
    sim.feed(cause(22, 950 * MIB, [ADAM]))
    sim.feed(sim.step(0, 25, [sim.phase("optimizer", 960 * MIB, ms=4.0)]))
    sim.feed(cause(30, 50 * MIB, ["/home/user/loop.py:31 main"]))
    sim.wait(20)
    (alert,) = sim.alerts("spike")
    assert (alert.count, len(alert.evidence["steps"])) == (2, 2)
    assert (alert.evidence["cause_pattern"], alert.evidence["cause_step"]) == ("foreach_temporaries", 22)


@pytest.mark.parametrize(
    ("phase", "fields", "pattern"),
    [
        ("backward", {"batch_shape": [4, 4096]}, "longer_batch"),
        ("optimizer", {"overflow": True}, "loss_scale_overflow"),
        ("checkpoint", {}, "checkpoint_saving"),
    ],
)
def test_what_the_numbers_say_needs_no_stacks(make_sim: Any, phase: str, fields: dict[str, Any], pattern: str) -> None:
    sim = make_sim(cuda=False)
    sim.begin()

    usual, large = ([sim.phase(phase, size * MIB, ms=4.0)] for size in (10, 900))
    for step in range(1, 20):
        sim.feed(sim.step(0, step, usual, batch_shape=[4, 2048]))
    sim.feed(sim.step(0, 20, large, **{"batch_shape": [4, 2048], **fields}))
    (alert,) = sim.alerts("spike")
    assert alert.evidence["cause_pattern"] == pattern
    assert alert.evidence["saves_bytes"] == (890 * MIB if pattern == "longer_batch" else 0)
    assert sim.detectors.drain_actions() == [], "a rank on the CPU has no trace of allocations"


def test_causes_survive_a_restart_of_the_hub(make_sim: Any) -> None:
    sim = make_sim()
    spike(sim, 20)
    sim.feed(cause(22, 950 * MIB, [ADAM]))
    later = make_sim()
    later.detectors.restore(sim.frames)
    later.progress = {0: 0}
    for step in range(23, 40):
        later.feed(later.step(0, step, [later.phase("optimizer", 10 * MIB)]))
    later.feed(later.step(0, 40, [later.phase("optimizer", 960 * MIB, ms=4.0)]))
    (alert,) = later.alerts("spike")
    assert alert.evidence["cause_pattern"] == "foreach_temporaries"


def test_a_rank_is_asked_a_few_times_a_run_each_time_after_a_longer_pause(make_sim: Any) -> None:
    asks = DiagnosticRequests()
    asks.hello(make_sim().hello(0))
    times = [t for t in range(0, 3600, 5) for _ in [asks.spike(float(t), 0, "optimizer", [t])] if asks.drain()]
    assert times == [0, 30, 150]
    for rank in range(64):
        asks.hello(make_sim().hello(rank))
        asks.spike(0.0, rank, "forward", [7])
    assert {action.ranks for action in asks.drain()} == {(1,), (2,), (3,), (4,)}, "few ranks for one phase"


def test_a_spike_that_comes_regularly_is_caught_at_its_next_time_and_then_left_alone(make_sim: Any) -> None:
    sim = make_sim()
    sim.begin()
    asked: list[tuple[int, int]] = []
    for step in range(1, 160):
        sim.feed(sim.step(0, step, [sim.phase("optimizer", 10 * MIB + (step % 25 == 0) * 950 * MIB, ms=4.0)]))
        for action in sim.detectors.drain_actions():
            if isinstance(action.verb, Arm):
                asked.append((step, action.verb.from_step))
        sim.tick(0.05)
        if step == 27:
            sim.feed(cause(26, 12 * MIB, ["loop.py:31 main"]))
        if step == 101:
            sim.feed(cause(100, 950 * MIB, [ADAM]))
    assert asked == [(25, 0), (75, 100)]
    (alert,) = sim.alerts("spike")
    assert alert.evidence["cause_step"] == 100


@pytest.mark.parametrize(("steps", "expected"), [([50, 100, 150], 200), ([7, 8, 9], 0), ([1, 5, 7], 0), ([50, 100], 0)])
def test_a_spike_at_even_distances_is_expected_at_the_next(steps: list[int], expected: int) -> None:
    assert next_step(steps) == expected
