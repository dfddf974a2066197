"""What the detectors of failures, deaths and out-of-memory errors find: kinds, ranks and facts."""

from typing import Any

import pytest
from ftmon.protocol.analysis.deaths.detector import (
    HELD_S,
    DeathDetector,
    Ended,
    EndedEarly,
    Followed,
    Follower,
    LastLog,
    ProcessDeath,
)
from ftmon.protocol.analysis.findings.finding import Condition, Finding, Resolution
from ftmon.protocol.analysis.hub_facts import NoStepFacts
from ftmon.protocol.analysis.oom.detector import OomDetector, Uncaught
from ftmon.protocol.messages.control import RankState
from ftmon.protocol.messages.hosts import Job
from ftmon.protocol.messages.telemetry import Failure, Goodbye, LogLine, Step

LOST = "RuntimeError: Connection closed by peer"


def gone(rank: int, signal: int | None = None, code: int | None = None) -> RankState:
    return RankState(rank, "gone", 0.0, pid=100 + rank, signal=signal, exit_code=code)


def test_a_death_is_found_with_how_the_process_ended_and_what_followed_from_it():
    deaths = DeathDetector(OomDetector())
    deaths.log(LogLine(1, 0.0, "err", "last words"))
    assert deaths.failure(10.0, Failure(0, 7, "backward", 10.0, LOST), set()) == [], "it waits for its cause"
    found, follows = deaths.process_gone(10.5, gone(1, signal=11), set())
    assert (found.condition, found.ranks, found.severity) == (Condition("died", 1), (1,), "error")
    assert found.facts == ProcessDeath(101, None, 11, "", ["last words"])
    assert (follows.condition, follows.state) == (found.condition, "added")
    assert follows.facts == Followed({0: Follower(0.0, [LOST])})
    (later,) = deaths.process_gone(11.5, gone(0, code=1), set())
    assert later.facts == Followed({0: Follower(0.0, [LOST, Ended(1, None)])})
    assert [one.facts for one in deaths.tick(10.6 + HELD_S)] == [LastLog(["last words"])]


def test_a_rank_that_the_launcher_ends_after_one_that_lost_its_peer_follows_from_it():
    deaths = DeathDetector(OomDetector())
    deaths.failure(10.0, Failure(1, 7, "backward", 10.0, LOST), set())
    assert deaths.process_gone(10.4, gone(1, code=1), set()) == []
    found, follows = deaths.process_gone(10.8, gone(0, signal=15), set())
    assert (found.condition, found.ranks, found.severity) == (Condition("failure", 1, "backward"), (1,), "error")
    assert list(follows.facts.followers) == [0]
    assert follows.facts.followers[0].events == [Ended(None, 15)]
    assert deaths.tick(20.0) == []


GLOO = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
    "  what():  [enforce fail at /gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4. Mismatch?",
)
REASON = "gloo::EnforceNotMet: op.preamble.length <= op.nbytes. 8 vs 4. Mismatch?"


def test_a_rank_that_a_library_aborts_is_the_cause_with_the_library_s_reason_although_its_peer_ended_before():
    deaths = DeathDetector(OomDetector())
    for line in (*GLOO, *["frame"] * 20):
        deaths.log(LogLine(0, 0.0, "err", line))
    deaths.failure(10.0, Failure(1, 7, "generate", 10.0, LOST), set())
    assert deaths.process_gone(10.4, gone(1, code=1), set()) == []
    found, follows = deaths.process_gone(10.8, gone(0, signal=6), set())
    assert (found.condition, found.facts.reason, found.facts.generating) == (Condition("died", 0), REASON, True)
    assert list(follows.facts.followers) == [1]


def test_a_reason_that_is_read_after_the_death_is_added_to_it_with_what_followed():
    deaths = DeathDetector(OomDetector())
    (found,) = deaths.process_gone(10.0, gone(0, code=-6), set())
    assert found.facts.reason == ""
    deaths.log(LogLine(0, 0.0, "err", GLOO[0]))
    deaths.log(LogLine(0, 0.0, "err", GLOO[1]))
    deaths.failure(10.5, Failure(1, 7, "eval", 10.5, LOST, "File, line 2, in generate\n"), set())
    explained, last, followed = deaths.tick(11.0, over=True)
    assert (explained.condition, explained.state, explained.facts.reason) == (found.condition, "explained", REASON)
    assert explained.facts.generating
    assert (last.facts, list(followed.facts.followers)) == (LastLog(list(GLOO)), [1])


