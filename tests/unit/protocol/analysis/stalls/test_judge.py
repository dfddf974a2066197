"""Verdicts on stalls, the proof that ends a run, and when the finding of a stall is renewed."""

from dataclasses import replace
from typing import Any

import pytest
from ftmon.protocol.analysis.stalls.collectives import Difference, RankView, difference
from ftmon.protocol.analysis.stalls.collectives import where as where_of
from ftmon.protocol.analysis.stalls.evidence import Call, Calls, Collective, Evidence, Frame, LockWait, where
from ftmon.protocol.analysis.stalls.hang_detector import HangDetector, cause_of
from ftmon.protocol.analysis.stalls.judge import (
    ENTERED_S,
    EXIT_LIMIT_S,
    EXIT_SURE_S,
    EXIT_WORKING_S,
    CircularWait,
    OtherRanks,
    RanAhead,
    RankFacts,
    StaleLocks,
    Unclear,
    Verdict,
    judge,
    unproven,
)
from ftmon.protocol.analysis.stalls.progress import ROWS, action_patience, row_of
from ftmon.protocol.analysis.stalls.words import _together, of_verdict
from ftmon.protocol.text import ranks_in_words
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT


def view(rank: int, **fields: Any) -> RankView:
    return RankView(**{"rank": rank, "step": 12, "phase": "backward", "age": 10.0, "limit": 8.0, **fields})


def inside(rank: int, name: str = "all_reduce", count: int = 100, **fields: Any) -> RankView:
    return view(rank, **{"inside": name, "last_collective": name, "collectives": count, **fields})


NO_STALL = {
    "nobody is past its limit": [inside(0, age=7.9), view(1, age=7.9, collectives=99)],
    "rank 0 saves a checkpoint for a minute while the others wait in a barrier": [
        view(0, phase="checkpoint", age=60.0, limit=600.0, collectives=99),
        *(inside(rank, "barrier", age=60.0) for rank in (1, 2, 3)),
    ],
    "the rank outside still moves": [inside(0, age=30.0), view(1, age=0.1, collectives=99)],
    "the last one is within its limit, and those ahead wait": [
        view(0, collectives=100, age=90.0),
        view(1, collectives=96, phase="eval", age=90.0, limit=300.0),
    ],
    "slow data that holds up nobody else gets more time": [view(0, phase="data", age=11.0)],
    "silence alone": [view(0, age=500.0, absent="silent")],
    "silence of all": [view(rank, age=500.0, absent="silent") for rank in range(3)],
}


@pytest.mark.parametrize("case", NO_STALL)
def test_it_is_no_stall_if(case: str):
    assert judge(NO_STALL[case]) is None


MISSING: dict[str, tuple[list[RankView], tuple[int, ...], Collective]] = {
    "outside of a blocking collective": (
        [inside(0), inside(1), inside(2), view(3, phase="data", limit=9.0, collectives=99)],
        (3,),
        Collective("all_reduce", 100),
    ),
    "behind within the step, if it took part in 40 collectives more during start-up": (
        [inside(0, step_collectives=3), view(1, collectives=139, step_collectives=2, phase="data")],
        (1,),
        Collective("all_reduce", 100),
    ),
    "lowest by count under NCCL": (
        [*(view(rank, collectives=100, last_collective="x") for rank in (0, 1)), view(2, phase="data", collectives=96)],
        (2,),
        Collective("x", 100),
    ),
    "last by count under NCCL, and those between the last and the first wait too": (
        [view(rank, collectives=count) for rank, count in enumerate((100, 98, 95, 98))],
        (2,),
        Collective("collective", 100),
    ),
    "in no collective, if the others are in one within their limits": (
        [inside(0, age=3.4, last_collective="init_process_group", count=1), view(1, phase="init", age=9.7)],
        (1,),
        Collective("all_reduce", 1),
    ),
}


@pytest.mark.parametrize("case", MISSING)
def test_others_wait_for_the_rank_that_is(case: str):
    views, hung, collective = MISSING[case]
    verdict = judge(views)
    assert (verdict.kind, verdict.hung, verdict.sure, verdict.collective) == ("missing", hung, True, collective)
    assert set(verdict.waiting) == {view.rank for view in views} - set(hung)
    assert verdict.views[hung[0]].phase == views[hung[0]].phase


@pytest.mark.parametrize(("absent", "sure"), [("stopped", True), ("gone", True), ("silent", False)])
def test_a_rank_that_cannot_come_is_named_with_what_became_of_it(absent: Any, sure: bool):
    verdict = judge([inside(0), inside(1), view(2, age=3.5, collectives=99, absent=absent)])
    assert (verdict.hung, verdict.waiting, verdict.sure) == ((2,), (0, 1), sure)
    assert verdict.views[2].absent == absent


