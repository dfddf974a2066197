"""Judging with what a look at the ranks found: collectives side by side, stacks, and who is asleep."""

import faulthandler
import tempfile
import threading
from dataclasses import replace
from typing import Any

import pytest
from ftmon.protocol.analysis.stalls.collectives import Difference, RankView, difference
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


TRAIN = "/home/me/train.py"
SITE = "/env/lib/python3.11/site-packages"
SHUTDOWN = Frame("/usr/lib/python3.11/threading.py", 1583, "_shutdown")
BUILD_WAIT = "a wait for another process to build a PyTorch extension, or for the lock file that one left behind"

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
  File "{TRAIN}", line 40 in main
  File "{TRAIN}", line 60 in <module>
"""

DATA = f"""\
Thread 0x00007f0000000009 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 415 in select
  File "{SITE}/torch/utils/data/dataloader.py", line 1270 in _try_get_data
  File "{SITE}/torch/utils/data/dataloader.py", line 700 in __next__
  File "{SITE}/ftmon/trainer/probe/hooks/torch.py", line 88 in __next__
  File "{TRAIN}", line 38 in main
  File "{TRAIN}", line 60 in <module>
"""


LOADER = f"{SITE}/torch/utils/data/dataloader.py"

IN_THIS_PROCESS = [
    Frame(TRAIN, 12, "__getitem__"),
    Frame(f"{SITE}/torch/utils/data/_utils/fetch.py", 52, "fetch"),
    Frame(LOADER, 789, "_next_data"),
    Frame(LOADER, 733, "__next__"),
    Frame(TRAIN, 38, "main"),
]
BUILD_LOCK = [
    Frame(f"{SITE}/torch/utils/file_baton.py", 54, "wait"),
    Frame(f"{SITE}/torch/utils/cpp_extension.py", 2012, "_jit_compile"),
    Frame(f"{SITE}/deepspeed/ops/op_builder/builder.py", 560, "jit_load"),
    Frame(TRAIN, 12, "main"),
]
OF_LIBRARY = [Frame(f"{SITE}/requests/api.py", 59, "request"), Frame(TRAIN, 12, "load")]


@pytest.mark.parametrize(
    ("frames", "doing", "text"),
    [
        (parse(COLLECTIVE)[-1].frames, "collective", "all_gather_into_tensor in stage3.py:582 in gather"),
        (parse(DATA)[0].frames, "data", "next() of the dataloader in train.py:38 in main"),
        (IN_THIS_PROCESS, "data", "next() of the dataloader (train.py:12 in __getitem__) in train.py:38 in main"),
        ([Frame(TRAIN, 12, "load"), Frame(TRAIN, 60, "<module>")], "code", "train.py:12 in load"),
        (OF_LIBRARY, "code", "request (api.py:59) in train.py:12 in load"),
        ([], "", ""),
        ([SHUTDOWN], "exiting", "the end of the script: waits for a thread or a child"),
        (BUILD_LOCK, "waiting", f"{BUILD_WAIT} in train.py:12 in main"),
    ],
)
def test_a_stack_in_words(frames: Any, doing: str, text: str):
    place = where(frames)
    assert (place.doing, place.text) == (doing, text)


def test_only_the_dataloader_s_wait_for_a_worker_wakes_up_by_itself():
    assert not waits_for_loader_worker(IN_THIS_PROCESS), "a retry every few seconds is the script's own"
    assert waits_for_loader_worker(parse(DATA)[0].frames)


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


@pytest.mark.parametrize(
    ("seconds", "phase", "least", "most"),
    [
        ([], "forward", 300.0, 300.0),
        *(([0.05] * 20, name, FLOOR_S[name], FLOOR_S[name]) for name in ("data", "forward", "backward", "optimizer")),
        ([300.0] + [6.0] * 20, "forward", 27.0, 33.0),
        ([120.0] + [0.05] * 10, "forward", FLOOR_S["forward"], FLOOR_S["forward"]),
        ([0.1] + [4.0] * 10 + [900.0], "forward", 0.0, 5 * 8.0),
        ([0.1] + [1.0] * 10 + [20.0] * 6, "forward", 5 * 20.0, 500.0),
    ],
    ids=["before the first step", *("short phases have their floor",) * 4, "five times the usual longest",
         "the first step teaches nothing", "one long step at most doubles it", "what becomes usual is learned"],
)  # fmt: skip
def test_the_limit_of_a_phase(make_sim: Any, seconds: list[float], phase: str, least: float, most: float):
    assert least <= learned(make_sim, seconds, phase).limit() <= most


def test_a_phase_may_take_twice_as_long_as_in_the_first_step_until_a_later_one_has_it(make_sim: Any):
    minutes = learned(make_sim, [100.0], "optimizer")
    assert minutes.limit() == minutes.working_limit() == 200.0
    assert minutes.asleep_limit() == learned(make_sim, [0.1], "optimizer").asleep_limit(), "a rank that waits"
    assert learned(make_sim, [1.0], "optimizer").limit() == EARLY.computing_s
    assert learned(make_sim, [100.0, 0.1], "optimizer").limit() == EARLY.computing_s
    assert learned(make_sim, [100.0, 100.0], "optimizer").limit() == 500.0


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

SLEEPS = (Frame(TRAIN, 52, "main"),)
BACKWARD = (
    Frame(f"{SITE}/torch/autograd/graph.py", 824, "_engine_run_backward"),
    Frame(f"{SITE}/torch/_tensor.py", 581, "backward"),
    Frame(TRAIN, 40, "main"),
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


EIGHT = ("0", 8, "all_reduce", 0, True)
"""The collective before the one that the others wait in."""


def waiting(*ranks: int, **fields: Any) -> list[RankView]:
    return [view(rank, found(("0", 9, "all_reduce")), inside="all_reduce", group="0", **fields) for rank in ranks]


def test_a_rank_found_asleep_is_named_before_the_patience_of_its_phase_is_over():
    verdict = must(judge([*waiting(0, 1, 3), view(2, found(EIGHT, frames=SLEEPS), phase="forward")]))
    assert (verdict.kind, verdict.hung, verdict.waiting, verdict.sure) == ("missing", (2,), (0, 1, 3), True)
    assert where_of(verdict.views[2]) == "in forward: train.py:52 in main"


def test_work_is_not_sleep_and_has_the_patience_of_its_phase():
    works = found(EIGHT, frames=SLEEPS, asleep=0.0)
    assert judge([*waiting(0, 1, 3), view(2, works, phase="forward")]) is None
    evaluates = view(
        2, found(EIGHT, frames=SLEEPS, asleep=50.0), phase="eval", age=52.0, limit=300.0, asleep_limit=60.0
    )
    assert judge([*waiting(0, 1, 3), evaluates]) is None


def test_a_receive_that_nobody_sends_to_is_a_mismatch_with_the_collective_the_others_are_in():
    verdict = must(judge([view(0, found(EIGHT), inside="recv"), *waiting(1)]))
    assert (verdict.kind, verdict.hung, verdict.differs) == ("mismatch", (), (0,))
    assert (verdict.facts, verdict.collective) == (OtherRanks((0,)), Collective("all_reduce", 9))


def test_a_rank_that_receives_from_the_one_asleep_is_not_named():
    asleep = view(1, found(EIGHT, frames=SLEEPS), phase="forward")
    assert must(judge([view(0, found(EIGHT), inside="recv"), asleep, *waiting(2)])).hung == (1,)


def test_two_groups_that_wait_for_each_other_are_a_deadlock_and_nobody_is_named():
    members = {"0": (0, 1), "1": (0, 1), "2": (0, 1)}
    first = found(("1", 4, "all_reduce"), ("2", 3, "all_gather", 0, True), members=members)
    second = found(("1", 3, "all_reduce", 0, True), ("2", 4, "all_gather"), members=members)
    views = [view(0, first, inside="all_reduce", group="1"), view(1, second, inside="all_gather", group="2")]
    verdict = must(judge(views))
    assert (verdict.kind, verdict.hung, verdict.sure) == ("deadlock", (), True)
    calls = {0: Collective("all_reduce", 4, (0, 1), "1"), 1: Collective("all_gather", 4, (0, 1), "2")}
    assert verdict.facts == CircularWait(calls)


def test_whoever_is_outside_of_the_group_is_not_blamed_for_its_collective():
    members = {"0": (0, 1, 2, 3), "5": (0, 1)}
    stuck = found(("0", 7, "barrier", 0, True), ("5", 3, "all_reduce"), members=members)
    late = found(("0", 7, "barrier", 0, True), ("5", 2, "all_reduce", 0, True), members=members, frames=SLEEPS)
    outside = [view(rank, found(("0", 8, "barrier"), members=members), inside="barrier", group="0") for rank in (2, 3)]
    verdict = must(judge([view(0, stuck, inside="all_reduce", group="5"), view(1, late, phase="forward"), *outside]))
    assert (verdict.kind, verdict.hung, verdict.waiting) == ("missing", (1,), (0, 2, 3))


def test_the_end_of_a_chain_of_waits_is_named_not_its_middle():
    members = {"a": (0, 1), "b": (1, 2)}
    views = [
        view(0, found(("a", 2, "all_reduce"), members=members), inside="all_reduce", group="a"),
        view(1, found(("a", 1, "x", 0, True), ("b", 2, "send"), members=members), inside="bcast", group="b"),
        view(2, found(("b", 1, "x", 0, True), members=members, frames=SLEEPS), phase="data"),
    ]
    verdict = must(judge(views))
    assert (verdict.hung, verdict.waiting) == ((2,), (0, 1))


@pytest.mark.parametrize("odd", [("0", 9, "all_gather", 64), ("0", 9, "all_reduce", 32)])
def test_a_collective_that_one_rank_entered_differently_is_a_mismatch_with_the_odd_one_told(odd: Any):
    views = [view(rank, found(("0", 9, "all_reduce", 64)), inside="all_reduce", group="0") for rank in (0, 1, 3)]
    verdict = must(judge([*views, view(2, found(odd), inside=odd[2], group="0")]))
    assert (verdict.kind, verdict.hung, verdict.differs) == ("mismatch", (), (2,))
    assert isinstance(verdict.facts, Difference)
    assert [call[:4] for call in verdict.facts.calls.values()] == [*(("0", 9, "all_reduce", 64),) * 3, odd]


def test_sizes_may_differ_where_every_rank_may_give_another_one():
    assert difference([view(rank, found(("0", 9, "all_to_all_single", 10 + rank))) for rank in (0, 1)]) is None
    done = [view(rank, found(("0", 9, "all_reduce", 10 + rank, True))) for rank in (0, 1)]
    assert difference(done) is None, "it is behind all of them"


def test_ddps_collectives_are_seen_through_the_recorder_under_nccl():
    ahead = [view(rank, found(("0", 30, "all_reduce", 5)), age=9.0) for rank in (0, 1, 3)]
    verdict = must(judge([*ahead, view(2, found(("0", 28, "all_reduce", 5, True), frames=SLEEPS), phase="data")]))
    assert (verdict.kind, verdict.hung, verdict.collective) == ("missing", (2,), Collective("all_reduce", 30))


def test_a_rank_that_holds_pythons_lock_in_native_code_is_told_with_its_line():
    late = view(2, found(frames=SLEEPS, by="signal"), absent="silent", phase="forward", group="0", group_sequence=8)
    verdict = must(judge([*waiting(0, 1, 3, group_sequence=9), late]))
    assert (verdict.hung, verdict.sure) == ((2,), True)
    assert where_of(verdict.views[2]) == "in forward, in native code that holds the GIL: train.py:52 in main"


def held_up_between_steps(age: float = 11.0, **of_the_silent_one: Any) -> Verdict | None:
    """Judge ranks that wait for their devices outside every phase, where patience is long, beside a silent one."""
    patient: dict[str, Any] = {"phase": "idle", "limit": 60.0, "asleep_limit": 15.0, "group_sequence": 9}
    calls = Calls("recorder", (Call("0", 9, "all_reduce", 5, False),), {"0": 9}, WORLD)
    waits = [view(rank, Evidence(1.0, by="probe", calls=calls), age=age, group="0", **patient) for rank in (0, 1, 3)]
    given = {"absent": "silent", "phase": "forward", "age": age, "group": "0", "group_sequence": 8, **of_the_silent_one}
    return judge([*waits, view(2, **given)])


def fallen_silent(**of_the_one_behind: Any) -> Verdict | None:
    """Judge ranks that all fell silent once they stood still; their last words put one of them behind."""
    words: dict[str, Any] = {"absent": "silent", "age": 11.0, "stood_s": 3.0, "group": "0", "group_sequence": 9}
    patient: dict[str, Any] = {"phase": "idle", "limit": 60.0, "last_collective": "all_reduce"}
    ahead = [view(rank, **words, **patient) for rank in (0, 1, 3)]
    return judge([*ahead, view(2, **{**words, "phase": "forward", "group_sequence": 8, **of_the_one_behind})])


@pytest.mark.parametrize("judged", [held_up_between_steps, fallen_silent])
def test_a_silent_rank_is_likely_at_fault_where_it_has_not_entered_what_the_others_wait_in(judged: Any):
    verdict = must(judged())
    assert (verdict.kind, verdict.hung, verdict.waiting, verdict.sure) == ("missing", (2,), (0, 1, 3), False)
    assert (verdict.collective, verdict.views[2].absent) == (Collective("all_reduce", 9), "silent")
    assert judged(age=9.0) is None
    assert judged(group_sequence=9) is None, "it has entered as far as was heard"
    assert judged(absent="", limit=60.0) is None, "it is heard, and may be at work"


def test_a_silent_rank_is_not_at_fault_if_it_may_work_or_its_last_words_prove_nothing():
    assert held_up_between_steps(absent="cut off") is None
    assert held_up_between_steps(phase="checkpoint", limit=600.0) is None, "it may be writing, the lock held"
    assert fallen_silent(stood_s=0.5) is None, "it was moving when it was heard last: perhaps nobody hears any of them"
    assert fallen_silent(group="7") is None, "counts of other groups do not compare"
    assert fallen_silent(phase="eval", limit=300.0) is None


def test_where_counts_do_not_separate_a_rank_asleep_in_its_own_code_is_likely():
    # DDP without a recorder: no collective is counted, and all others sit in their backward.
    waits = [view(rank, found(members={}, frames=BACKWARD, asleep=0.0), age=9.0) for rank in (0, 1)]
    verdict = must(judge([*waits, view(2, found(members={}, frames=SLEEPS), phase="idle")]))
    assert (verdict.kind, verdict.hung, verdict.sure) == ("missing", (2,), False)
    assert must(judge([*waits, view(2, found(members={}, frames=BACKWARD), age=9.0)])).kind == "unclear"


def test_all_in_the_same_collective_still_cannot_be_told():
    assert judge(waiting(*range(4), age=7.5)) is None, "nobody would be named: the ordinary patience holds"
    assert must(judge(waiting(*range(4), age=9.0))).kind == "unclear"


def test_a_rank_asleep_after_the_end_of_its_script_hangs_at_exit_sooner():
    done = view(0, finished=True)
    over = found(members={}, frames=[SHUTDOWN])
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


def test_work_in_the_process_tree_has_its_own_patience_and_retries_are_no_sleep():
    def late(age: float, **more: Any) -> Verdict | None:
        seen = view(2, found(EIGHT, frames=SLEEPS, **more), phase="data", age=age, working_limit=60.0)
        return judge([*waiting(0, 1, age=30.0), seen])

    assert late(30.0, asleep=0.0, work="works") is None
    assert must(late(61.0, asleep=0.0, work="works")).hung == (2,)
    assert late(7.5, restless=True) is None, "it woke up in between"
    assert must(late(7.5)).hung == (2,)
    assert must(late(8.5, asleep=0.0, work="computes")).hung == (2,)


def test_a_rank_for_which_nobody_waits_has_the_whole_patience_of_its_phase_asleep_or_not():
    assert judge([view(0, found(frames=SLEEPS), phase="idle", age=100.0, limit=300.0)]) is None
    assert must(judge([view(0, found(frames=SLEEPS), phase="idle", age=301.0, limit=300.0)])).hung == (0,)


def test_a_rank_that_steps_on_without_the_collective_the_others_wait_in_ran_ahead():
    calls = found(("0", 45, "all_reduce", 0, True), ("0", 46, "all_reduce"))
    waiter = view(0, calls, age=5.0, step=42, steps_then={1: 45})

    def goes_on(steps: int, number: int, step: int) -> Verdict | None:
        latest = found(("0", number, "all_reduce", 0, True), steps=steps)
        return judge([waiter, view(1, None, age=0.1, step=step, latest=latest)])

    verdict = must(goes_on(60, 45, 61))
    assert (verdict.kind, verdict.hung, verdict.waiting, verdict.sure) == ("ahead", (1,), (0,), True)
    assert (verdict.facts, verdict.collective) == (RanAhead(61, 42), Collective("all_reduce", 46))
    assert goes_on(60, 46, 61) is None, "it has entered it"
    assert goes_on(47, 45, 48) is None, "two steps may be in flight"
    assert goes_on(60, 45, 30) is None, "it is behind, and still comes"


def test_a_build_lock_that_every_rank_waits_for_without_a_compiler_is_named_at_once():
    def at_start(rank: int, evidence: Evidence, **fields: Any) -> RankView:
        return view(rank, evidence, phase="init", age=4.0, limit=300.0, **fields)

    lock = LockWait("/home/me/.cache/torch_extensions/x y/lock", build=True, idle_s=60.0)
    at_lock = [at_start(rank, found(lock=lock)) for rank in (0, 1)]
    verdict = must(judge(at_lock))
    assert (verdict.kind, verdict.hung, verdict.waiting) == ("lock", (), (0, 1))
    assert verdict.facts == StaleLocks((lock.path,))
    assert must(judge([*at_lock, at_start(2, found(), inside="barrier", group="0")])).kind == "lock"
    for builds in (replace(lock, compiler=True), replace(lock, idle_s=1.0)):
        assert judge([at_lock[0], at_start(1, found(lock=builds))]) is None
    assert judge([at_lock[0], at_start(1, found(frames=SLEEPS))]) is None, "it may be the one that builds"


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
    Frame(TRAIN, 41, "main"),
)
STEPS = (
    Frame(f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py", 3248, "has_overflow"),
    Frame(f"{SITE}/deepspeed/runtime/engine.py", 3000, "step"),
    Frame(TRAIN, 38, "main"),
)
AFTER_LOOP = (
    Frame(f"{SITE}/torch/distributed/distributed_c10d.py", 5030, "barrier"),
    Frame(TRAIN, 60, "main"),
)
LOOP = {"/home/me/train.py:38": ((30, 45),), "/home/me/train.py:41": ((30, 45),), "/home/me/train.py:60": ()}
PAIR = {"0": (0, 1), "1": (0, 1)}


def spins(*recent: tuple[Any, ...], frames: Any, **more: Any) -> Evidence:
    """Make evidence of a rank that spins at one line, as under NCCL."""
    return found(*recent, members=PAIR, frames=frames, **{"asleep": 0.0, "stands": 2.0, "loops": LOOP, **more})


def crossed(saving: Evidence, **fields: Any) -> Verdict | None:
    """Judge rank 0 outside of a step, rank 1 in the optimizer's, each in a collective that the other is not in."""
    given = {"age": 4.0, "limit": 600.0, "asleep_limit": 600.0}
    out = view(0, saving, **{"step": 61, "phase": "checkpoint", **given, **fields})
    return judge([out, view(1, spins(("1", 7, "all_reduce"), frames=STEPS), step=61, phase="optimizer", **given)])


