from typing import Any

import msgspec
import pytest
from ftmon.protocol.analysis.stalls.tracker import STOPPED_S, ProcessFact, RankTracker
from ftmon.protocol.messages.control import Command
from ftmon.protocol.messages.telemetry import Failure, Goodbye
from simulated_run import Sim

WAITS = {"collective": "all_reduce", "last_collective": "all_reduce"}


def trained(ranks: int = 1, last: int = 12, *, cuda: bool = False) -> Sim:
    sim = Sim(ranks, cuda=cuda)
    sim.begin()
    sim.train(1, last)
    return sim


def hang(sim: Any, seconds: float, guilty: int, **where: Any) -> list[Any]:
    """All ranks but one are inside a collective, and heartbeats go on."""

    def beats() -> None:
        for rank in range(sim.count):
            waits = {"phase": "backward", "collectives": 100, **WAITS}
            sim.feed(
                sim.beat(rank, 13, **({"phase": "forward", "collectives": 99, **where} if rank == guilty else waits))
            )

    return sim.wait(seconds, beats)


def test_a_run_starts_trains_and_finishes():
    sim = trained(2, 0)
    sim.tick()
    assert (sim.run_states(), sim.states(0)) == (["starting"], ["starting"])
    sim.train(1, 3)
    for rank in range(2):
        sim.feed(Goodbye(rank, sim.now, 3, "finished"))
        sim.fact(rank, alive=False, exit_code=0)
    sim.wait(2)
    sim.sent += sim.tracker.ended(sim.now, "finished", 0)
    assert sim.states(0) == ["starting", "training", "finished"] or sim.states(0)[-2:] == ["finished", "finished"]
    assert sim.run_states() == ["starting", "training", "finished"]
    assert sim.alerts("died") == sim.alerts("exit") == []


def test_a_hang_names_the_rank_that_did_not_come_and_ends_when_it_comes():
    sim = trained(4)
    began = sim.now
    hang(sim, 12, guilty=3)
    (alert,) = sim.alerts("hang")
    assert alert.time - began < 10, "a verdict within ten seconds where steps are short"
    assert (alert.rank, alert.ranks, alert.severity, alert.resolved) == (3, [3], "error", None)
    assert alert.evidence["collective"] == "all_reduce #100"
    assert (alert.evidence["waiting"], alert.evidence["where"]["3"]) == ([0, 1, 2], "in forward")
    assert [sim.state(rank).state for rank in range(4)] == ["waiting", "waiting", "waiting", "hung"]
    assert sim.state(3).text == "not in all_reduce #100, in forward"
    sim.train(13, 16)
    (alert,) = sim.alerts("hang")
    assert alert.resolved is not None
    assert [sim.state(rank).state for rank in range(4)] == ["training"] * 4


def test_a_standing_hang_is_brought_up_to_date_without_a_flood_and_ends_with_its_run():
    sim = trained(4)
    hang(sim, 300, guilty=3)
    (alert,) = sim.alerts("hang")
    assert alert.evidence["age_s"] > 240
    assert alert.count == 1
    assert sim.sends("hang") < 25
    assert len(sim.states(0)) <= 4, "a state is not sent again because time passes"
    sim = trained(2)
    hang(sim, 9, guilty=1)
    sim.fact(0, alive=False, signal=15)
    sim.sent += sim.tracker.ended(sim.now, "stopped", -15)
    sim.wait(10)  # rank 1, which had not arrived, has not ended yet
    (alert,) = sim.alerts("hang")
    assert (alert.ranks, alert.resolved is not None) == ([1], True)


def test_under_nccl_the_last_rank_by_count_is_hung():
    sim = trained(4, cuda=True)

    def beats() -> None:
        for rank in range(4):
            phase, collectives, in_step = ("idle", 400, 4) if rank == 2 else ("optimizer", 404, 8)
            counts = {"collectives": collectives, "step_collectives": in_step, "micro_step": 1}
            sim.feed(sim.beat(rank, 13, phase, last_collective="reduce_scatter_tensor", **counts))

    sim.wait(25, beats)
    (alert,) = sim.alerts("hang")
    assert alert.rank == 2
    assert alert.evidence["collective"] == "reduce_scatter_tensor #404"
    assert sim.state(2).text == "not in reduce_scatter_tensor #404, in Python code outside any phase"


