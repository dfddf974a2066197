"""Judging with what a look at the ranks found: collectives side by side, stacks, and who is asleep."""

import faulthandler
import tempfile
import threading
from dataclasses import replace
from typing import Any

import pytest
from ftmon.protocol.analysis.stalls.collectives import Difference, RankView, difference, waits
from ftmon.protocol.analysis.stalls.collectives import where as where_of
from ftmon.protocol.analysis.stalls.evidence import (
    Call,
    Calls,
    Collective,
    Evidence,
    Frame,
    LockWait,
    group,
    parse,
    read_calls,
    training_thread,
    waits_for_loader_worker,
    where,
)
from ftmon.protocol.analysis.stalls.hang_detector import Cause, cause_of
from ftmon.protocol.analysis.stalls.judge import (
    ENTERED_S,
    EXIT_LIMIT_S,
    EXIT_SURE_S,
    EXIT_WORKING_S,
    CircularWait,
    OtherRanks,
    RanAhead,
    StaleLocks,
    Verdict,
    judge,
)
from ftmon.protocol.analysis.stalls.progress import ROWS, RankProgress
from ftmon.protocol.analysis.stalls.words import _together, of_verdict
from hypothesis import given
from hypothesis import strategies as st

# Stacks as faulthandler really writes them, in a few words, and ranks with the same one together.


SITE = "/env/lib/python3.11/site-packages"

COLLECTIVE = f"""\
Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/threading.py", line 1009 in _bootstrap

Thread 0x00007f0000000002 (most recent call first):
  File "{SITE}/torch/distributed/distributed_c10d.py", line 3800 in all_gather_into_tensor
  File "{SITE}/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "{SITE}/ftmon/trainer/probe/hooks/collectives.py", line 84 in call
  File "{SITE}/deepspeed/comm/torch.py", line 120 in all_gather_into_tensor
  File "{SITE}/deepspeed/comm/comm.py", line 117 in log_wrapper
  File "{SITE}/deepspeed/runtime/zero/stage3.py", line 582 in gather
  File "/home/me/train.py", line 40 in main
  File "/home/me/train.py", line 60 in <module>
"""

DATA = f"""\
Thread 0x00007f0000000009 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 415 in select
  File "{SITE}/torch/utils/data/dataloader.py", line 1270 in _try_get_data
  File "{SITE}/torch/utils/data/dataloader.py", line 700 in __next__
  File "{SITE}/ftmon/trainer/probe/hooks/torch.py", line 88 in __next__
  File "/home/me/train.py", line 38 in main
  File "/home/me/train.py", line 60 in <module>
"""


def test_a_wait_in_a_collective_names_it_and_who_asked_for_it():
    thread = training_thread(parse(COLLECTIVE))
    assert thread is not None
    place = where(thread.frames)
    assert (place.doing, place.text) == ("collective", "all_gather_into_tensor in stage3.py:582 in gather")


def test_a_wait_for_a_batch_is_the_dataloaders():
    place = where(parse(DATA)[0].frames)
    assert (place.doing, place.text) == ("data", "next() of the dataloader in train.py:38 in main")


def test_only_the_dataloader_s_wait_for_a_worker_wakes_up_by_itself():
    loader = f"{SITE}/torch/utils/data/dataloader.py"
    in_this_process = [
        Frame("/home/me/train.py", 12, "__getitem__"),
        Frame(f"{SITE}/torch/utils/data/_utils/fetch.py", 52, "fetch"),
        Frame(loader, 789, "_next_data"),
        Frame(loader, 733, "__next__"),
        Frame("/home/me/train.py", 38, "main"),
    ]
    assert where(in_this_process).doing == "data"
    assert not waits_for_loader_worker(in_this_process), "a retry every few seconds is the script's own"
    assert waits_for_loader_worker(parse(DATA)[0].frames)


def test_code_of_the_script_is_its_innermost_line():
    assert where([Frame("/home/me/train.py", 12, "load"), Frame("/home/me/train.py", 60, "<module>")]).text == (
        "train.py:12 in load"
    )
    deep = [Frame(f"{SITE}/requests/api.py", 59, "request"), Frame("/home/me/train.py", 12, "load")]
    assert where(deep).text == "request (api.py:59) in train.py:12 in load"
    assert where([]).text == ""


def test_a_script_that_is_over_and_waits_for_a_thread_is_told():
    place = where([Frame("/usr/lib/python3.11/threading.py", 1583, "_shutdown")])
    assert (place.doing, place.text) == ("exiting", "the end of the script: waits for a thread or a child")


def test_a_wait_for_an_extension_that_another_process_builds_is_told():
    frames = [
        Frame(f"{SITE}/torch/utils/file_baton.py", 54, "wait"),
        Frame(f"{SITE}/torch/utils/cpp_extension.py", 2012, "_jit_compile"),
        Frame(f"{SITE}/deepspeed/ops/op_builder/builder.py", 560, "jit_load"),
        Frame("/home/me/train.py", 12, "main"),
    ]
    place = where(frames)
    assert place.doing == "waiting"
    assert "lock file that one left behind in train.py:12 in main" in place.text