AT_STEP = "rank 1 waits in step 61, in step(), train.py:38"
IN_LOOP = (AFTER_LOOP[0], Frame(TRAIN, 41, "main"))


@pytest.mark.parametrize(
    ("frames", "phase", "title"),
    [
        (SAVES, "checkpoint", f"rank 0 is in save_checkpoint, train.py:41, which all ranks must call; {AT_STEP}"),
        (
            AFTER_LOOP,
            "idle",
            "rank 0 left the loop after step 60 and waits in barrier, train.py:60; "
            f"{AT_STEP}: unequal data, or an early stop",
        ),
        (
            IN_LOOP,
            "idle",
            f"rank 0 waits after step 60, in barrier, train.py:41; {AT_STEP}: the ranks take different branches",
        ),
    ],
)
def test_what_the_script_does_is_found_before_any_limit_of_the_phase(frames: Any, phase: str, title: str):
    verdict = must(crossed(spins(("0", 1, "barrier"), ("1", 6, "all_reduce", 0, True), frames=frames), phase=phase))
    assert (verdict.kind, verdict.waiting, verdict.sure) == ("deadlock", (0, 1), True)
    assert of_verdict(verdict).title == title
    threads = must(crossed(spins(("0", 1, "barrier"), frames=frames, threads=True), phase=phase))
    assert not threads.sure, "other threads of the script may enter the collective"