def test_a_rank_that_died_ahead_is_what_the_others_wait_for_and_a_chain_of_waits_is_named_by_its_end():
    verdict = judge([view(0, collectives=100), view(1, collectives=100), view(2, collectives=101, absent="gone")])
    assert (verdict.hung, verdict.waiting) == ((2,), (0, 1))
    members = {"a": (0, 1), "b": (1, 2)}
    views = [
        seen(0, found(("a", 2, "all_reduce"), members=members), inside="all_reduce", group="a"),
        seen(1, found(("a", 1, "x", 0, True), ("b", 2, "send"), members=members), inside="bcast", group="b"),
        seen(2, found(("b", 1, "x", 0, True), members=members, frames=SLEEPS), phase="data"),
    ]
    verdict = judge(views)
    assert (verdict.hung, verdict.waiting) == ((2,), (0, 1))


UNCLEAR = {
    "it was last heard inside the same collective": [inside(0), inside(1), inside(2, absent="silent")],
    "all are inside the same collective": [inside(rank) for rank in range(4)],
    "the collectives and the counts differ": [inside(0), inside(1, "all_gather", 98)],
    "its count says it has entered": [inside(0), view(1, collectives=100)],
    "counts are equal under NCCL": [view(rank, collectives=100) for rank in range(4)],
    "counts mean different things": [view(0, collectives=100, per_step=10), view(1, collectives=50, per_step=5)],
    "no collective is counted, and it is between two phases": [view(0), view(1), view(2, phase="idle")],
    "no collective is counted, and it is a step ahead": [view(0, step=13), view(1, phase="forward", step=14)],
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_no_rank_is_named_if(case: str):
    verdict = judge(UNCLEAR[case])
    assert (verdict.kind, verdict.hung, verdict.sure) == ("unclear", (), False)
    assert verdict.waiting == tuple(view.rank for view in UNCLEAR[case] if view.inside)
    if case.startswith("all"):
        assert verdict.facts == Unclear("same_collective", Collective("all_reduce", 100))


def test_different_collectives_at_one_count_are_a_mismatch_and_groups_that_wait_for_each_other_a_deadlock():
    verdict = judge([inside(0), inside(1), inside(2, "all_gather")])
    assert (verdict.kind, verdict.hung, verdict.collective) == ("mismatch", (), Collective("", 100))
    assert [verdict.views[rank].inside for rank in range(3)] == ["all_reduce", "all_reduce", "all_gather"]
    members = {"0": (0, 1), "1": (0, 1), "2": (0, 1)}
    first = found(("1", 4, "all_reduce"), ("2", 3, "all_gather", 0, True), members=members)
    second = found(("1", 3, "all_reduce", 0, True), ("2", 4, "all_gather"), members=members)
    views = [seen(0, first, inside="all_reduce", group="1"), seen(1, second, inside="all_gather", group="2")]
    verdict = judge(views)
    assert (verdict.kind, verdict.hung, verdict.sure) == ("deadlock", (), True)
    calls = {0: Collective("all_reduce", 4, (0, 1), "1"), 1: Collective("all_gather", 4, (0, 1), "2")}
    assert verdict.facts == CircularWait(calls)


def test_a_run_of_one_rank_names_that_rank_and_one_for_which_nobody_waits_has_its_phase_s_patience():
    verdict = judge([view(0, phase="forward", age=11.0)])
    assert (verdict.kind, verdict.hung, verdict.age) == ("alone", (0,), 11.0)
    assert judge([view(0, phase="data", age=31.0)]).hung == (0,)
    assert judge([seen(0, found(frames=SLEEPS), phase="idle", age=100.0, limit=300.0)]) is None
    assert judge([seen(0, found(frames=SLEEPS), phase="idle", age=301.0, limit=300.0)]).hung == (0,)


def test_ranks_that_outlive_finished_ones_without_progress_are_a_hang_at_exit():
    done = view(0, finished=True)
    verdict = judge([done, inside(1, "barrier", age=EXIT_LIMIT_S + 1), view(2, age=EXIT_LIMIT_S + 1)])
    assert (verdict.kind, verdict.waiting, verdict.hung) == ("exit", (1,), (2,))
    assert verdict.facts == OtherRanks((0,))
    assert judge([done, inside(1, age=EXIT_LIMIT_S - 1)]) is None
    assert judge([done, inside(1, age=90.0), view(2, age=1.0)]) is None, "one of them still moves"
    assert judge([done, view(1, phase="checkpoint", age=120.0, limit=600.0)]) is None, "it saves the result"


@given(
    st.lists(
        st.builds(
            view,
            rank=st.integers(0, 7),
            step=st.integers(1, 3),
            phase=st.sampled_from(["data", "forward", "backward", "optimizer", "eval", "idle", "exit"]),
            age=st.floats(0, 100),
            limit=st.floats(8, 60),
            inside=st.sampled_from(["", "all_reduce", "barrier"]),
            collectives=st.integers(0, 5),
            step_collectives=st.integers(0, 2),
            per_step=st.integers(-1, 2),
            absent=st.sampled_from(["", "stopped", "gone", "silent"]),
            finished=st.booleans(),
        ),
        max_size=6,
        unique_by=lambda view: view.rank,
    )
)
def test_no_rank_is_ever_named_that_moves_is_within_its_limit_or_finished(views: list[RankView]):
    verdict = judge(views)
    if verdict is None:
        return
    for blamed in [view for view in views if view.rank in verdict.hung]:
        assert not blamed.finished
        assert blamed.absent or blamed.stuck or verdict.kind == "exit"
    assert not set(verdict.hung) & set(verdict.waiting)
    words = of_verdict(verdict)
    assert words.title
    assert "None" not in f"{words.title} {words.text}"


@given(st.lists(st.integers(0, 600), min_size=1, max_size=600))
def test_ranks_are_named_in_a_few_words(ranks: list[int]):
    assert len(ranks_in_words(ranks)) < 40


def test_where_no_collective_is_counted_a_rank_behind_or_asleep_in_its_own_code_is_likely():
    # DDP's reducer works in C++: the probe sees no collectives at all.
    verdict = judge([view(0), view(1), view(2, phase="data")])
    assert (verdict.kind, verdict.hung, verdict.sure) == ("missing", (2,), False)
    # DDP without a recorder: no collective is counted, and all others sit in their backward.
    waits = [seen(rank, found(members={}, frames=BACKWARD, asleep=0.0), age=9.0) for rank in (0, 1)]
    verdict = judge([*waits, seen(2, found(members={}, frames=SLEEPS), phase="idle")])
    assert (verdict.kind, verdict.hung, verdict.sure) == ("missing", (2,), False)
    assert judge([*waits, seen(2, found(members={}, frames=BACKWARD), age=9.0)]).kind == "unclear"


TRAIN = "/home/me/train.py"
SITE = "/env/lib/python3.11/site-packages"
SHUTDOWN = Frame("/usr/lib/python3.11/threading.py", 1583, "_shutdown")
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


def seen(rank: int, evidence: Evidence | None = None, **fields: Any) -> RankView:
    given = {"step": 12, "phase": "backward", "age": 7.5, "limit": 8.0, "asleep_limit": 7.0, **fields}
    return RankView(rank, evidence=evidence, **given)


EIGHT = ("0", 8, "all_reduce", 0, True)
"""The collective before the one that the others wait in."""


def waiting(*ranks: int, **fields: Any) -> list[RankView]:
    return [seen(rank, found(("0", 9, "all_reduce")), inside="all_reduce", group="0", **fields) for rank in ranks]


def test_a_rank_asleep_is_named_before_its_phase_s_patience_which_work_has_whole():
    verdict = judge([*waiting(0, 1, 3), seen(2, found(EIGHT, frames=SLEEPS), phase="forward")])
    assert (verdict.kind, verdict.hung, verdict.waiting, verdict.sure) == ("missing", (2,), (0, 1, 3), True)
    assert where_of(verdict.views[2]) == "in forward: train.py:52 in main"
    works = found(EIGHT, frames=SLEEPS, asleep=0.0)
    assert judge([*waiting(0, 1, 3), seen(2, works, phase="forward")]) is None
    evaluates = seen(
        2, found(EIGHT, frames=SLEEPS, asleep=50.0), phase="eval", age=52.0, limit=300.0, asleep_limit=60.0
    )
    assert judge([*waiting(0, 1, 3), evaluates]) is None


def test_a_receive_that_nobody_sends_to_is_a_mismatch_and_one_from_a_rank_asleep_names_that_one():
    verdict = judge([seen(0, found(EIGHT), inside="recv"), *waiting(1)])
    assert (verdict.kind, verdict.hung, verdict.differs) == ("mismatch", (), (0,))
    assert (verdict.facts, verdict.collective) == (OtherRanks((0,)), Collective("all_reduce", 9))
    asleep = seen(1, found(EIGHT, frames=SLEEPS), phase="forward")
    assert judge([seen(0, found(EIGHT), inside="recv"), asleep, *waiting(2)]).hung == (1,)


@pytest.mark.parametrize("odd", [("0", 9, "all_gather", 64), ("0", 9, "all_reduce", 32)])
def test_a_collective_that_one_rank_entered_differently_is_a_mismatch_with_the_odd_one_told(odd: Any):
    views = [seen(rank, found(("0", 9, "all_reduce", 64)), inside="all_reduce", group="0") for rank in (0, 1, 3)]
    verdict = judge([*views, seen(2, found(odd), inside=odd[2], group="0")])
    assert (verdict.kind, verdict.hung, verdict.differs) == ("mismatch", (), (2,))
    assert isinstance(verdict.facts, Difference)
    assert [call[:4] for call in verdict.facts.calls.values()] == [*(("0", 9, "all_reduce", 64),) * 3, odd]


def test_under_nccl_the_recorder_shows_ddps_collectives_and_no_outsider_of_a_group_is_blamed():
    ahead = [seen(rank, found(("0", 30, "all_reduce", 5)), age=9.0) for rank in (0, 1, 3)]
    verdict = judge([*ahead, seen(2, found(("0", 28, "all_reduce", 5, True), frames=SLEEPS), phase="data")])
    assert (verdict.kind, verdict.hung, verdict.collective) == ("missing", (2,), Collective("all_reduce", 30))
    members = {"0": (0, 1, 2, 3), "5": (0, 1)}
    stuck = found(("0", 7, "barrier", 0, True), ("5", 3, "all_reduce"), members=members)
    late = found(("0", 7, "barrier", 0, True), ("5", 2, "all_reduce", 0, True), members=members, frames=SLEEPS)
    outside = [seen(rank, found(("0", 8, "barrier"), members=members), inside="barrier", group="0") for rank in (2, 3)]
    verdict = judge([seen(0, stuck, inside="all_reduce", group="5"), seen(1, late, phase="forward"), *outside])
    assert (verdict.kind, verdict.hung, verdict.waiting) == ("missing", (1,), (0, 2, 3))


def test_a_rank_that_holds_pythons_lock_in_native_code_is_told_with_its_line():
    late = seen(2, found(frames=SLEEPS, by="signal"), absent="silent", phase="forward", group="0", group_sequence=8)
    verdict = judge([*waiting(0, 1, 3, group_sequence=9), late])
    assert (verdict.hung, verdict.sure) == ((2,), True)
    assert where_of(verdict.views[2]) == "in forward, in native code that holds the GIL: train.py:52 in main"


def held_up_between_steps(age: float = 11.0, **of_the_silent_one: Any) -> Verdict | None:
    """Judge ranks that wait for their devices outside every phase, where patience is long, beside a silent one."""
    patient: dict[str, Any] = {"phase": "idle", "limit": 60.0, "asleep_limit": 15.0, "group_sequence": 9}
    calls = Calls("recorder", (Call("0", 9, "all_reduce", 5, False),), {"0": 9}, WORLD)
    waits = [seen(rank, Evidence(1.0, by="probe", calls=calls), age=age, group="0", **patient) for rank in (0, 1, 3)]
    given = {"absent": "silent", "phase": "forward", "age": age, "group": "0", "group_sequence": 8, **of_the_silent_one}
    return judge([*waits, seen(2, **given)])


def fallen_silent(**of_the_one_behind: Any) -> Verdict | None:
    """Judge ranks that all fell silent once they stood still; their last words put one of them behind."""
    words: dict[str, Any] = {"absent": "silent", "age": 11.0, "stood_s": 3.0, "group": "0", "group_sequence": 9}
    patient: dict[str, Any] = {"phase": "idle", "limit": 60.0, "last_collective": "all_reduce"}
    ahead = [seen(rank, **words, **patient) for rank in (0, 1, 3)]
    return judge([*ahead, seen(2, **{**words, "phase": "forward", "group_sequence": 8, **of_the_one_behind})])


@pytest.mark.parametrize("judged", [held_up_between_steps, fallen_silent])
def test_a_silent_rank_is_likely_at_fault_where_it_has_not_entered_what_the_others_wait_in(judged: Any):
    verdict = judged()
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


def test_all_in_the_same_collective_cannot_be_told_and_their_devices_may_compute_for_a_minute():
    assert judge(waiting(*range(4), age=7.5)) is None, "nobody would be named: the ordinary patience holds"
    assert judge(waiting(*range(4), age=9.0)).kind == "unclear"

    def same(age: float) -> Verdict | None:
        return judge(
            [seen(rank, spins(("1", 7, "all_reduce"), frames=STEPS), phase="optimizer", age=age) for rank in (0, 1)]
        )

    assert same(20.0) is None
    assert same(ENTERED_S + 1).kind == "unclear"


def test_a_rank_asleep_after_the_end_of_its_script_hangs_at_exit_sooner_and_one_that_uploads_does_not():
    done = seen(0, finished=True)
    over = found(members={}, frames=[SHUTDOWN])
    assert judge([done, seen(1, over, phase="idle", age=EXIT_SURE_S + 1)]).hung == (1,)
    lingers = seen(1, found(), phase="exit", age=EXIT_SURE_S + 1, limit=EXIT_LIMIT_S)
    assert judge([done, lingers]).kind == "exit"

    def left(age: float, **more: Any) -> RankView:
        return seen(1, found(asleep=age, **more), phase="exit", age=age, limit=EXIT_LIMIT_S)

    assert judge([done, left(200.0, work="works")]) is None
    assert judge([done, left(EXIT_WORKING_S + 1, work="works")]).kind == "exit"
    assert judge([done, left(EXIT_SURE_S + 1)]).kind == "exit"


def test_a_rank_in_a_collective_with_a_finished_one_waits_in_vain_and_in_another_group_may_not():
    done = seen(0, finished=True, step=11)
    inside = seen(1, found(("0", 9, "barrier")), inside="barrier", group="0", group_sequence=9, age=5.0)
    assert judge([done, inside]).kind == "left"
    other = found(("5", 9, "barrier"), members={"0": (0, 1, 2), "5": (1, 2)})
    assert judge([done, seen(1, other, inside="barrier", group="5", age=EXIT_SURE_S + 1)]) is None


def test_work_in_the_process_tree_has_its_own_patience_and_retries_are_no_sleep():
    def late(age: float, **more: Any) -> Verdict | None:
        works = seen(2, found(EIGHT, frames=SLEEPS, **more), phase="data", age=age, working_limit=60.0)
        return judge([*waiting(0, 1, age=30.0), works])

    assert late(30.0, asleep=0.0, work="works") is None
    assert late(61.0, asleep=0.0, work="works").hung == (2,)
    assert late(7.5, restless=True) is None, "it woke up in between"
    assert late(7.5).hung == (2,)
    assert late(8.5, asleep=0.0, work="computes").hung == (2,)


def test_a_rank_that_steps_on_without_the_collective_the_others_wait_in_ran_ahead():
    calls = found(("0", 45, "all_reduce", 0, True), ("0", 46, "all_reduce"))
    waiter = seen(0, calls, age=5.0, step=42, steps_then={1: 45})

    def goes_on(steps: int, number: int, step: int) -> Verdict | None:
        latest = found(("0", number, "all_reduce", 0, True), steps=steps)
        return judge([waiter, seen(1, None, age=0.1, step=step, latest=latest)])

    verdict = goes_on(60, 45, 61)
    assert (verdict.kind, verdict.hung, verdict.waiting, verdict.sure) == ("ahead", (1,), (0,), True)
    assert (verdict.facts, verdict.collective) == (RanAhead(61, 42), Collective("all_reduce", 46))
    assert goes_on(60, 46, 61) is None, "it has entered it"
    assert goes_on(47, 45, 48) is None, "two steps may be in flight"
    assert goes_on(60, 45, 30) is None, "it is behind, and still comes"


def test_a_build_lock_that_every_rank_waits_for_without_a_compiler_is_named_at_once():
    def at_start(rank: int, evidence: Evidence, **fields: Any) -> RankView:
        return seen(rank, evidence, phase="init", age=4.0, limit=300.0, **fields)

    lock = LockWait("/home/me/.cache/torch_extensions/x y/lock", build=True, idle_s=60.0)
    at_lock = [at_start(rank, found(lock=lock)) for rank in (0, 1)]
    verdict = judge(at_lock)
    assert (verdict.kind, verdict.hung, verdict.waiting) == ("lock", (), (0, 1))
    assert verdict.facts == StaleLocks((lock.path,))
    assert judge([*at_lock, at_start(2, found(), inside="barrier", group="0")]).kind == "lock"
    for builds in (replace(lock, compiler=True), replace(lock, idle_s=1.0)):
        assert judge([at_lock[0], at_start(1, found(lock=builds))]) is None
    assert judge([at_lock[0], at_start(1, found(frames=SLEEPS))]) is None, "it may be the one that builds"


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
AFTER_LOOP = (Frame(f"{SITE}/torch/distributed/distributed_c10d.py", 5030, "barrier"), Frame(TRAIN, 60, "main"))
LOOP = {"/home/me/train.py:38": ((30, 45),), "/home/me/train.py:41": ((30, 45),), "/home/me/train.py:60": ()}
PAIR = {"0": (0, 1), "1": (0, 1)}


def spins(*recent: tuple[Any, ...], frames: Any, **more: Any) -> Evidence:
    """Make evidence of a rank that spins at one line, as under NCCL."""
    return found(*recent, members=PAIR, frames=frames, **{"asleep": 0.0, "stands": 2.0, "loops": LOOP, **more})


def crossed(saving: Evidence, **fields: Any) -> Verdict | None:
    """Judge rank 0 outside of a step, rank 1 in the optimizer's, each in a collective that the other is not in."""
    given = {"age": 4.0, "limit": 600.0, "asleep_limit": 600.0}
    out = seen(0, saving, **{"step": 61, "phase": "checkpoint", **given, **fields})
    return judge([out, seen(1, spins(("1", 7, "all_reduce"), frames=STEPS), step=61, phase="optimizer", **given)])


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
    verdict = crossed(spins(("0", 1, "barrier"), ("1", 6, "all_reduce", 0, True), frames=frames), phase=phase)
    assert (verdict.kind, verdict.waiting, verdict.sure) == ("deadlock", (0, 1), True)
    assert of_verdict(verdict).title == title
    threads = crossed(spins(("0", 1, "barrier"), frames=frames, threads=True), phase=phase)
    assert not threads.sure, "other threads of the script may enter the collective"


def test_ranks_at_one_place_are_named_together_and_those_that_just_moved_are_in_no_deadlock():
    spot = cause_of(crossed(spins(("0", 1, "barrier"), frames=AFTER_LOOP), phase="idle")).others[0]
    assert _together([spot, replace(spot, rank=3)]).startswith("ranks 1 and 3 wait in step 61, in ")
    ended = replace(spot, ended=True)
    assert _together([ended, replace(ended, rank=3)]) == "ranks 1 and 3 have ended in step 61"
    saving = spins(("0", 1, "barrier"), frames=SAVES)
    assert crossed(replace(saving, stands=1.0)) is None
    assert crossed(saving, age=2.0) is None
    assert crossed(replace(saving, wakes=20.0)) is None, "asleep until a set time"


def branch(mine: str, theirs: str, loops: dict[str, Any]) -> str:
    """Return the cause of rank 0 at ``mine`` and rank 1 in a step at ``theirs``: function:line, innermost first."""

    def stack(spec: str) -> tuple[Frame, ...]:
        lines = [part.split(":") for part in spec.split()]
        return tuple(Frame(TRAIN, int(line), name) for name, line in lines)

    known = {f"/home/me/train.py:{line}": found for line, found in loops.items()}
    out = spins(("0", 1, "barrier"), frames=(AFTER_LOOP[0], *stack(mine)), loops=known)
    step = spins(("1", 7, "all_reduce"), frames=(STEPS[1], *stack(theirs)), loops=known)
    given = {"step": 31, "age": 4.0, "limit": 600.0, "asleep_limit": 600.0}
    verdict = judge([seen(0, out, phase="idle", **given), seen(1, step, phase="backward", **given)])
    return cause_of(verdict).kind


def test_a_later_line_is_behind_the_loop_only_if_the_loop_is_between_them():
    epochs, batches = (10, 14), (6, 8)
    assert branch("main:13", "train_epoch:7 main:11", {"7": [batches], "11": [epochs], "13": [epochs]}) == "left_loop"
    assert branch("log:9 main:16", "log:11 main:16", {"9": [], "11": [], "16": [(15, 16)]}) == "branch"
    assert branch("step:16 fit:22", "step:10 fit:22", {"16": [], "10": [], "22": [(20, 22)]}) == "branch"
    assert branch("main:19", "export:12 main:18", {"19": [], "12": [], "18": []}) == "branch"


def test_a_rank_that_still_trains_or_steps_without_the_group_s_collective_is_neither_hung_nor_ahead():
    waits = seen(1, spins(("1", 7, "all_reduce"), frames=STEPS), phase="backward", age=20.0)
    counted = found(("1", 6, "all_reduce", 0, True), members=PAIR, frames=SLEEPS)
    assert judge([seen(0, None, phase="forward", age=0.1, latest=counted), waits]) is None

    def ahead(number: int) -> Verdict | None:
        late = found(("0", number - 1, "all_reduce", 0, True), steps=34)
        (waits,) = waiting(0, step=30, steps_then={1: 29}, age=5.0)
        waits = replace(waits, evidence=found(("0", number, "all_reduce")))
        return judge([waits, seen(1, late, latest=late, step=34, age=0.2)])

    assert ahead(30).kind == "ahead"
    assert ahead(3) is None


def test_gathered_parameters_entered_unequally_are_counted():
    gather = (Frame(f"{SITE}/deepspeed/runtime/zero/partition_parameters.py", 2128, "__enter__"), SAVES[-1])
    again = spins(("0", 9, "all_gather_base", 4096), frames=gather, gathers=2)
    step, behind = (spins(("0", 9, "all_gather_base", 64), frames=at, gathers=1) for at in (STEPS, AFTER_LOOP))
    verdict = judge([seen(0, again, phase="idle", age=4.0, limit=300.0), seen(1, step, phase="forward", age=4.0)])
    assert verdict.kind == "mismatch"
    assert of_verdict(verdict).title.startswith(
        "GatheredParameters entered 2 times on rank 0, once on rank 1: rank 0 waits after step 11, "
        "in GatheredParameters, train.py:41; rank 1 waits in step 12, in step(), train.py:38"
    )
    # A loop around the gather itself is not the training's.
    looped = [seen(rank, one, phase="forward", age=4.0, limit=300.0) for rank, one in ((0, behind), (1, again))]
    title = of_verdict(judge(looped)).title
    assert title.startswith("GatheredParameters entered 2 times on rank 1, once on rank 0")


def test_sizes_that_differ_are_named_with_their_lines_but_where_every_rank_may_give_another_one():
    sizes = [spins(("0", 1, "all_reduce", size), frames=SLEEPS) for size in (4096, 16)]
    verdict = judge([seen(rank, one, phase="idle", age=4.0, limit=300.0) for rank, one in enumerate(sizes)])
    title = "all_reduce of different sizes: rank 0: 4,096 elements, train.py:52; rank 1: 16 elements, train.py:52"
    assert of_verdict(verdict).title == title
    assert difference([seen(rank, found(("0", 9, "all_to_all_single", 10 + rank))) for rank in (0, 1)]) is None
    done = [seen(rank, found(("0", 9, "all_reduce", 10 + rank, True))) for rank in (0, 1)]
    assert difference(done) is None, "it is behind all of them"


def test_ranks_wait_for_one_whose_script_has_ended_in_an_earlier_step():
    def ends(ended_age: float = 5.0, age: float = 5.0, **more: Any) -> Verdict | None:
        ended = seen(0, finished=True, step=61, phase="idle", age=ended_age)
        waits_for = spins(("1", 7, "all_reduce"), frames=STEPS, **more)
        return judge([ended, seen(1, waits_for, step=61, phase="optimizer", age=age)])

    verdict = ends()
    assert (verdict.kind, verdict.waiting, verdict.sure) == ("left", (1,), True)
    expected = f"rank 0 left the loop after step 60: its script has ended; {AT_STEP}: unequal data, or an early stop"
    assert of_verdict(verdict).title == expected
    assert ends(age=3.0) is None
    assert ends(ended_age=2.0) is None, "others may follow"
    assert ends(stands=0.0) is None, "it computes"


def test_a_device_that_computes_for_no_collective_or_a_sleep_that_ends_soon_is_work_and_a_day_s_a_hang():
    waits = seen(0, spins(("1", 7, "all_reduce"), frames=STEPS), phase="optimizer", age=20.0)
    busy = spins(("1", 6, "all_reduce", 0, True), frames=STEPS, work="device")
    assert judge([waits, seen(1, busy, phase="forward", age=20.0, working_limit=60.0)]) is None
    assert judge([waits, seen(1, replace(busy, work=""), phase="forward", age=20.0)]).hung == (1,)

    def asleep(wakes: float | None) -> Verdict | None:
        waits = seen(0, spins(("1", 7, "all_reduce"), frames=STEPS), phase="optimizer", age=12.0)
        sleeper = found(("1", 6, "all_reduce", 0, True), members=PAIR, frames=SLEEPS, wakes=wakes)
        return judge([waits, seen(1, sleeper, phase="data", age=12.0, working_limit=60.0)])

    assert asleep(24.0) is None
    assert asleep(90_000.0).hung == (1,)
    assert asleep(None).hung == (1,)


def by_nccl(count: int) -> Calls:
    """Make NCCL's own count of a communicator in which another rank has launched 9, or 8, collectives."""
    return Calls("nccl", (Call("0xab", count, "collective", 0, False if count == 9 else None),), {}, {"0xab": (0, 1)})


def test_nccls_own_counts_name_the_rank_behind_and_a_verdict_they_contradict_is_not_sure_and_says_so():
    counted = [
        Evidence(1.0, by="probe", frames=SLEEPS, place=where(SLEEPS), nccl=by_nccl(9 - rank), asleep=6.0 * rank)
        for rank in (0, 1)
    ]
    verdict = judge([seen(rank, evidence, age=20.0) for rank, evidence in enumerate(counted)])
    assert (verdict.kind, verdict.hung, verdict.sure) == ("missing", (1,), True)

    def judged(first: int, second: int) -> Verdict:
        waits = replace(spins(("1", 7, "all_reduce"), frames=STEPS), nccl=by_nccl(first))
        late = found(("1", 6, "all_reduce", 0, True), members=PAIR, frames=SLEEPS, nccl=by_nccl(second))
        return judge([seen(0, waits), seen(1, late, age=9.0)])

    agree, differ = judged(9, 8), judged(8, 9)
    assert (agree.hung, agree.sure, agree.contradicted) == ((1,), True, False)
    assert (differ.hung, differ.sure, differ.contradicted) == ((1,), False, True)
    assert "NCCL's own counters" in of_verdict(differ).text


RESTED = RankFacts(8.0, quiet=1000.0)
WORKED = RankFacts(8.0, quiet=3.0)


@pytest.mark.parametrize(
    ("kind", "facts", "ends"),
    [
        ("missing", RESTED, True),
        ("missing", WORKED, False),
        ("missing", RankFacts(8.0, quiet=None), False),
        ("missing", RankFacts(8.0, gone=True), True),
        ("missing", RankFacts(8.0, quiet=60.0, may_resume=True), False),
        ("missing", RankFacts(300.0, quiet=60.0), False),
        ("alone", RankFacts(8.0, quiet=60.0), False),
        ("alone", RESTED, True),
        ("exit", WORKED, False),
        ("exit", RESTED, True),
        ("unclear", RESTED, False),
        ("unclear", RankFacts(8.0, quiet=1000.0, blocked=True), True),
        ("unreachable", RESTED, False),
        ("mismatch", WORKED, True),
        ("deadlock", WORKED, True),
        ("left", WORKED, True),
    ],
)
def test_a_run_is_ended_only_when_nothing_can_come(kind: str, facts: RankFacts, ends: bool):
    waiting = () if kind in ("alone", "unclear") else (0,)
    hung = () if kind in ("unclear", "mismatch", "deadlock", "left") else (1,)
    ranks = {0: RankFacts(8.0, quiet=1000.0, blocked=True), 1: facts}
    assert (unproven(kind, True, waiting, hung, ranks) == "") is ends


@pytest.mark.parametrize(("kind", "waiting", "hung"), [("missing", (0,), (1,)), ("deadlock", (0, 1), ())])
def test_a_verdict_that_is_not_sure_ends_no_run(kind: str, waiting: tuple[int, ...], hung: tuple[int, ...]):
    assert unproven(kind, False, waiting, hung, {0: RESTED, 1: RESTED})


def test_the_documented_patience_is_the_table_s_and_limits_of_early_steps_are_lower_bounds():
    lines: list[str] = []
    for row in ROWS:
        ending = [action_patience(row.computing_s, awaited=True, may_resume=resumes) for resumes in (False, True)]
        limits = (row.computing_s, row.working_s, row.asleep_s, *ending)
        lines.append(" | ".join([f"| {row.title}", *(f"{seconds:g} s" for seconds in limits)]) + " |")
    assert "\n".join(lines) in (ROOT / "docs" / "detectors.md").read_text()
    for row in ROWS:
        early = row_of(row.phase, within_step=False, steps_seen=1, has_stepped=True)
        first = row_of(row.phase, within_step=False, steps_seen=0, has_stepped=False)
        assert early.computing_s >= 60.0
        assert first.computing_s >= 300.0
        assert row.asleep_s < row.computing_s <= row.working_s
        assert first.asleep_s == (20.0 if row.phase in ("init", "idle") else 8.0)
    within = row_of("idle", within_step=True, steps_seen=0, has_stepped=False)
    assert (within.computing_s, within.asleep_s) == (300.0, 8.0)


HUNG = Verdict(kind="missing", waiting=(0,), hung=(1,), sure=True, age=8.0)


def test_a_finding_is_renewed_once_the_stacks_of_its_rank_are_known_and_not_again_for_each_inspection() -> None:
    detector = HangDetector()
    silent = Evidence(1.0)
    located = Evidence(2.0, by="signal", frames=(Frame("train.py", 7, "main"),))
    given = [{}, {}, {0: located}, {0: located, 1: silent}, {0: located, 1: located}, {0: located, 1: located}]
    states = [[one.state for one in detector.tick(float(at), HUNG, found=found)] for at, found in enumerate(given)]
    assert states == [[], ["raised"], ["updated"], [], ["updated"], []]