@pytest.mark.parametrize(("phase", "seconds"), [("checkpoint", 300), ("eval", 200), ("idle", 50)])
def test_a_long_checkpoint_evaluation_or_pause_of_one_rank_is_no_hang(phase, seconds):
    sim = trained(4)
    hang(sim, seconds, guilty=0, phase=phase)
    assert (sim.alerts("hang"), sim.state(0).state) == ([], "training")
    assert sim.state(1).state == "waiting", "they do wait, and that is said"


def test_a_long_first_step_is_no_hang_and_a_hub_that_was_frozen_blames_nobody():
    sim = trained(2, 0, cuda=True)
    sim.wait(250, lambda: sim.feed(*(sim.beat(rank, 1, "forward") for rank in range(2))))
    assert sim.alerts("hang") == []
    sim = trained(4)
    for seconds in (600, -3000):
        sim.tick(seconds)
        sim.tick()
        assert sim.alerts("hang") == [], "nor does one whose clock was set back"
        assert [sim.state(rank).state for rank in range(4)] == ["training"] * 4


def test_silence_is_unreachable_not_hung_and_ends_with_the_first_word():
    sim = trained()
    sim.wait(60)
    assert (sim.alerts("hang"), sim.state(0).state) == ([], "unreachable")
    assert "process lives" in sim.state(0).text
    (note,) = sim.alerts("note")
    assert note.resolved is None
    sim.feed(sim.beat(0, 13, moved=True))
    sim.tick()
    assert sim.state(0).state == "training"
    assert sim.alerts("note")[0].resolved is not None


def held_up(sim: Any, rounds: int, *, slept: bool = False, first: bool = True) -> None:
    """Ranks 0 and 2 wait for rank 1, and the hub looks every 6 s only, before or after it takes what was sent."""
    for rank in range(3):
        sim.feed(sim.beat(rank, 13, "backward" if rank != 1 else "data", moved=True))
    for _ in range(rounds):
        before = sim.now
        sim.now += 6
        if first:
            sim.tick(0)
        for second in [6] if slept else range(1, 7):
            beats = [sim.beat(rank, 13, "backward", collectives=100, **WAITS) for rank in (0, 2)]
            beats.append(sim.beat(1, 13, "data"))
            sim.feed(*(msgspec.structs.replace(beat, time=before + second) for beat in beats))
        if not first:
            sim.tick(0)
    sim.tick()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("slept", "hung"), [(False, [[1]]), (True, [])])
def test_a_hub_that_is_kept_from_its_work_tells_who_hangs_and_accuses_no_rank_that_slept_with_it(first, slept, hung):
    sim = trained(3)
    held_up(sim, 3, first=first, slept=slept)
    assert [alert.evidence["hung"] for alert in sim.alerts("hang")] == hung


def test_what_a_rank_did_unseen_is_progress_and_one_stopped_and_continued_often_is_not_stopped():
    sim = trained(3)
    held_up(sim, 1, first=False)
    for rank in range(3):
        sim.feed(sim.beat(rank, 13, "backward", moved=True))
    sim.wait(7)
    assert sim.alerts("hang") == []
    sim = trained(2, 0)
    for step in range(1, 40):
        sim.train(step, step)
        sim.fact(1, proc_state="T")
        sim.tick()
    for number in range(20):
        sim.fact(1, proc_state="T" if number % 3 else "S")
        sim.tick()
    assert "stopped" not in sim.states(1)
    assert [alert for alert in sim.alerts("hang") if alert.evidence.get("process_state")] == []


@pytest.mark.parametrize(("proc_state", "by_signal"), [("T", True), ("t", False)])
def test_signal_cont_is_named_only_for_a_rank_that_it_continues(proc_state, by_signal):
    sim = trained(1, 0)
    for _ in range(8):
        sim.fact(0, proc_state=proc_state)
        sim.wait(0.5)
    assert sim.state(0).state == "stopped"
    assert ("CONT" in sim.state(0).text) is by_signal


def test_a_stopped_rank_is_told_within_seconds_and_what_waits_for_it_is_its_evidence():
    sim = trained(4)
    sim.wait(STOPPED_S + 0.5, lambda: sim.fact(1, proc_state="T"))
    (alert,) = sim.alerts("hang")
    assert (alert.rank, alert.evidence["process_state"]) == (1, "T")
    assert sim.state(1).state == "stopped"

    def beats() -> None:
        sim.fact(1, proc_state="T")
        for rank in (0, 2, 3):
            sim.feed(sim.beat(rank, 13, "backward", collectives=100, **WAITS))

    sim.wait(30, beats)
    (alert,) = sim.alerts("hang")
    assert alert.evidence["waiting"] == [0, 2, 3]
    sim.fact(1, proc_state="R")
    sim.tick()
    assert sim.alerts("hang")[0].resolved is not None
    assert sim.state(1).state == "training"