def test_ranks_at_one_place_are_named_together():
    verdict = must(crossed(spins(("0", 1, "barrier"), frames=AFTER_LOOP), phase="idle"))
    spot = must_cause(cause_of(verdict)).others[0]
    assert _together([spot, replace(spot, rank=3)]).startswith("ranks 1 and 3 wait in step 61, in ")
    ended = replace(spot, ended=True)
    assert _together([ended, replace(ended, rank=3)]) == "ranks 1 and 3 have ended in step 61"


def branch(mine: str, theirs: str, loops: dict[str, Any]) -> str:
    """Return the cause of rank 0 at ``mine`` and rank 1 in a step at ``theirs``: function:line, innermost first."""

    def stack(spec: str) -> tuple[Frame, ...]:
        lines = [part.split(":") for part in spec.split()]
        return tuple(Frame(TRAIN, int(line), name) for name, line in lines)

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


def test_a_rank_that_still_trains_holds_the_others_up_and_is_not_hung():
    waits = view(1, spins(("1", 7, "all_reduce"), frames=STEPS), phase="backward", age=20.0)
    counted = found(("1", 6, "all_reduce", 0, True), members=PAIR, frames=SLEEPS)
    assert judge([view(0, None, phase="forward", age=0.1, latest=counted), waits]) is None


