"""Requests to stop that wait for the end of an evaluation."""

from typing import Any

import pytest
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.messages.telemetry import Activity, Checkpoint, Goodbye, Plan, StopAsked
from simulated_run import Sim


def run(**evaluated: float) -> Sim:
    """A rank that has evaluated for 12 s after step 30, and is 3 s into its next evaluation."""
    sim = Sim(2, cuda=False)
    sim.begin()
    sim.train(1, 30)
    seconds = evaluated.get("seconds", 0.0)
    if seconds:
        sim.feed(sim.step(0, 31, [sim.phase("eval", ms=seconds * 1000), sim.phase("forward")]))
    return sim


def asked(sim: Sim, rank: int = 0, phase: str = "eval", **fields: Any) -> StopAsked:
    return StopAsked(rank, sim.now, 40, phase, sim.now - 3.0, grace_s=30.0, **fields)


def stops(alerts: list[Any]) -> list[Alert]:
    return [each for each in alerts if isinstance(each, Alert) and each.evidence.get("finding") == "stop_waits"]


@pytest.mark.parametrize(
    ("seconds", "batches", "title", "severity"),
    [
        (12.0, {}, "acts after the evaluation, about 9.0 s left (grace 30 s)", "info"),
        (0.0, {"done": 25, "total": 100}, "acts after the evaluation, about 9.0 s left (grace 30 s)", "info"),
        (0.0, {"done": 0, "total": 100}, "acts after the evaluation (grace 30 s)", "info"),
        (120.0, {}, "acts after the evaluation, about 1 m 57 s left, but the grace is 30 s", "warning"),
        (
            0.0,
            {"done": 1, "total": 100},
            "acts after the evaluation, about 4 m 57 s left, but the grace is 30 s",
            "warning",
        ),
    ],
    ids=["as the last one", "by its batches", "no batch yet", "too long", "too long by its batches"],
)
def test_a_request_in_an_evaluation_is_reported_at_once_with_the_time_that_is_left(seconds, batches, title, severity):
    sim = run(seconds=seconds)
    (alert,) = stops(sim.feed(asked(sim, **batches)))
    assert (alert.title, alert.severity) == (f"stop requested at step 40: {title}", severity)
    assert "no checkpoint yet" in alert.text
    assert ("--stop-grace" in alert.text) == (severity == "warning")


@pytest.mark.parametrize("resumed", [0, 40])
def test_a_request_before_the_first_step_loses_nothing(resumed):
    sim = Sim(ranks=1)
    sim.feed(Plan(0, sim.now, 100, 1.0, "out", first_step=resumed))
    (alert,) = stops(sim.feed(StopAsked(0, sim.now, 0, "init", sim.now - 3.0, grace_s=30.0)))
    assert alert.title == "stop requested before the first step: nothing is lost"
    assert ("the checkpoint of step 40 is kept" in alert.text) == bool(resumed)
    assert "No step is done, and nothing is lost" in alert.text


def test_what_is_lost_is_told_by_the_latest_checkpoint_whose_time_counts():
    sim = run(seconds=25.0)
    sim.feed(Checkpoint(0, 30, sim.now, "step-30", 1, 20.0))
    (alert,) = stops(sim.feed(asked(sim)))
    assert alert.severity == "warning"
    assert "Saving took 20 s the last time. It is killed before that, and the steps since are lost" in alert.text
    assert "the last checkpoint is of step 30" in alert.text
    assert "--stop-grace 90 " in alert.text
    resumed = run()
    resumed.feed(Plan(0, 100, first_step=20), Activity(0, resumed.now, "evaluation", 40, "", 5, 10, False, 6.0))
    (alert,) = stops(resumed.feed(asked(resumed)))
    assert "about 6.0 s left" in alert.title
    assert "the last checkpoint is of step 20" in alert.text


def test_a_request_waits_for_all_its_ranks_until_they_act_and_a_rank_killed_meanwhile_keeps_its_alert():
    sim = run(seconds=12.0)
    first, second = stops([*sim.feed(asked(sim)), *sim.feed(asked(sim, 1))])
    assert (first.ranks, second.ranks, second.count) == ([0], [0, 1], 1)
    assert stops(sim.feed(Checkpoint(0, 40, sim.now + 9.0, "step-40"))) == []
    (over,) = stops(sim.feed(Goodbye(1, sim.now, 40, "stopped")))
    assert over.resolved
    assert stops(sim.feed(Goodbye(0, sim.now, 40, "stopped"))) == []
    sim = run(seconds=120.0)
    sim.feed(asked(sim))
    sim.fact(0, alive=False, signal=9)
    assert not [each for each in stops(sim.wait(5.0)) if each.resolved]


def test_a_step_under_way_is_reported_if_it_does_not_end_and_not_if_it_does():
    sim = run()
    assert stops([*sim.feed(asked(sim, phase="forward")), *sim.wait(2.0)]) == []
    (alert,) = stops(sim.wait(2.0))
    assert alert.title == "stop requested at step 40: acts after the step under way (grace 30 s)"
    (over,) = stops(sim.feed(sim.step(0, 41)))
    assert over.resolved
    quick = run()
    quick.feed(asked(quick, phase="forward"), quick.step(0, 41))
    assert stops(quick.wait(10.0)) == []
