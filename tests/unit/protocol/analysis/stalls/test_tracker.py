from typing import Any

import msgspec
import pytest
from ftmon.protocol.analysis.stalls.tracker import STOPPED_S, ProcessFact, RankTracker
from ftmon.protocol.messages.control import Command
from ftmon.protocol.messages.telemetry import Failure, Goodbye


def hang(sim: Any, seconds: float, guilty: int, **where: Any) -> list[Any]:
    """All ranks but one are inside a collective, and heartbeats go on."""

    def beats() -> None:
        for rank in range(sim.count):
            if rank == guilty:
                sim.feed(sim.beat(rank, 13, **{"phase": "forward", "collectives": 99, **where}))
            else:
                sim.feed(
                    sim.beat(
                        rank, 13, "backward", collective="all_reduce", last_collective="all_reduce", collectives=100
                    )
                )

    return sim.wait(seconds, beats)


def test_a_run_starts_trains_and_finishes(make_sim: Any):
    sim = make_sim(2, cuda=False)
    sim.begin()
    sim.tick()
    assert sim.run_states() == ["starting"]
    assert sim.states(0) == ["starting"]
    sim.train(1, 3)
    for rank in range(2):
        sim.feed(Goodbye(rank, sim.now, 3, "finished"))
        sim.fact(rank, alive=False, exit_code=0)
    sim.wait(2)
    sim.sent += sim.tracker.ended(sim.now, "finished", 0)
    assert sim.states(0) == ["starting", "training", "finished"] or sim.states(0)[-2:] == ["finished", "finished"]
    assert sim.run_states() == ["starting", "training", "finished"]
    assert sim.alerts("died") == []
    assert sim.alerts("exit") == []


def test_ordinary_training_never_leaves_the_state_training(make_sim: Any):
    sim = make_sim(8)
    sim.begin()
    sim.train(1, 40)
    assert all(sim.states(rank) == ["starting", "training"] for rank in range(8))
    assert sim.alerts("hang") == []


def test_a_hang_names_the_rank_that_did_not_come_and_ends_when_it_comes(make_sim: Any):
    sim = make_sim(4, cuda=False)
    sim.begin()
    sim.train(1, 12)
    began = sim.now
    hang(sim, 12, guilty=3)
    (alert,) = sim.alerts("hang")
    assert alert.time - began < 10, "a verdict within ten seconds where steps are short"
    assert (alert.rank, alert.ranks, alert.severity, alert.resolved) == (3, [3], "error", None)
    assert alert.evidence["collective"] == "all_reduce #100"
    assert alert.evidence["waiting"] == [0, 1, 2]
    assert alert.evidence["where"]["3"] == "in forward"
    assert [sim.state(rank).state for rank in range(4)] == ["waiting", "waiting", "waiting", "hung"]
    assert sim.state(3).text == "not in all_reduce #100, in forward"
    sim.train(13, 16)
    (alert,) = sim.alerts("hang")
    assert alert.resolved is not None
    assert [sim.state(rank).state for rank in range(4)] == ["training"] * 4


def test_what_is_left_of_an_ended_run_hangs_no_more(make_sim: Any):
    sim = make_sim(2, cuda=False)
    sim.begin()
    sim.train(1, 12)
    hang(sim, 9, guilty=1)
    sim.fact(0, alive=False, signal=15)
    sim.sent += sim.tracker.ended(sim.now, "stopped", -15)
    sim.wait(10)  # rank 1 has not ended yet, and was the one that did not come
    (alert,) = sim.alerts("hang")
    assert (alert.ranks, alert.resolved is not None) == ([1], True)


def test_a_standing_hang_is_brought_up_to_date_without_a_flood(make_sim: Any):
    sim = make_sim(4, cuda=False)
    sim.begin()
    sim.train(1, 12)
    hang(sim, 300, guilty=3)
    (alert,) = sim.alerts("hang")
    assert alert.evidence["age_s"] > 240
    assert alert.count == 1
    assert sim.sends("hang") < 25
    assert len(sim.states(0)) <= 4, "a state is not sent again because time passes"


def test_under_nccl_the_last_rank_by_count_is_hung(make_sim: Any):
    sim = make_sim(4)
    sim.begin()
    sim.train(1, 12)

    def beats() -> None:
        for rank in range(4):
            behind = rank == 2
            sim.feed(
                sim.beat(
                    rank,
                    13,
                    "idle" if behind else "optimizer",
                    collectives=400 if behind else 404,
                    step_collectives=4 if behind else 8,
                    micro_step=1,
                    last_collective="reduce_scatter_tensor",
                )
            )

    sim.wait(25, beats)
    (alert,) = sim.alerts("hang")
    assert alert.rank == 2
    assert alert.evidence["collective"] == "reduce_scatter_tensor #404"
    assert sim.state(2).text == "not in reduce_scatter_tensor #404, in Python code outside any phase"


