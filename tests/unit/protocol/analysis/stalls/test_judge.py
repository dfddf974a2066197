"""Verdicts on stalls, the proof that ends a run, and when the finding of a stall is renewed."""

from typing import Any

import pytest
from ftmon.protocol.analysis.stalls.collectives import RankView
from ftmon.protocol.analysis.stalls.evidence import Collective, Evidence, Frame
from ftmon.protocol.analysis.stalls.hang_detector import HangDetector
from ftmon.protocol.analysis.stalls.judge import EXIT_LIMIT_S, OtherRanks, RankFacts, Unclear, Verdict, judge, unproven
from ftmon.protocol.analysis.stalls.progress import ROWS, action_patience, row_of
from ftmon.protocol.analysis.stalls.words import of_verdict
from ftmon.protocol.text import ranks_in_words
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT


def view(rank: int, **fields: Any) -> RankView:
    return RankView(**{"rank": rank, "step": 12, "phase": "backward", "age": 10.0, "limit": 8.0, **fields})


def inside(rank: int, name: str = "all_reduce", count: int = 100, **fields: Any) -> RankView:
    return view(rank, **{"inside": name, "last_collective": name, "collectives": count, **fields})


def must(verdict: Verdict | None) -> Verdict:
    assert verdict is not None
    return verdict


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
    verdict = must(judge(views))
    assert (verdict.kind, verdict.hung, verdict.sure, verdict.collective) == ("missing", hung, True, collective)
    assert set(verdict.waiting) == {view.rank for view in views} - set(hung)
    assert verdict.views[hung[0]].phase == views[hung[0]].phase


@pytest.mark.parametrize(("absent", "sure"), [("stopped", True), ("gone", True), ("silent", False)])
def test_a_rank_that_cannot_come_is_named_with_what_became_of_it(absent: Any, sure: bool):
    verdict = must(judge([inside(0), inside(1), view(2, age=3.5, collectives=99, absent=absent)]))
    assert (verdict.hung, verdict.waiting, verdict.sure) == ((2,), (0, 1), sure)
    assert verdict.views[2].absent == absent


def test_a_rank_that_died_ahead_of_the_others_is_what_they_wait_for():
    verdict = must(judge([view(0, collectives=100), view(1, collectives=100), view(2, collectives=101, absent="gone")]))
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
    verdict = must(judge(UNCLEAR[case]))
    assert (verdict.kind, verdict.hung, verdict.sure) == ("unclear", (), False)
    assert verdict.waiting == tuple(view.rank for view in UNCLEAR[case] if view.inside)
    if case.startswith("all"):
        assert verdict.facts == Unclear("same_collective", Collective("all_reduce", 100))


def test_different_collectives_at_the_same_count_are_a_mismatch_and_nobody_is_named():
    verdict = must(judge([inside(0), inside(1), inside(2, "all_gather")]))
    assert (verdict.kind, verdict.hung, verdict.collective) == ("mismatch", (), Collective("", 100))
    assert [verdict.views[rank].inside for rank in range(3)] == ["all_reduce", "all_reduce", "all_gather"]


def test_a_run_of_one_rank_names_that_rank():
    verdict = must(judge([view(0, phase="forward", age=11.0)]))
    assert (verdict.kind, verdict.hung, verdict.age) == ("alone", (0,), 11.0)
    assert must(judge([view(0, phase="data", age=31.0)])).hung == (0,)


def test_ranks_that_outlive_finished_ones_without_progress_are_a_hang_at_exit():
    done = view(0, finished=True)
    verdict = must(judge([done, inside(1, "barrier", age=EXIT_LIMIT_S + 1), view(2, age=EXIT_LIMIT_S + 1)]))
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


def test_where_no_collective_is_counted_the_rank_that_is_behind_in_the_step_is_likely():
    # DDP's reducer works in C++: the probe sees no collectives at all.
    verdict = must(judge([view(0), view(1), view(2, phase="data")]))
    assert (verdict.kind, verdict.hung, verdict.sure) == ("missing", (2,), False)


# What is proof enough to end a run, and the one table of patience.


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


def test_the_documented_patience_is_the_table_s():
    lines: list[str] = []
    for row in ROWS:
        ending = [action_patience(row.computing_s, awaited=True, may_resume=resumes) for resumes in (False, True)]
        limits = (row.computing_s, row.working_s, row.asleep_s, *ending)
        lines.append(" | ".join([f"| {row.title}", *(f"{seconds:g} s" for seconds in limits)]) + " |")
    assert "\n".join(lines) in (ROOT / "docs" / "detectors.md").read_text()


def test_the_limits_of_early_steps_are_lower_bounds_of_every_phase():
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