def test_steps_without_a_collective_of_the_group_are_not_ahead_of_it():
    def ahead(number: int) -> Verdict | None:
        late = found(("0", number - 1, "all_reduce", 0, True), steps=34)
        (waits,) = waiting(0, step=30, steps_then={1: 29}, age=5.0)
        waits = replace(waits, evidence=found(("0", number, "all_reduce")))
        return judge([waits, view(1, late, latest=late, step=34, age=0.2)])

    assert must(ahead(30)).kind == "ahead"
    assert ahead(3) is None


def test_gathered_parameters_entered_unequally_are_counted():
    gather = (Frame(f"{SITE}/deepspeed/runtime/zero/partition_parameters.py", 2128, "__enter__"), SAVES[-1])
    again = spins(("0", 9, "all_gather_base", 4096), frames=gather, gathers=2)
    step, behind = (spins(("0", 9, "all_gather_base", 64), frames=at, gathers=1) for at in (STEPS, AFTER_LOOP))
    verdict = must(judge([view(0, again, phase="idle", age=4.0, limit=300.0), view(1, step, phase="forward", age=4.0)]))
    assert verdict.kind == "mismatch"
    assert of_verdict(verdict).title.startswith(
        "GatheredParameters entered 2 times on rank 0, once on rank 1: rank 0 waits after step 11, "
        "in GatheredParameters, train.py:41; rank 1 waits in step 12, in step(), train.py:38"
    )
    # A loop around the gather itself is not the training's.
    looped = [view(rank, one, phase="forward", age=4.0, limit=300.0) for rank, one in ((0, behind), (1, again))]
    title = of_verdict(must(judge(looped))).title
    assert title.startswith("GatheredParameters entered 2 times on rank 1, once on rank 0")