def test_a_rank_that_dies_while_others_wait_is_gone_with_its_signal_or_a_status_learned_later():
    sim = trained(2, 5)
    sim.fact(1, alive=False, signal=9)
    sim.wait(2)
    assert (sim.state(1).state, sim.state(1).text, sim.state(1).signal) == ("gone", "killed by SIGKILL", 9)
    sim.fact(1, alive=False, signal=9)
    assert sim.states(1).count("gone") == 1
    sim = trained(1, 0)
    sim.fact(0, alive=False)
    sim.wait(2)
    assert sim.state(0).text == "exit status unknown"
    sim.fact(0, alive=False, exit_code=3)
    sim.tick()
    assert (sim.state(0).text, sim.state(0).exit_code) == ("exit code 3", 3)
    (alert,) = sim.alerts("died")
    assert (alert.rank, alert.evidence["exit_code"]) == (0, 3)


def test_a_fact_about_another_process_is_ignored_and_a_rank_started_again_starts_anew():
    sim = trained(1, 3)
    sim.feed(sim.hello(0, grad_accumulation=1))
    assert sim.tracker.fact(ProcessFact(0, 100, 999, alive=False)) == []
    sim.wait(2)
    assert sim.state(0).state == "training"
    sim.fact(0, alive=False, exit_code=1)
    sim.wait(2)
    sim.feed(sim.hello(0, pid=4242))
    assert (sim.state(0).state, sim.state(0).pid) == ("starting", 4242)


def test_a_hang_at_exit_is_recognised_and_ranks_that_end_as_asked_are_in_none():
    sim = trained(2)
    sim.feed(Goodbye(0, sim.now, 12, "finished"))
    sim.fact(0, alive=False, exit_code=0)
    sim.wait(40, lambda: sim.feed(sim.beat(1, 13, "idle", collective="barrier", collectives=37)))
    (alert,) = sim.alerts("hang")
    assert alert.evidence["rule"] == "exit"
    assert (sim.state(0).state, sim.state(1).state) == ("finished", "waiting")
    sim = trained(2)
    hang(sim, 60, guilty=1)
    sim.feed(Command("a", "kill", {"ranks": [], "signal": "INT"}), Goodbye(1, sim.now, 12, "stopped", "interrupted"))
    sim.fact(1, alive=False, signal=2)
    hang(sim, 3, guilty=1)
    assert (sim.state(1).state, sim.state(1).text) == ("finished", "interrupted")
    (alert,) = sim.alerts("hang")
    assert alert.resolved is not None


def test_a_process_that_outlives_its_goodbye_is_a_hang_at_exit():
    sim = trained(2, cuda=True)
    for rank in range(2):
        sim.feed(Goodbye(rank, sim.now, 12, "finished"))
    sim.fact(0, alive=False, exit_code=0)
    sim.wait(40, lambda: sim.fact(1))
    (alert,) = sim.alerts("hang")
    assert (alert.rank, alert.evidence["rule"]) == (1, "exit")
    assert sim.state(1).state == "hung"
    sim.fact(1, alive=False, exit_code=0)
    sim.wait(2)
    assert sim.state(1).state == "finished"
    assert sim.alerts("hang")[0].resolved is not None


def test_without_a_launcher_the_run_ends_with_its_ranks():
    for reason, end in (("finished", "finished"), ("failed", "failed")):
        sim = Sim(2)
        sim.tracker = sim.detectors._tracker = RankTracker(has_launcher=False)
        sim.begin()
        sim.train(1, 3)
        sim.feed(Goodbye(0, sim.now, 3, "finished"), Goodbye(1, sim.now, 3, reason, "ValueError: no"))
        sim.fact(0, alive=False)
        sim.fact(1, alive=False)
        sim.wait(5)
        assert sim.run_states()[-1] == end


def test_a_failed_rank_is_gone_with_its_error_and_stop_and_kill_show_as_stopping():
    sim = trained(1, 3)
    sim.feed(Failure(0, 4, "forward", sim.now, "ValueError: shapes"), Goodbye(0, sim.now, 3, "failed"))
    sim.fact(0, alive=False, exit_code=1)
    sim.wait(2)
    assert (sim.state(0).state, sim.state(0).text) == ("gone", "failed: ValueError: shapes (exit code 1)")
    (alert,) = sim.alerts("failure")
    assert alert.evidence["ended"] == "exit code 1"
    assert sim.alerts("died") == []
    sim = trained(1, 3)
    sim.feed(Command("a", "kill", {"ranks": [], "signal": "TERM"}))
    assert sim.run_states()[-1] == "stopping"
    sim.train(4, 5)
    assert sim.run_states()[-1] == "stopping"
    sim.feed(Command("b", "kill", {"ranks": [0]}))
    sim.fact(0, alive=False, signal=15)
    sim.wait(3)
    assert sim.alerts("died") == []