def test_the_training_thread_is_the_one_that_is_named_else_the_last():
    threads = parse(COLLECTIVE)
    named = training_thread(threads, "0x7f0000000001")
    assert named is not None
    assert named.frames[0].function == "wait"
    assert training_thread(threads, "0x7") == threads[-1]
    assert training_thread([]) is None


def test_ranks_with_the_same_stack_are_one_group_and_the_largest_comes_first():
    groups = group({3: (DATA, ""), **dict.fromkeys((0, 1, 2, 4), (COLLECTIVE, "")), 5: ("", "")})
    assert [one.ranks for one in groups] == [[0, 1, 2, 4], [3], [5]]
    assert groups[1].place.words == "next() of the dataloader"
    assert groups[2].frames == ()


def test_what_faulthandler_writes_here_is_read():
    ready, go = threading.Event(), threading.Event()

    def sleeper() -> None:
        ready.set()
        go.wait(200)

    thread = threading.Thread(target=sleeper)
    thread.start()
    assert ready.wait(200)
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        go.set()
        thread.join()
        file.seek(0)
        threads: list[Any] = parse(file.read().decode())
    names = {int(one.name, 16): one for one in threads}
    assert any(frame.function == "sleeper" for frame in names[thread.ident or 0].frames)
    main = training_thread(threads, hex(threading.get_ident()))
    assert main is not None
    assert main.frames[0].function == "test_what_faulthandler_writes_here_is_read"


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


WORLD = {"0": (0, 1, 2, 3)}

SLEEPS = (Frame("/home/me/train.py", 52, "main"),)
BACKWARD = (
    Frame(f"{SITE}/torch/autograd/graph.py", 824, "_engine_run_backward"),
    Frame(f"{SITE}/torch/_tensor.py", 581, "backward"),
    Frame("/home/me/train.py", 40, "main"),
)


def found(
    *recent: tuple[Any, ...], members: dict[str, tuple[int, ...]] | None = None, frames: Any = (), **more: Any
) -> Evidence:
    """Make evidence whose collectives are (group, number, name[, size[, done]])."""
    calls = [Call(*(call + (0, False)[len(call) - 3 :])) for call in recent]
    given = {"by": "probe", "asleep": 3.0, **more}
    return Evidence(
        1.0,
        frames=tuple(frames),
        place=where(frames),
        calls=Calls("recorder", tuple(calls), {}, WORLD if members is None else members),
        **given,
    )


def view(rank: int, evidence: Evidence | None = None, **fields: Any) -> RankView:
    given = {"step": 12, "phase": "backward", "age": 7.5, "limit": 8.0, "asleep_limit": 7.0, **fields}
    return RankView(rank, evidence=evidence, **given)


def must(verdict: Verdict | None) -> Verdict:
    assert verdict is not None
    return verdict


def test_a_rank_found_asleep_is_named_before_the_patience_of_its_phase_is_over():
    waiting = [view(rank, found(("0", 9, "all_reduce")), inside="all_reduce", group="0") for rank in (0, 1, 3)]
    late = view(2, found(("0", 8, "all_reduce", 0, True), frames=SLEEPS), phase="forward")
    verdict = must(judge([*waiting, late]))
    assert (verdict.kind, verdict.hung, verdict.waiting, verdict.sure) == ("missing", (2,), (0, 1, 3), True)
    assert where_of(verdict.views[2]) == "in forward: train.py:52 in main"


def test_work_is_not_sleep_and_has_the_patience_of_its_phase():
    waiting = [view(rank, found(("0", 9, "all_reduce")), inside="all_reduce", group="0") for rank in (0, 1, 3)]
    works = found(("0", 8, "all_reduce", 0, True), frames=SLEEPS, asleep=0.0)
    assert judge([*waiting, view(2, works, phase="forward")]) is None
    evaluates = found(("0", 8, "all_reduce", 0, True), frames=SLEEPS, asleep=50.0)
    assert judge([*waiting, view(2, evaluates, phase="eval", age=52.0, limit=300.0, asleep_limit=60.0)]) is None


def test_a_receive_that_nobody_sends_to_is_a_mismatch_with_the_collective_the_others_are_in():
    apart = view(0, found(("0", 8, "all_reduce", 0, True)), inside="recv")
    verdict = must(judge([apart, view(1, found(("0", 9, "all_reduce")), inside="all_reduce", group="0")]))
    assert (verdict.kind, verdict.hung, verdict.differs) == ("mismatch", (), (0,))
    assert (verdict.facts, verdict.collective) == (OtherRanks((0,)), Collective("all_reduce", 9))


