from typing import Any

import pytest
from ftmon.protocol.analysis.stalls.evidence import ROWS, RankProgress
from hypothesis import given
from hypothesis import strategies as st

FLOOR_S = {row.phase: row.computing_s for row in ROWS}
EARLY = next(row for row in ROWS if row.phase == "early")


def learned(make_sim: Any, seconds: list[float], phase: str = "forward") -> RankProgress:
    sim = make_sim()
    progress = RankProgress(sim.now)
    for number, duration in enumerate(seconds, 1):
        progress.step_done(sim.now, sim.step(0, number, [sim.phase(phase, ms=duration * 1000)]))
    progress.beat(sim.now, sim.beat(0, len(seconds) + 1, phase))
    return progress


def test_before_the_first_step_a_rank_may_take_five_minutes(make_sim: Any):
    assert learned(make_sim, []).limit() == 300.0


def test_short_phases_have_their_floor(make_sim: Any):
    for phase in ("data", "forward", "backward", "optimizer"):
        assert learned(make_sim, [0.05] * 20, phase).limit() == FLOOR_S[phase]


def test_long_phases_have_five_times_their_usual_longest(make_sim: Any):
    assert learned(make_sim, [300.0] + [6.0] * 20).limit() == pytest.approx(30.0, rel=0.1)


def test_the_first_step_teaches_nothing_for_long(make_sim: Any):
    assert learned(make_sim, [120.0] + [0.05] * 10).limit() == FLOOR_S["forward"]


def test_a_phase_may_take_twice_as_long_as_in_the_first_step_until_a_later_one_has_it(make_sim: Any):
    minutes = learned(make_sim, [100.0], "optimizer")
    assert minutes.limit() == minutes.working_limit() == 200.0
    assert minutes.asleep_limit() == learned(make_sim, [0.1], "optimizer").asleep_limit(), "a rank that waits"
    assert learned(make_sim, [1.0], "optimizer").limit() == EARLY.computing_s
    assert learned(make_sim, [100.0, 0.1], "optimizer").limit() == EARLY.computing_s
    assert learned(make_sim, [100.0, 100.0], "optimizer").limit() == 500.0


def test_one_long_step_at_most_doubles_what_is_usual(make_sim: Any):
    assert learned(make_sim, [0.1] + [4.0] * 10 + [900.0]).limit() <= 5 * 8.0


def test_what_becomes_usual_is_learned_within_a_few_steps(make_sim: Any):
    assert learned(make_sim, [0.1] + [1.0] * 10 + [20.0] * 6).limit() >= 5 * 20.0


def test_a_long_evaluation_seen_in_heartbeats_is_learned(make_sim: Any):
    sim = make_sim()
    progress = learned(make_sim, [0.1] * 5)
    for start in range(3):
        at = sim.now + start * 1000
        progress.beat(at, sim.beat(0, 6, "eval", moved=True, phase_started=at))
        progress.beat(at + 400, sim.beat(0, 6, "forward", moved=True, phase_started=at + 400))
    progress.beat(sim.now, sim.beat(0, 6, "eval", moved=True))
    assert progress.limit() == pytest.approx(2000, rel=0.1)


def test_heartbeats_with_steps_in_between_teach_nothing_of_the_time_that_passed(make_sim: Any):
    sim = make_sim()
    progress = learned(make_sim, [0.1] * 5)
    for number in range(3):
        at = sim.now + number * 1000
        progress.beat(at, sim.beat(0, 6, "idle", moved=True, phase_started=at))
        progress.step_done(at + 300, sim.step(0, 6, [sim.phase("forward", ms=100)]))
        progress.beat(at + 400, sim.beat(0, 7, "forward", moved=True, phase_started=at + 400))
        progress.step_done(at + 401, sim.step(0, 7, [sim.phase("forward", ms=100)]))
    progress.beat(sim.now, sim.beat(0, 8, "idle", moved=True))
    assert progress.limit() == FLOOR_S["idle"]


@given(st.lists(st.floats(0.001, 100.0), min_size=4, max_size=80))
def test_a_duration_that_was_usual_all_along_is_never_past_the_limit(make_sim: Any, seconds: list[float]):
    steady = [max(seconds)] * 8
    assert learned(make_sim, [1.0, *seconds, *steady]).limit() > max(seconds)


def test_a_heartbeat_without_progress_does_not_make_a_rank_younger(make_sim: Any):
    sim = make_sim()
    progress = RankProgress(sim.now)
    progress.beat(sim.now, sim.beat(0, 1, moved=True))
    for second in range(1, 30):
        progress.beat(sim.now + second, sim.beat(0, 1))
    assert progress.age(sim.now + 30) == 30.0
    assert progress.silence(sim.now + 30) == 1.0