@pytest.mark.parametrize(("phase", "seconds"), [("checkpoint", 300), ("eval", 200), ("idle", 50)])
def test_a_long_checkpoint_evaluation_or_pause_of_one_rank_is_no_hang(make_sim: Any, phase: str, seconds: float):
    sim = make_sim(4, cuda=False)
    sim.begin()
    sim.train(1, 12)
    hang(sim, seconds, guilty=0, phase=phase)
    assert sim.alerts("hang") == []
    assert sim.state(0).state == "training"
    assert sim.state(1).state == "waiting", "they do wait, and that is said"


def test_a_long_first_step_is_no_hang(make_sim: Any):
    sim = make_sim(2)
    sim.begin()
    sim.wait(250, lambda: sim.feed(*(sim.beat(rank, 1, "forward") for rank in range(2))))
    assert sim.alerts("hang") == []


def test_silence_is_unreachable_not_hung_and_ends_with_the_first_word(make_sim: Any):
    sim = make_sim(1)
    sim.begin()
    sim.train(1, 12)
    sim.wait(60)
    assert sim.alerts("hang") == []
    assert sim.state(0).state == "unreachable"
    assert "process lives" in sim.state(0).text
    (note,) = sim.alerts("note")
    assert note.resolved is None
    sim.feed(sim.beat(0, 13, moved=True))
    sim.tick()
    assert sim.state(0).state == "training"
    assert sim.alerts("note")[0].resolved is not None


def test_a_hub_that_was_frozen_blames_nobody(make_sim: Any):
    sim = make_sim(4, cuda=False)
    sim.begin()
    sim.train(1, 12)
    sim.tick(600)
    sim.tick()
    assert sim.alerts("hang") == []
    assert [sim.state(rank).state for rank in range(4)] == ["training"] * 4
    sim.tick(-3000)
    sim.tick()
    assert sim.alerts("hang") == [], "nor does one whose clock was set back"


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
            for rank in (0, 2):
                beat = sim.beat(rank, 13, "backward", collective="all_reduce", collectives=100)
                sim.feed(msgspec.structs.replace(beat, time=before + second))
            sim.feed(msgspec.structs.replace(sim.beat(1, 13, "data"), time=before + second))
        if not first:
            sim.tick(0)
    sim.tick()


@pytest.mark.parametrize("first", [True, False])
def test_a_hub_that_is_kept_from_its_work_again_and_again_still_tells_who_hangs(make_sim: Any, first: bool):
    sim = make_sim(3, cuda=False)
    sim.begin()
    sim.train(1, 12)
    held_up(sim, 3, first=first)
    (alert,) = sim.alerts("hang")
    assert alert.evidence["hung"] == [1]


@pytest.mark.parametrize("first", [True, False])
def test_ranks_that_slept_with_the_hub_are_not_accused_of_that_time(make_sim: Any, first: bool):
    sim = make_sim(3, cuda=False)
    sim.begin()
    sim.train(1, 12)
    held_up(sim, 3, slept=True, first=first)
    assert sim.alerts("hang") == []


def test_what_a_rank_did_while_the_hub_did_not_look_counts_as_progress(make_sim: Any):
    sim = make_sim(3, cuda=False)
    sim.begin()
    sim.train(1, 12)
    held_up(sim, 1, first=False)
    for rank in range(3):
        sim.feed(sim.beat(rank, 13, "backward", moved=True))
    sim.wait(7)
    assert sim.alerts("hang") == []


def test_a_rank_that_is_stopped_and_continued_many_times_a_second_is_not_stopped(make_sim: Any):
    sim = make_sim(2, cuda=False)
    sim.begin()
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
def test_signal_cont_is_named_only_for_a_rank_that_it_continues(make_sim: Any, proc_state: str, by_signal: bool):
    sim = make_sim(1)
    sim.begin()
    for _ in range(8):
        sim.fact(0, proc_state=proc_state)
        sim.wait(0.5)
    assert sim.state(0).state == "stopped"
    assert ("CONT" in sim.state(0).text) is by_signal


def test_a_stopped_rank_is_told_within_seconds_and_what_waits_for_it_is_its_evidence(make_sim: Any):
    sim = make_sim(4, cuda=False)
    sim.begin()
    sim.train(1, 12)
    sim.wait(STOPPED_S + 0.5, lambda: sim.fact(1, proc_state="T"))
    (alert,) = sim.alerts("hang")
    assert (alert.rank, alert.evidence["process_state"]) == (1, "T")
    assert sim.state(1).state == "stopped"

    def beats() -> None:
        sim.fact(1, proc_state="T")
        for rank in (0, 2, 3):
            sim.feed(sim.beat(rank, 13, "backward", collective="all_reduce", collectives=100))

    sim.wait(30, beats)
    (alert,) = sim.alerts("hang")
    assert alert.evidence["waiting"] == [0, 2, 3]
    sim.fact(1, proc_state="R")
    sim.tick()
    assert sim.alerts("hang")[0].resolved is not None
    assert sim.state(1).state == "training"