def test_a_rank_that_receives_from_the_one_asleep_is_not_named():
    members = {"0": (0, 1, 2)}
    waiting = view(2, found(("0", 9, "all_reduce"), members=members), inside="all_reduce", group="0")
    receives = view(0, found(("0", 8, "all_reduce", 0, True), members=members), inside="recv")
    asleep = view(1, found(("0", 8, "all_reduce", 0, True), members=members, frames=SLEEPS), phase="forward")
    assert must(judge([receives, asleep, waiting])).hung == (1,)


def test_two_groups_that_wait_for_each_other_are_a_deadlock_and_nobody_is_named():
    members = {"0": (0, 1), "1": (0, 1), "2": (0, 1)}
    first = found(("1", 4, "all_reduce"), ("2", 3, "all_gather", 0, True), members=members)
    second = found(("1", 3, "all_reduce", 0, True), ("2", 4, "all_gather"), members=members)
    verdict = must(
        judge([view(0, first, inside="all_reduce", group="1"), view(1, second, inside="all_gather", group="2")])
    )
    assert (verdict.kind, verdict.hung, verdict.sure) == ("deadlock", (), True)
    calls = {0: Collective("all_reduce", 4, (0, 1), "1"), 1: Collective("all_gather", 4, (0, 1), "2")}
    assert verdict.facts == CircularWait(calls)


def test_whoever_is_outside_of_the_group_is_not_blamed_for_its_collective():
    members = {"0": (0, 1, 2, 3), "5": (0, 1)}
    stuck = found(("0", 7, "barrier", 0, True), ("5", 3, "all_reduce"), members=members)
    late = found(("0", 7, "barrier", 0, True), ("5", 2, "all_reduce", 0, True), members=members, frames=SLEEPS)
    outside = found(("0", 8, "barrier"), members=members)
    verdict = must(
        judge(
            [
                view(0, stuck, inside="all_reduce", group="5"),
                view(1, late, phase="forward"),
                view(2, outside, inside="barrier", group="0"),
                view(3, outside, inside="barrier", group="0"),
            ]
        )
    )
    assert (verdict.kind, verdict.hung, verdict.waiting) == ("missing", (1,), (0, 2, 3))


def test_the_end_of_a_chain_of_waits_is_named_not_its_middle():
    members = {"a": (0, 1), "b": (1, 2)}
    verdict = must(
        judge(
            [
                view(0, found(("a", 2, "all_reduce"), members=members), inside="all_reduce", group="a"),
                view(1, found(("a", 1, "x", 0, True), ("b", 2, "send"), members=members), inside="bcast", group="b"),
                view(2, found(("b", 1, "x", 0, True), members=members, frames=SLEEPS), phase="data"),
            ]
        )
    )
    assert (verdict.hung, verdict.waiting) == ((2,), (0, 1))


@pytest.mark.parametrize(
    "odd",
    [("0", 9, "all_gather", 64), ("0", 9, "all_reduce", 32)],
)
def test_a_collective_that_one_rank_entered_differently_is_a_mismatch_with_the_odd_one_told(odd: Any):
    views = [view(rank, found(("0", 9, "all_reduce", 64)), inside="all_reduce", group="0") for rank in (0, 1, 3)]
    verdict = must(judge([*views, view(2, found(odd), inside=odd[2], group="0")]))
    assert (verdict.kind, verdict.hung, verdict.differs) == ("mismatch", (), (2,))
    assert isinstance(verdict.facts, Difference)
    assert [call[:4] for call in verdict.facts.calls.values()] == [*(("0", 9, "all_reduce", 64),) * 3, odd]


def test_sizes_may_differ_where_every_rank_may_give_another_one():
    views = [view(rank, found(("0", 9, "all_to_all_single", 10 + rank))) for rank in (0, 1)]
    assert difference(views) is None
    done = [view(rank, found(("0", 9, "all_reduce", 10 + rank, True))) for rank in (0, 1)]
    assert difference(done) is None, "it is behind all of them"


def test_ddps_collectives_are_seen_through_the_recorder_under_nccl():
    ahead = [view(rank, found(("0", 30, "all_reduce", 5)), age=9.0) for rank in (0, 1, 3)]
    verdict = must(judge([*ahead, view(2, found(("0", 28, "all_reduce", 5, True), frames=SLEEPS), phase="data")]))
    assert (verdict.kind, verdict.hung) == ("missing", (2,))
    assert verdict.collective == Collective("all_reduce", 30)


def test_a_rank_that_holds_pythons_lock_in_native_code_is_told_with_its_line():
    waiting = [
        view(rank, found(("0", 9, "all_reduce")), inside="all_reduce", group="0", group_sequence=9)
        for rank in (0, 1, 3)
    ]
    late = view(2, found(frames=SLEEPS, by="signal"), absent="silent", phase="forward", group="0", group_sequence=8)
    verdict = must(judge([*waiting, late]))
    assert (verdict.hung, verdict.sure) == ((2,), True)
    assert where_of(verdict.views[2]) == "in forward, in native code that holds the GIL: train.py:52 in main"