def test_sizes_that_differ_are_named_with_their_lines():
    sizes = [spins(("0", 1, "all_reduce", size), frames=SLEEPS) for size in (4096, 16)]
    verdict = must(judge([view(rank, one, phase="idle", age=4.0, limit=300.0) for rank, one in enumerate(sizes)]))
    title = "all_reduce of different sizes: rank 0: 4,096 elements, train.py:52; rank 1: 16 elements, train.py:52"
    assert of_verdict(verdict).title == title


def test_ranks_that_still_work_or_have_just_moved_are_not_in_a_deadlock():
    saving = spins(("0", 1, "barrier"), frames=SAVES)
    assert crossed(replace(saving, stands=1.0)) is None
    assert crossed(saving, age=2.0) is None
    assert crossed(replace(saving, wakes=20.0)) is None, "asleep until a set time"


def test_ranks_wait_for_one_whose_script_has_ended_in_an_earlier_step():
    def ends(ended_age: float = 5.0, age: float = 5.0, **more: Any) -> Verdict | None:
        ended = view(0, finished=True, step=61, phase="idle", age=ended_age)
        waits_for = spins(("1", 7, "all_reduce"), frames=STEPS, **more)
        return judge([ended, view(1, waits_for, step=61, phase="optimizer", age=age)])

    verdict = must(ends())
    assert (verdict.kind, verdict.waiting, verdict.sure) == ("left", (1,), True)
    assert of_verdict(verdict).title == (
        f"rank 0 left the loop after step 60: its script has ended; {AT_STEP}: unequal data, or an early stop"
    )
    assert ends(age=3.0) is None
    assert ends(ended_age=2.0) is None, "others may follow"
    assert ends(stands=0.0) is None, "it computes"