def test_a_rank_that_dies_while_others_wait_is_gone_with_its_signal(make_sim: Any):
    sim = make_sim(2, cuda=False)
    sim.begin()
    sim.train(1, 5)
    sim.fact(1, alive=False, signal=9)
    sim.wait(2)
    assert (sim.state(1).state, sim.state(1).text, sim.state(1).signal) == ("gone", "killed by SIGKILL", 9)
    sim.fact(1, alive=False, signal=9)
    assert sim.states(1).count("gone") == 1


def test_an_exit_status_learned_later_is_added(make_sim: Any):
    sim = make_sim(1)
    sim.begin()
    sim.fact(0, alive=False)
    sim.wait(2)
    assert sim.state(0).text == "exit status unknown"
    sim.fact(0, alive=False, exit_code=3)
    sim.tick()
    assert (sim.state(0).text, sim.state(0).exit_code) == ("exit code 3", 3)
    (alert,) = sim.alerts("died")
    assert (alert.rank, alert.evidence["exit_code"]) == (0, 3)


def test_a_fact_about_another_process_is_ignored(make_sim: Any):
    sim = make_sim(1)
    sim.begin()
    sim.train(1, 3)
    sim.feed(sim.hello(0, grad_accumulation=1))
    assert sim.tracker.fact(ProcessFact(0, 100, 999, alive=False)) == []
    sim.wait(2)
    assert sim.state(0).state == "training"


def test_a_rank_that_is_started_again_starts_anew(make_sim: Any):
    sim = make_sim(1)
    sim.begin()
    sim.train(1, 3)
    sim.fact(0, alive=False, exit_code=1)
    sim.wait(2)
    hello = sim.hello(0)
    sim.feed(msgspec.structs.replace(hello, pid=4242, start_ticks=8))
    assert sim.state(0).state == "starting"
    assert sim.state(0).pid == 4242


def test_a_hang_at_exit_is_recognised(make_sim: Any):
    sim = make_sim(2, cuda=False)
    sim.begin()
    sim.train(1, 12)
    sim.feed(Goodbye(0, sim.now, 12, "finished"))
    sim.fact(0, alive=False, exit_code=0)
    sim.wait(40, lambda: sim.feed(sim.beat(1, 13, "idle", collective="barrier", collectives=37)))
    (alert,) = sim.alerts("hang")
    assert alert.evidence["rule"] == "exit"
    assert sim.state(0).state == "finished"
    assert sim.state(1).state == "waiting"


def test_a_process_that_outlives_its_goodbye_is_a_hang_at_exit(make_sim: Any):
    sim = make_sim(2)
    sim.begin()
    sim.train(1, 12)
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


def test_stop_and_kill_of_the_run_show_as_stopping(make_sim: Any):
    sim = make_sim(1)
    sim.begin()
    sim.train(1, 3)
    sim.feed(Command("a", "kill", {"ranks": [], "signal": "TERM"}))
    assert sim.run_states()[-1] == "stopping"
    sim.train(4, 5)
    assert sim.run_states()[-1] == "stopping"
    sim.feed(Command("b", "kill", {"ranks": [0]}))
    sim.fact(0, alive=False, signal=15)
    sim.wait(3)
    assert sim.alerts("died") == []


def test_ranks_that_end_as_asked_are_finished_and_no_hang_at_exit(make_sim: Any):
    sim = make_sim(2, cuda=False)
    sim.begin()
    sim.train(1, 12)
    hang(sim, 60, guilty=1)
    sim.feed(Command("a", "kill", {"ranks": [], "signal": "INT"}), Goodbye(1, sim.now, 12, "stopped", "interrupted"))
    sim.fact(1, alive=False, signal=2)
    hang(sim, 3, guilty=1)
    assert (sim.state(1).state, sim.state(1).text) == ("finished", "interrupted")
    (alert,) = sim.alerts("hang")
    assert alert.resolved is not None


def test_without_a_launcher_the_run_ends_with_its_ranks(make_sim: Any):
    for reason, end in (("finished", "finished"), ("failed", "failed")):
        sim = make_sim(2)
        sim.tracker = sim.detectors._tracker = RankTracker(has_launcher=False)
        sim.begin()
        sim.train(1, 3)
        sim.feed(Goodbye(0, sim.now, 3, "finished"), Goodbye(1, sim.now, 3, reason, "ValueError: no"))
        sim.fact(0, alive=False)
        sim.fact(1, alive=False)
        sim.wait(5)
        assert sim.run_states()[-1] == end