def held_up_between_steps(age: float, **of_the_silent_one: Any) -> Verdict | None:
    """Judge ranks that wait for their devices outside every phase, where patience is long, beside a silent one."""
    evidence = Evidence(
        1.0, by="probe", calls=Calls("recorder", (Call("0", 9, "all_reduce", 5, False),), {"0": 9}, WORLD)
    )
    patient: dict[str, Any] = {"phase": "idle", "limit": 60.0, "asleep_limit": 15.0}
    waiting = [view(rank, evidence, age=age, group="0", group_sequence=9, **patient) for rank in (0, 1, 3)]
    given = {"absent": "silent", "phase": "forward", "age": age, "group": "0", "group_sequence": 8, **of_the_silent_one}
    return judge([*waiting, view(2, **given)])


def test_a_rank_that_sends_nothing_is_likely_at_fault_where_others_wait_in_what_it_has_not_entered():
    verdict = must(held_up_between_steps(11.0))
    assert (verdict.kind, verdict.hung, verdict.waiting, verdict.sure) == ("missing", (2,), (0, 1, 3), False)
    assert verdict.collective == Collective("all_reduce", 9)
    assert verdict.views[2].absent == "silent"
    assert held_up_between_steps(9.0) is None
    assert held_up_between_steps(11.0, group_sequence=9) is None, "it has entered as far as was heard"
    assert held_up_between_steps(11.0, absent="", limit=60.0) is None, "it is heard, and may be at work"
    assert held_up_between_steps(11.0, absent="cut off") is None
    assert held_up_between_steps(11.0, phase="checkpoint", limit=600.0) is None, "it may be writing, the lock held"


def fallen_silent(**of_the_one_behind: Any) -> Verdict | None:
    """Judge ranks that all fell silent once they stood still; their last words put one of them behind."""
    words: dict[str, Any] = {"absent": "silent", "age": 11.0, "stood_s": 3.0, "group": "0", "group_sequence": 9}
    patient: dict[str, Any] = {"phase": "idle", "limit": 60.0, "last_collective": "all_reduce"}
    ahead = [view(rank, **words, **patient) for rank in (0, 1, 3)]
    return judge([*ahead, view(2, **{**words, "phase": "forward", "group_sequence": 8, **of_the_one_behind})])


def test_where_all_fell_silent_after_they_stood_still_the_one_behind_is_likely():
    verdict = must(fallen_silent())
    assert (verdict.kind, verdict.hung, verdict.waiting, verdict.sure) == ("missing", (2,), (0, 1, 3), False)
    assert verdict.collective == Collective("all_reduce", 9)
    assert fallen_silent(stood_s=0.5) is None, "it was moving when it was heard last: perhaps nobody hears any of them"
    assert fallen_silent(age=9.0) is None
    assert fallen_silent(group_sequence=9) is None, "nobody is behind"
    assert fallen_silent(group="7") is None, "counts of other groups do not compare"
    assert fallen_silent(phase="eval", limit=300.0) is None
    assert fallen_silent(absent="", limit=60.0) is None, "it is heard, and may be at work"


def test_where_counts_do_not_separate_a_rank_asleep_in_its_own_code_is_likely():
    # DDP without a recorder: no collective is counted, and all others sit in their backward.
    waiting = [view(rank, found(members={}, frames=BACKWARD, asleep=0.0), age=9.0) for rank in (0, 1)]
    late = view(2, found(members={}, frames=SLEEPS), phase="idle")
    verdict = must(judge([*waiting, late]))
    assert (verdict.kind, verdict.hung, verdict.sure) == ("missing", (2,), False)
    assert must(judge([*waiting, view(2, found(members={}, frames=BACKWARD), age=9.0)])).kind == "unclear"


def test_all_in_the_same_collective_still_cannot_be_told():
    def views(age: float) -> list[RankView]:
        evidence = found(("0", 9, "all_reduce", 5))
        return [view(rank, evidence, inside="all_reduce", group="0", age=age) for rank in range(4)]

    assert judge(views(7.5)) is None, "nobody would be named: the ordinary patience holds"
    assert must(judge(views(9.0))).kind == "unclear"


def test_a_rank_asleep_after_the_end_of_its_script_hangs_at_exit_sooner():
    done = view(0, finished=True)
    over = found(members={}, frames=[Frame("/usr/lib/python3.11/threading.py", 1583, "_shutdown")])
    assert must(judge([done, view(1, over, phase="idle", age=EXIT_SURE_S + 1)])).hung == (1,)
    lingers = view(1, found(), phase="exit", age=EXIT_SURE_S + 1, limit=EXIT_LIMIT_S)
    assert must(judge([done, lingers])).kind == "exit"