def test_a_new_hub_goes_on_with_the_recorded_states_and_alerts():
    old = trained(4)
    hang(old, 12, guilty=3)
    (before,) = old.alerts("hang")
    new = Sim(4, cuda=False)
    new.now, new.seq, new.progress = old.now + 20, old.seq, old.progress
    new.tracker.restore(old.frames)
    new.detectors.restore(old.frames)
    new.tick()
    assert new.alerts("hang") == [] or new.alerts("hang")[0].id == before.id
    for rank in range(4):
        new.feed(new.hello(rank))
        new.fact(rank)
    hang(new, 20, guilty=3)
    (after,) = new.alerts("hang")
    assert after.rank == 3
    assert after.id == before.id, "the same matter keeps its id"
    new.train(13, 14)
    assert new.alerts("hang")[0].resolved is not None
    assert new.state(3).state == "training"


@pytest.mark.parametrize("ranks", [1, 8, 512])
def test_states_are_sent_only_when_they_change(ranks):
    sim = trained(ranks, 4 if ranks > 8 else 40, cuda=True)
    sim.wait(3, lambda: sim.feed(*(sim.beat(rank, 41, moved=True) for rank in range(ranks))))
    assert all(sim.states(rank) == ["starting", "training"] for rank in range(ranks))
    assert sim.alerts("hang") == []


def test_a_rank_that_a_kill_could_not_end_says_that_it_waits_for_the_kernel():
    sim = trained(2, 6, cuda=True)
    sim.wait(1, lambda: sim.fact(1, proc_state="D"))
    assert sim.tracker.ranks[1].state.state == "training", "a disk is waited for now and then"
    sim.feed(Command("c", "kill", {"ranks": [1]}))
    sim.wait(45, lambda: sim.fact(1, proc_state="D"))
    state = sim.tracker.ranks[1].state
    assert (state.state, "uninterruptible sleep" in state.text) == ("hung", True)
    sim.fact(1, alive=False, proc_state="", signal=9)
    sim.wait(2)
    assert sim.tracker.ranks[1].state.state == "gone"


def waits_for_the_other(sim: Sim, step: int, collectives: int) -> None:
    sim.wait(8, lambda: sim.feed(sim.beat(0, step, "backward", collectives=collectives, **WAITS)))


@pytest.mark.parametrize(("heard", "limit"), [(0, 60.0), (1, 8.0)])
def test_a_rank_that_went_silent_before_its_steps_were_heard_is_judged_by_those_of_the_ranks_that_wait(heard, limit):
    sim = trained(2, 0)
    for step in range(1, 9):
        sim.feed(*(sim.step(rank, step) for rank in (range(2) if step <= heard else (0,))))
        sim.tick(0.05)
    if heard:
        sim.feed(sim.beat(1, 2, "forward", moved=True))
    silent = sim.tracker.ranks[1].progress
    assert silent.limit() == (60.0 if heard else 300.0), "its first steps, as far as it is known"
    waits_for_the_other(sim, 9, 25)
    assert silent.limit() == limit
    sim.feed(sim.beat(1, 1, "init", moved=True))
    assert silent.peer_steps == 0, "it speaks for itself"


def test_a_silent_rank_last_heard_in_its_start_or_between_two_steps_has_left_them_once_steps_came_after():
    sim = trained(2, 0)
    sim.feed(*(sim.beat(rank, 1, "init", moved=True) for rank in range(2)))
    for step in range(1, 12):
        sim.feed(*(sim.step(rank, step) for rank in range(2)))  # all at once, before its next heartbeat
    silent = sim.tracker.ranks[1].progress
    assert (silent.phase, silent.steps_seen) == ("init", 11)
    waits_for_the_other(sim, 12, 23)
    assert silent.limit() == 60.0
    sim = trained(2, 5)
    sim.feed(sim.beat(1, 6, "idle", moved=True))
    silent = sim.tracker.ranks[1].progress
    waits_for_the_other(sim, 6, 25)
    assert silent.limit() == 300.0, "it may evaluate there"
    sim.feed(sim.step(1, 6), sim.step(0, 6))
    waits_for_the_other(sim, 7, 25)
    assert silent.limit() == 60.0