def test_while_every_rank_has_entered_the_same_collectives_the_devices_may_compute_for_a_minute():
    def same(age: float) -> Verdict | None:
        return judge(
            [view(rank, spins(("1", 7, "all_reduce"), frames=STEPS), phase="optimizer", age=age) for rank in (0, 1)]
        )

    assert same(20.0) is None
    assert must(same(ENTERED_S + 1)).kind == "unclear"


def test_a_rank_whose_device_computes_for_no_collective_has_the_patience_of_one_that_works():
    waits = view(0, spins(("1", 7, "all_reduce"), frames=STEPS), phase="optimizer", age=20.0)
    busy = spins(("1", 6, "all_reduce", 0, True), frames=STEPS, work="device")
    assert judge([waits, view(1, busy, phase="forward", age=20.0, working_limit=60.0)]) is None
    assert must(judge([waits, view(1, replace(busy, work=""), phase="forward", age=20.0)])).hung == (1,)


def test_a_sleep_that_ends_soon_is_work_and_one_of_a_day_is_a_hang():
    def asleep(wakes: float | None) -> Verdict | None:
        waits = view(0, spins(("1", 7, "all_reduce"), frames=STEPS), phase="optimizer", age=12.0)
        sleeper = found(("1", 6, "all_reduce", 0, True), members=PAIR, frames=SLEEPS, wakes=wakes)
        return judge([waits, view(1, sleeper, phase="data", age=12.0, working_limit=60.0)])

    assert asleep(24.0) is None
    assert must(asleep(90_000.0)).hung == (1,)
    assert must(asleep(None)).hung == (1,)