def test_a_rank_in_a_collective_with_a_finished_one_waits_in_vain_and_in_another_group_may_not():
    done = view(0, finished=True, step=11)
    inside = view(1, found(("0", 9, "barrier")), inside="barrier", group="0", group_sequence=9, age=5.0)
    assert must(judge([done, inside])).kind == "left"
    other = found(("5", 9, "barrier"), members={"0": (0, 1, 2), "5": (1, 2)})
    assert judge([done, view(1, other, inside="barrier", group="5", age=EXIT_SURE_S + 1)]) is None


def test_an_answer_that_makes_no_sense_is_no_evidence():
    assert read_calls({"recent": 5}) == Calls()
    assert read_calls(None) == Calls()
    good = read_calls({"source": "calls", "recent": [["0", 3, "barrier", 0, None]], "ranks": {"0": [0, 1]}})
    assert good.last("0") == 3
    assert good.members == {"0": (0, 1)}


def test_nobody_waits_where_groups_are_not_known():
    assert waits([view(0), view(1)]) is None


def test_work_in_the_process_tree_has_its_own_patience_and_retries_are_no_sleep():
    waiting = [view(rank, found(("0", 9, "all_reduce")), inside="all_reduce", group="0", age=30.0) for rank in (0, 1)]

    def late(age: float, **more: Any) -> RankView:
        seen = found(("0", 8, "all_reduce", 0, True), frames=SLEEPS, **more)
        return view(2, seen, phase="data", age=age, limit=8.0, asleep_limit=7.0, working_limit=60.0)

    assert judge([*waiting, late(30.0, asleep=0.0, work="works")]) is None
    assert must(judge([*waiting, late(61.0, asleep=0.0, work="works")])).hung == (2,)
    assert judge([*waiting, late(7.5, restless=True)]) is None, "it woke up in between"
    assert must(judge([*waiting, late(7.5)])).hung == (2,)
    assert must(judge([*waiting, late(8.5, asleep=0.0, work="computes")])).hung == (2,)


def test_a_rank_for_which_nobody_waits_has_the_whole_patience_of_its_phase_asleep_or_not():
    assert judge([view(0, found(frames=SLEEPS), phase="idle", age=100.0, limit=300.0)]) is None
    assert must(judge([view(0, found(frames=SLEEPS), phase="idle", age=301.0, limit=300.0)])).hung == (0,)


def test_a_rank_that_steps_on_without_the_collective_the_others_wait_in_ran_ahead():
    waiter = view(
        0, found(("0", 45, "all_reduce", 0, True), ("0", 46, "all_reduce")), age=5.0, step=42, steps_then={1: 45}
    )

    def goes_on(steps: int, number: int, step: int) -> RankView:
        latest = found(("0", number, "all_reduce", 0, True), steps=steps)
        return view(1, None, age=0.1, step=step, latest=latest)

    verdict = must(judge([waiter, goes_on(60, 45, 61)]))
    assert (verdict.kind, verdict.hung, verdict.waiting, verdict.sure) == ("ahead", (1,), (0,), True)
    assert (verdict.facts, verdict.collective) == (RanAhead(61, 42), Collective("all_reduce", 46))
    assert judge([waiter, goes_on(60, 46, 61)]) is None, "it has entered it"
    assert judge([waiter, goes_on(47, 45, 48)]) is None, "two steps may be in flight"
    assert judge([waiter, goes_on(60, 45, 30)]) is None, "it is behind, and still comes"


def lock(**more: Any) -> Any:
    return LockWait(**{"path": "/home/me/.cache/torch_extensions/x y/lock", "build": True, "idle_s": 60.0, **more})


def test_a_build_lock_that_every_rank_waits_for_without_a_compiler_is_named_at_once():
    at_lock = [view(rank, found(lock=lock()), phase="init", age=4.0, limit=300.0) for rank in (0, 1)]
    verdict = must(judge(at_lock))
    assert (verdict.kind, verdict.hung, verdict.waiting) == ("lock", (), (0, 1))
    assert verdict.facts == StaleLocks(("/home/me/.cache/torch_extensions/x y/lock",))
    in_barrier = view(2, found(), inside="barrier", group="0", phase="init", age=4.0, limit=300.0)
    assert must(judge([*at_lock, in_barrier])).kind == "lock"
    for changes in ({"compiler": True}, {"idle_s": 1.0}):
        builds = view(1, found(lock=lock(**changes)), phase="init", age=4.0, limit=300.0)
        assert judge([at_lock[0], builds]) is None
    elsewhere = view(1, found(frames=SLEEPS), phase="init", age=4.0, limit=300.0)
    assert judge([at_lock[0], elsewhere]) is None, "it may be the one that builds"