def test_a_failed_rank_is_gone_with_its_error(make_sim: Any):
    sim = make_sim(1)
    sim.begin()
    sim.train(1, 3)
    sim.feed(Failure(0, 4, "forward", sim.now, "ValueError: shapes"), Goodbye(0, sim.now, 3, "failed"))
    sim.fact(0, alive=False, exit_code=1)
    sim.wait(2)
    assert (sim.state(0).state, sim.state(0).text) == ("gone", "failed: ValueError: shapes (exit code 1)")
    (alert,) = sim.alerts("failure")
    assert alert.evidence["ended"] == "exit code 1"
    assert sim.alerts("died") == []


def test_a_new_hub_goes_on_with_the_recorded_states_and_alerts(make_sim: Any):
    old = make_sim(4, cuda=False)
    old.begin()
    old.train(1, 12)
    hang(old, 12, guilty=3)
    (before,) = old.alerts("hang")
    new = make_sim(4, cuda=False)
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


@pytest.mark.parametrize("ranks", [1, 2, 512])
def test_states_are_sent_only_when_they_change(make_sim: Any, ranks: int):
    sim = make_sim(ranks)
    sim.begin()
    sim.train(1, 4)
    sim.wait(3, lambda: sim.feed(*(sim.beat(rank, 5, moved=True) for rank in range(ranks))))
    assert all(len(sim.states(rank)) == 2 for rank in range(ranks))


def test_a_rank_that_a_kill_could_not_end_says_that_it_waits_for_the_kernel(make_sim: Any):
    sim = make_sim(2)
    sim.begin()
    sim.train(1, 6)
    sim.wait(1, lambda: sim.fact(1, proc_state="D"))
    assert sim.tracker.ranks[1].state.state == "training", "a disk is waited for now and then"
    sim.feed(Command("c", "kill", {"ranks": [1]}))
    sim.wait(45, lambda: sim.fact(1, proc_state="D"))
    state = sim.tracker.ranks[1].state
    assert (state.state, "uninterruptible sleep" in state.text) == ("hung", True)
    sim.fact(1, alive=False, proc_state="", signal=9)
    sim.wait(2)
    assert sim.tracker.ranks[1].state.state == "gone"


@pytest.mark.parametrize(("heard", "limit"), [(0, 60.0), (1, 8.0)])
def test_a_rank_that_went_silent_before_its_steps_were_heard_is_judged_by_those_of_the_ranks_that_wait(
    make_sim: Any, heard: int, limit: float
):
    sim = make_sim(2, cuda=False)
    sim.begin()
    for step in range(1, 9):
        for rank in range(2) if step <= heard else (0,):
            sim.feed(sim.step(rank, step))
        sim.tick(0.05)
    if heard:
        sim.feed(sim.beat(1, 2, "forward", moved=True))
    waits = {"collective": "all_reduce", "last_collective": "all_reduce", "collectives": 25}
    silent = sim.tracker.ranks[1].progress
    assert silent.limit() == (60.0 if heard else 300.0), "its first steps, as far as it is known"
    sim.wait(8, lambda: sim.feed(sim.beat(0, 9, "backward", **waits)))
    assert silent.limit() == limit
    sim.feed(sim.beat(1, 1, "init", moved=True))
    assert silent.peer_steps == 0, "it speaks for itself"


def test_a_silent_rank_last_heard_in_its_start_has_left_it_when_steps_came_after(make_sim: Any):
    sim = make_sim(2, cuda=False)
    sim.begin()
    for rank in range(2):
        sim.feed(sim.beat(rank, 1, "init", moved=True))
    for step in range(1, 12):
        for rank in range(2):
            sim.feed(sim.step(rank, step))  # all at once, before its next heartbeat
    silent = sim.tracker.ranks[1].progress
    assert (silent.phase, silent.steps_seen) == ("init", 11)
    waits = {"collective": "all_reduce", "last_collective": "all_reduce", "collectives": 23}
    sim.wait(8, lambda: sim.feed(sim.beat(0, 12, "backward", **waits)))
    assert silent.limit() == 60.0


def test_a_silent_rank_last_heard_between_two_steps_has_left_them_when_a_step_came_after(make_sim: Any):
    sim = make_sim(2, cuda=False)
    sim.begin()
    sim.train(1, 5)
    sim.feed(sim.beat(1, 6, "idle", moved=True))
    silent = sim.tracker.ranks[1].progress
    waits = {"collective": "all_reduce", "last_collective": "all_reduce", "collectives": 25}
    sim.wait(8, lambda: sim.feed(sim.beat(0, 6, "backward", **waits)))
    assert silent.limit() == 300.0, "it may evaluate there"
    sim.feed(sim.step(1, 6))
    sim.feed(sim.step(0, 6))
    sim.wait(8, lambda: sim.feed(sim.beat(0, 7, "backward", **waits)))
    assert silent.limit() == 60.0