def by_nccl(count: int) -> Calls:
    """Make NCCL's own count of a communicator in which another rank has launched 9, or 8, collectives."""
    return Calls("nccl", (Call("0xab", count, "collective", 0, False if count == 9 else None),), {}, {"0xab": (0, 1)})


def test_nccls_own_counts_name_the_rank_behind_where_nothing_was_recorded():
    counted = [
        Evidence(1.0, by="probe", frames=SLEEPS, place=where(SLEEPS), nccl=by_nccl(9 - rank), asleep=6.0 * rank)
        for rank in (0, 1)
    ]
    verdict = must(judge([view(rank, evidence, age=20.0) for rank, evidence in enumerate(counted)]))
    assert (verdict.kind, verdict.hung, verdict.sure) == ("missing", (1,), True)


def test_a_verdict_that_nccls_counts_contradict_is_not_sure_and_says_so():
    def judged(first: int, second: int) -> Verdict:
        waits = replace(spins(("1", 7, "all_reduce"), frames=STEPS), nccl=by_nccl(first))
        late = found(("1", 6, "all_reduce", 0, True), members=PAIR, frames=SLEEPS, nccl=by_nccl(second))
        return must(judge([view(0, waits), view(1, late, age=9.0)]))

    agree, differ = judged(9, 8), judged(8, 9)
    assert (agree.hung, agree.sure, agree.contradicted) == ((1,), True, False)
    assert (differ.hung, differ.sure, differ.contradicted) == ((1,), False, True)
    assert "NCCL's own counters" in of_verdict(differ).text