def test_what_a_library_wrote_is_not_the_reason_of_another_ending():
    deaths = DeathDetector(OomDetector())
    for line in GLOO:
        deaths.log(LogLine(0, 0.0, "err", line))
    (found,) = deaths.process_gone(10.0, gone(0, signal=9), set())
    assert found.facts.reason == ""
    assert [one.state for one in deaths.tick(20.0)] == ["added"]


@pytest.mark.parametrize(("peer_gone_at", "signal"), [(10.8, 15), (None, 15), (10.4, 11)])
def test_a_death_that_may_have_come_first_or_that_no_launcher_causes_is_the_alert(peer_gone_at: Any, signal: int):
    deaths = DeathDetector(OomDetector())
    deaths.failure(10.0, Failure(1, 7, "backward", 10.0, LOST), set())
    if peer_gone_at is not None:
        deaths.process_gone(peer_gone_at, gone(1, code=1), set())
    found, follows = deaths.process_gone(10.8, gone(0, signal=signal), set())
    assert (found.condition, found.severity) == (Condition("died", 0), "error")
    assert list(follows.facts.followers) == [1]


@pytest.mark.parametrize(
    ("ended", "phase", "asked", "end", "succeeded", "resolves"),
    [
        (gone(1, signal=15), "forward", set(), 20.0, True, True),
        (gone(1, code=1), "idle", set(), 20.0, True, True),
        (gone(1, code=1), "forward", set(), 20.0, True, False),
        (gone(1, signal=15), "forward", set(), 20.0, False, False),
        (gone(1, signal=15), "forward", set(), 75.0, True, False),
        (gone(1, signal=15), "forward", {1}, 20.0, True, False),
        (gone(1, signal=9), "idle", set(), 20.0, True, False),
        (gone(1, code=-11), "idle", set(), 20.0, True, False),
    ],
)
def test_a_rank_that_was_ended_by_what_had_started_it_is_no_trouble_of_a_run_that_succeeds(
    ended: RankState, phase: str, asked: set[int], end: float, succeeded: bool, resolves: bool
):
    deaths = DeathDetector(OomDetector())
    (found,) = deaths.process_gone(10.0, ended, asked, phase=phase)
    over = [one for one in deaths.tick(end, over=True, succeeded=succeeded) if one.state == "resolved"]
    assert [(one.condition, one.facts) for one in over] == [(found.condition, Resolution("run_ended"))] * resolves


def test_ranks_that_ended_early_are_found_with_the_step_of_each():
    deaths = DeathDetector(OomDetector(), lambda: {2: 6, 1: 5})
    deaths.failure(10.0, Failure(0, 7, "backward", 10.0, LOST), set())
    (found,) = deaths.tick(11.0, over=True)
    assert (found.condition, found.ranks) == (Condition("ended_early"), (1, 2))
    assert found.facts == EndedEarly({1: 5, 2: 6}, 0, LOST, "", [])


@pytest.mark.parametrize("lost_first", [True, False], ids=["in an earlier poll", "in the same poll"])
def test_a_rank_whose_script_had_ended_is_the_one_that_ended_early_however_its_process_ends(lost_first: bool):
    deaths = DeathDetector(OomDetector(), lambda: {1: 39})
    deaths.failure(10.0, Failure(0, 40, "backward", 10.0, LOST), set())
    if lost_first:
        assert deaths.process_gone(10.9, gone(0, code=1), set()) == []
    found, ended = deaths.process_gone(11.0, gone(1, signal=15), set())
    assert (found.condition, found.ranks) == (Condition("ended_early", 1), (1,))
    assert found.facts == EndedEarly({1: 39}, 0, LOST, "", [])
    assert (ended.condition, ended.facts) == (found.condition, Ended(None, 15))
    assert deaths.tick(20.0, over=True) == []


def test_a_rank_that_a_launcher_ends_after_its_script_had_ended_has_succeeded(make_sim: Any):
    sim = make_sim(2)
    sim.begin()
    sim.train(1, 6)
    sim.feed(Goodbye(1, sim.now, 6, "finished"))
    sim.feed(Failure(0, 7, "backward", sim.now, LOST), Goodbye(0, sim.now, 6, "failed", LOST))
    sim.fact(0, alive=False, exit_code=1)
    sim.fact(1, alive=False, signal=15)
    sim.wait(5.0)
    assert sim.state(1).state == "gone"
    (alert,) = sim.alerts("failure")
    assert (alert.rank, alert.evidence["lost"]) == (1, 0)