def test_a_rank_that_uploads_after_the_others_finished_is_no_hang_at_exit():
    done = view(0, finished=True)

    def left(age: float, **more: Any) -> RankView:
        return view(1, found(asleep=age, **more), phase="exit", age=age, limit=EXIT_LIMIT_S)

    assert judge([done, left(200.0, work="works")]) is None
    assert must(judge([done, left(EXIT_WORKING_S + 1, work="works")])).kind == "exit"
    assert must(judge([done, left(EXIT_SURE_S + 1)])).kind == "exit"


# Ranks that wait for their device or for others: no phase's limit applies to them.

SAVES = (
    Frame(f"{SITE}/torch/distributed/distributed_c10d.py", 5030, "barrier"),
    Frame(f"{SITE}/deepspeed/comm/comm.py", 400, "barrier"),
    Frame(f"{SITE}/deepspeed/runtime/engine.py", 4900, "save_checkpoint"),
    Frame("/home/me/train.py", 41, "main"),
)
STEPS = (
    Frame(f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py", 3248, "has_overflow"),
    Frame(f"{SITE}/deepspeed/runtime/engine.py", 3000, "step"),
    Frame("/home/me/train.py", 38, "main"),
)
AFTER_LOOP = (
    Frame(f"{SITE}/torch/distributed/distributed_c10d.py", 5030, "barrier"),
    Frame("/home/me/train.py", 60, "main"),
)
LOOP = {"/home/me/train.py:38": ((30, 45),), "/home/me/train.py:41": ((30, 45),), "/home/me/train.py:60": ()}
PAIR = {"0": (0, 1), "1": (0, 1)}


def spins(*recent: tuple[Any, ...], frames: Any, **more: Any) -> Evidence:
    """Make evidence of a rank that spins at one line, as under NCCL."""
    return found(*recent, members=PAIR, frames=frames, **{"asleep": 0.0, "stands": 2.0, "loops": LOOP, **more})


def crossed(saving: Evidence, **fields: Any) -> list[RankView]:
    """Rank 0 outside of a step, rank 1 in the optimizer's, each in a collective that the other has not entered."""
    given = {"age": 4.0, "limit": 600.0, "asleep_limit": 600.0}
    out = view(0, saving, **{"step": 61, "phase": "checkpoint", **given, **fields})
    return [out, view(1, spins(("1", 7, "all_reduce"), frames=STEPS), step=61, phase="optimizer", **given)]


def test_a_rank_in_save_checkpoint_alone_is_found_before_any_limit_of_its_phase():
    verdict = must(judge(crossed(spins(("0", 1, "barrier"), ("1", 6, "all_reduce", 0, True), frames=SAVES))))
    assert (verdict.kind, verdict.waiting) == ("deadlock", (0, 1))
    assert of_verdict(verdict).title == (
        "rank 0 is in save_checkpoint, train.py:41, which all ranks must call; "
        "rank 1 waits in step 61, in step(), train.py:38"
    )


def test_a_rank_behind_the_loop_of_the_others_has_left_it():
    verdict = must(judge(crossed(spins(("0", 1, "barrier"), frames=AFTER_LOOP), phase="idle")))
    assert of_verdict(verdict).title == (
        "rank 0 left the loop after step 60 and waits in barrier, train.py:60; "
        "rank 1 waits in step 61, in step(), train.py:38: unequal data, or an early stop"
    )


def test_a_barrier_within_the_loop_is_a_branch_that_the_others_do_not_take():
    inside = (AFTER_LOOP[0], Frame("/home/me/train.py", 41, "main"))
    title = of_verdict(must(judge(crossed(spins(("0", 1, "barrier"), frames=inside), phase="idle")))).title
    assert title.startswith("rank 0 waits after step 60, in barrier, train.py:41; rank 1 waits in step 61")
    assert title.endswith("the ranks take different branches")


def test_ranks_at_one_place_are_named_together():
    verdict = must(judge(crossed(spins(("0", 1, "barrier"), frames=AFTER_LOOP), phase="idle")))
    cause = must_cause(cause_of(verdict))
    assert _together([*cause.others, replace(cause.others[0], rank=3)]).startswith("ranks 1 and 3 wait in step 61, in ")
    ended = replace(cause.others[0], ended=True)
    assert _together([ended, replace(ended, rank=3)]) == "ranks 1 and 3 have ended in step 61"


def branch(mine: str, theirs: str, loops: dict[str, Any]) -> str:
    """Return the cause of rank 0 at ``mine`` and rank 1 in a step at ``theirs``: function:line, innermost first."""

    def stack(spec: str) -> tuple[Frame, ...]:
        lines = [part.split(":") for part in spec.split()]
        return tuple(Frame("/home/me/train.py", int(line), name) for name, line in lines)

    known = {f"/home/me/train.py:{line}": found for line, found in loops.items()}
    out = spins(("0", 1, "barrier"), frames=(AFTER_LOOP[0], *stack(mine)), loops=known)
    step = spins(("1", 7, "all_reduce"), frames=(STEPS[1], *stack(theirs)), loops=known)
    given = {"step": 31, "age": 4.0, "limit": 600.0, "asleep_limit": 600.0}
    verdict = must(judge([view(0, out, phase="idle", **given), view(1, step, phase="backward", **given)]))
    return must_cause(cause_of(verdict)).kind


def must_cause(cause: Cause | None) -> Cause:
    assert cause is not None
    return cause


def test_a_later_line_is_behind_the_loop_only_if_the_loop_is_between_them():
    epochs, batches = (10, 14), (6, 8)
    assert branch("main:13", "train_epoch:7 main:11", {"7": [batches], "11": [epochs], "13": [epochs]}) == "left_loop"
    assert branch("log:9 main:16", "log:11 main:16", {"9": [], "11": [], "16": [(15, 16)]}) == "branch"
    assert branch("step:16 fit:22", "step:10 fit:22", {"16": [], "10": [], "22": [(20, 22)]}) == "branch"
    assert branch("main:19", "export:12 main:18", {"19": [], "12": [], "18": []}) == "branch"


def test_other_threads_of_the_script_may_enter_the_collective_so_nothing_is_sure():
    views = crossed(spins(("0", 1, "barrier"), frames=SAVES, threads=True))
    assert must(judge(views)).sure is False


def test_a_rank_that_still_trains_holds_the_others_up_and_is_not_hung():
    waiting = view(1, spins(("1", 7, "all_reduce"), frames=STEPS), phase="backward", age=20.0)
    counted = found(("1", 6, "all_reduce", 0, True), members=PAIR, frames=SLEEPS)
    assert judge([view(0, None, phase="forward", age=0.1, latest=counted), waiting]) is None


def test_steps_without_a_collective_of_the_group_are_not_ahead_of_it():
    waiting = view(
        0, found(("0", 30, "all_reduce")), inside="all_reduce", group="0", step=30, steps_then={1: 29}, age=5.0
    )
    late = found(("0", 29, "all_reduce", 0, True), steps=34)
    ahead = view(1, late, latest=late, step=34, age=0.2)
    assert must(judge([waiting, ahead])).kind == "ahead"
    rare = replace(waiting, evidence=found(("0", 3, "all_reduce")))
    seldom = found(("0", 2, "all_reduce", 0, True), steps=34)
    assert judge([rare, replace(ahead, evidence=seldom, latest=seldom)]) is None


def test_gathered_parameters_entered_unequally_are_counted():
    gather = (Frame(f"{SITE}/deepspeed/runtime/zero/partition_parameters.py", 2128, "__enter__"), SAVES[-1])
    out = spins(("0", 9, "all_gather_base", 4096), frames=gather, gathers=2)
    step = spins(("0", 9, "all_gather_base", 64), frames=STEPS, gathers=1)
    views = [view(0, out, phase="idle", age=4.0, limit=300.0), view(1, step, phase="forward", age=4.0)]
    verdict = must(judge(views))
    assert verdict.kind == "mismatch"
    assert of_verdict(verdict).title.startswith(
        "GatheredParameters entered 2 times on rank 0, once on rank 1: rank 0 waits after step 11, "
        "in GatheredParameters, train.py:41; rank 1 waits in step 12, in step(), train.py:38"
    )


def test_a_loop_around_the_gather_itself_is_not_the_trainings():
    gather = (Frame(f"{SITE}/deepspeed/runtime/zero/partition_parameters.py", 2128, "__enter__"), SAVES[-1])
    again = spins(("0", 9, "all_gather_base", 4096), frames=gather, gathers=2)
    behind = spins(("0", 9, "all_gather_base", 64), frames=AFTER_LOOP, gathers=1)
    views = [view(rank, found, phase="forward", age=4.0, limit=300.0) for rank, found in ((0, behind), (1, again))]
    assert of_verdict(must(judge(views))).title.startswith(
        "GatheredParameters entered 2 times on rank 1, once on rank 0"
    )


def test_sizes_that_differ_are_named_with_their_lines():
    verdict = must(
        judge(
            [
                view(rank, spins(("0", 1, "all_reduce", size), frames=SLEEPS), phase="idle", age=4.0, limit=300.0)
                for rank, size in ((0, 4096), (1, 16))
            ]
        )
    )
    title = "all_reduce of different sizes: rank 0: 4,096 elements, train.py:52; rank 1: 16 elements, train.py:52"
    assert of_verdict(verdict).title == title


def test_ranks_that_still_work_or_have_just_moved_are_not_in_a_deadlock():
    saving = spins(("0", 1, "barrier"), frames=SAVES)
    assert judge(crossed(replace(saving, stands=1.0))) is None
    assert judge(crossed(saving, age=2.0)) is None
    assert judge(crossed(replace(saving, wakes=20.0))) is None, "asleep until a set time"


def test_ranks_wait_for_one_whose_script_has_ended_in_an_earlier_step():
    ended = view(0, finished=True, step=61, phase="idle", age=5.0)
    waits_for = spins(("1", 7, "all_reduce"), frames=STEPS)
    verdict = must(judge([ended, view(1, waits_for, step=61, phase="optimizer", age=5.0)]))
    assert (verdict.kind, verdict.waiting, verdict.sure) == ("left", (1,), True)
    assert of_verdict(verdict).title == (
        "rank 0 left the loop after step 60: its script has ended; "
        "rank 1 waits in step 61, in step(), train.py:38: unequal data, or an early stop"
    )
    assert judge([ended, view(1, waits_for, step=61, phase="optimizer", age=3.0)]) is None
    just_ended = replace(ended, age=2.0)
    assert judge([just_ended, view(1, waits_for, step=61, phase="optimizer", age=5.0)]) is None, "others may follow"
    computes = replace(waits_for, stands=0.0)
    assert judge([ended, view(1, computes, step=61, phase="optimizer", age=5.0)]) is None


def test_while_every_rank_has_entered_the_same_collectives_the_devices_may_compute_for_a_minute():
    same = [("1", 7, "all_reduce")]
    views = [view(rank, spins(*same, frames=STEPS), phase="optimizer", age=20.0) for rank in (0, 1)]
    assert judge(views) is None
    late = [view(rank, spins(*same, frames=STEPS), phase="optimizer", age=ENTERED_S + 1) for rank in (0, 1)]
    assert must(judge(late)).kind == "unclear"


def test_a_rank_whose_device_computes_for_no_collective_has_the_patience_of_one_that_works():
    waiting = view(0, spins(("1", 7, "all_reduce"), frames=STEPS), phase="optimizer", age=20.0)
    busy = spins(("1", 6, "all_reduce", 0, True), frames=STEPS, work="device")
    assert judge([waiting, view(1, busy, phase="forward", age=20.0, working_limit=60.0)]) is None
    assert must(judge([waiting, view(1, replace(busy, work=""), phase="forward", age=20.0)])).hung == (1,)


def test_a_sleep_that_ends_soon_is_work_and_one_of_a_day_is_a_hang():
    waiting = view(0, spins(("1", 7, "all_reduce"), frames=STEPS), phase="optimizer", age=12.0)

    def asleep(wakes: float | None) -> Verdict | None:
        sleeper = found(("1", 6, "all_reduce", 0, True), members=PAIR, frames=SLEEPS, wakes=wakes)
        return judge([waiting, view(1, sleeper, phase="data", age=12.0, working_limit=60.0)])

    assert asleep(24.0) is None
    assert must(asleep(90_000.0)).hung == (1,)
    assert must(asleep(None)).hung == (1,)


def by_nccl(count: int) -> Calls:
    """Make NCCL's own count of a communicator in which another rank has launched 9, or 8, collectives."""
    return Calls("nccl", (Call("0xab", count, "collective", 0, False if count == 9 else None),), {}, {"0xab": (0, 1)})


def test_nccls_own_counts_name_the_rank_behind_where_nothing_was_recorded():
    def counted(count: int, **more: Any) -> Evidence:
        nccl = Calls(
            "nccl", (Call("0xab", count, "collective", 0, False if count == 9 else None),), {}, {"0xab": (0, 1)}
        )
        return Evidence(1.0, by="probe", frames=SLEEPS, place=where(SLEEPS), nccl=nccl, **more)

    ahead = view(0, counted(9), age=20.0)
    verdict = must(judge([ahead, view(1, counted(8, asleep=6.0), age=20.0)]))
    assert (verdict.kind, verdict.hung, verdict.sure) == ("missing", (1,), True)


def test_a_verdict_that_nccls_counts_contradict_is_not_sure_and_says_so():
    def also(evidence: Evidence, count: int) -> Evidence:
        done = False if count == 9 else None
        return replace(
            evidence, nccl=Calls("nccl", (Call("0xab", count, "collective", 0, done),), {}, {"0xab": (0, 1)})
        )

    waiting = spins(("1", 7, "all_reduce"), frames=STEPS)
    late = found(("1", 6, "all_reduce", 0, True), members=PAIR, frames=SLEEPS)
    agree = must(judge([view(0, also(waiting, 9)), view(1, also(late, 8), age=9.0)]))
    assert (agree.hung, agree.sure, agree.contradicted) == ((1,), True, False)
    differ = must(judge([view(0, also(waiting, 8)), view(1, also(late, 9), age=9.0)]))
    assert (differ.hung, differ.sure, differ.contradicted) == ((1,), False, True)
    assert "NCCL's own counters" in of_verdict(differ).text