def test_memory_that_ran_out_is_one_matter_from_its_exception_to_the_next_step_of_its_rank():
    oom = OomDetector()
    deaths = DeathDetector(oom)
    (found,) = deaths.failure(10.0, Failure(0, 7, "backward", 10.0, "MemoryError: no", "Traceback"), set())
    assert (found.condition, found.facts) == (
        Condition("oom_failure", 0, "backward"),
        Uncaught("MemoryError: no", "Traceback"),
    )
    (ended,) = deaths.process_gone(10.5, gone(0, code=1), set())
    assert (ended.condition, ended.facts) == (found.condition, Ended(1, None))
    (over,) = oom.step(Step(0, 7, 0.0, 1, []))
    assert (over.condition, over.state, over.facts) == (found.condition, "resolved", Resolution("caught", 7))


def test_what_becomes_known_after_a_restart_of_the_hub_is_added_to_the_alerts_of_the_recording(make_sim: Any):
    old = make_sim(2)
    old.begin()
    old.train(1, 6)
    old.feed(Failure(0, 7, "data", old.now, "KeyError: 'ids'", "Traceback"), Goodbye(0, old.now, 6, "failed"))
    (before,) = old.alerts("failure")
    new = make_sim(2)
    new.seq, new.now = old.seq, old.now + 1
    new.tracker.restore(old.frames)
    new.detectors.restore(old.frames)
    new.fact(0, alive=False, exit_code=1)
    new.fact(1, alive=False, signal=15)
    new.wait(8)
    (after,) = new.alerts("failure")
    assert (after.id, after.evidence["ended"], list(after.evidence["then"])) == (before.id, "exit code 1", ["1"])
    assert after.evidence["error"] == "KeyError: 'ids'"
    assert new.alerts("died") == []


def test_what_ended_an_earlier_job_is_not_the_matter_of_a_later_one_after_a_restart_of_the_hub(make_sim: Any):
    old = make_sim(1)
    old.begin()
    old.feed(Job(number=1, time=old.now, state="training", started=old.now))
    old.train(1, 3)
    old.fact(0, alive=False, exit_code=3)
    old.wait(5)
    (first,) = old.alerts("died")
    old.sent += old.detectors.begin_job(old.now)
    old.feed(Job(number=2, time=old.now, state="training", started=old.now))
    old.feed(old.step(0, 1))
    assert not old.store.past
    new = make_sim(1)
    new.seq, new.now = old.seq, old.now + 1
    new.detectors.restore(old.frames)
    assert not new.store.past, "it is over already"
    new.begin()
    new.train(1, 3)
    new.fact(0, alive=False, exit_code=3)
    new.wait(5)
    (second,) = new.alerts("died")
    assert second.id > first.id
    assert (second.time > first.time, second.count) == (True, 1)


NO_STEP = {"ranks": 1, "end": "exit code 1", "exit_code": 1}


@pytest.mark.parametrize(
    ("ends", "error", "told"),
    [
        ([Failure(0, 0, "init", 1.0, "KeyError: 'ids'")], "KeyError: 'ids'", 0),
        ([Failure(0, 0, "init", 1.0, LOST)], "KeyError: 'ids'", 1),
        ([Failure(0, 0, "init", 1.0, LOST)], LOST, 0),
        ([], "KeyError: 'ids'", 1),
    ],
    ids=["the same error", "a nearer cause", "the same lost peer", "nothing else"],
)
def test_a_run_that_ended_before_its_first_step_does_not_repeat_the_alert_of_a_failure(
    make_sim: Any, ends: list[Any], error: str, told: int
):
    sim = make_sim(1)
    sim.begin()
    sim.feed(*ends)
    sent = sim.detectors.put(sim.now, Finding("no_step", NoStepFacts(**NO_STEP, error=error), severity="error"))
    assert [alert.kind for alert in sent if alert.kind == "exit"] == ["exit"] * told


@pytest.mark.parametrize(("error", "told"), [("", 0), (LOST, 0), ("KeyError: 'ids'", 1)])
def test_a_run_that_ended_before_its_first_step_does_not_repeat_the_alert_of_a_death(
    make_sim: Any, error: str, told: int
):
    sim = make_sim(2)
    sim.begin()
    sim.fact(0, alive=False, signal=11)
    sim.wait(1)
    assert sim.alerts("died")
    sent = sim.detectors.put(sim.now, Finding("no_step", NoStepFacts(**NO_STEP, error=error), severity="error"))
    assert [alert.kind for alert in sent if alert.kind == "exit"] == ["exit"] * told


@pytest.mark.parametrize("world", [1, 2])
def test_a_death_tells_of_other_ranks_only_where_there_are_some(make_sim: Any, world: int):
    sim = make_sim(world)
    sim.begin()
    sim.train(1, 3)
    sim.fact(0, alive=False, exit_code=3)
    sim.wait(5)
    assert ("other ranks" in sim.alerts("died")[0].text) == (world > 1)
