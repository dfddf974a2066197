from typing import Any

import pytest
from ftmon.protocol.analysis.stalls.collectives import RankView
from ftmon.protocol.analysis.stalls.evidence import Collective
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


def test_nobody_past_its_limit_is_no_stall():
    assert judge([inside(0, age=7.9), view(1, age=7.9, collectives=99)]) is None


def test_with_a_blocking_backend_the_rank_outside_of_the_collective_is_named():
    verdict = must(
        judge([inside(0), inside(1), inside(2), view(3, phase="data", limit=9.0, collectives=99)]),
    )
    assert (verdict.kind, verdict.hung, verdict.waiting, verdict.sure) == ("missing", (3,), (0, 1, 2), True)
    assert verdict.collective == Collective("all_reduce", 100)
    assert verdict.views[3].phase == "data"


def test_a_rank_that_is_within_its_own_limit_is_not_called_hung():
    # Rank 0 saves a checkpoint for a minute while the others wait in a barrier: honest, and no alarm.
    others = [inside(rank, "barrier", age=60.0) for rank in (1, 2, 3)]
    assert judge([view(0, phase="checkpoint", age=60.0, limit=600.0, collectives=99), *others]) is None


def test_a_rank_that_still_moves_is_not_called_hung():
    assert judge([inside(0, age=30.0), view(1, age=0.1, collectives=99)]) is None


@pytest.mark.parametrize(
    ("absent", "sure"),
    [("stopped", True), ("gone", True), ("silent", False)],
)
def test_a_rank_that_cannot_come_is_named_with_what_became_of_it(absent: Any, sure: bool):
    verdict = must(judge([inside(0), inside(1), view(2, age=3.5, collectives=99, absent=absent)]))
    assert (verdict.hung, verdict.waiting, verdict.sure) == ((2,), (0, 1), sure)
    assert verdict.views[2].absent == absent


def test_a_silent_rank_that_was_last_heard_inside_the_same_collective_is_not_blamed():
    verdict = must(judge([inside(0), inside(1), inside(2, absent="silent")]))
    assert (verdict.kind, verdict.hung) == ("unclear", ())


def test_all_inside_the_same_collective_cannot_be_told():
    verdict = must(judge([inside(rank) for rank in range(4)]))
    assert (verdict.kind, verdict.hung, verdict.sure) == ("unclear", (), False)
    assert verdict.facts == Unclear("same_collective", Collective("all_reduce", 100))
    assert verdict.waiting == (0, 1, 2, 3)


def test_different_collectives_at_the_same_count_are_a_mismatch_and_nobody_is_named():
    verdict = must(judge([inside(0), inside(1), inside(2, "all_gather")]))
    assert (verdict.kind, verdict.hung) == ("mismatch", ())
    assert verdict.collective == Collective("", 100)
    assert {rank: view.inside for rank, view in verdict.views.items()} == {
        0: "all_reduce",
        1: "all_reduce",
        2: "all_gather",
    }


def test_different_collectives_at_different_counts_cannot_be_told():
    assert must(judge([inside(0), inside(1, "all_gather", 98)])).kind == "unclear"


def test_a_rank_whose_count_says_it_has_entered_is_not_blamed():
    verdict = must(judge([inside(0, count=100), view(1, collectives=100)]))
    assert verdict.kind == "unclear"


def test_totals_that_differ_for_good_are_compared_within_the_step():
    # Rank 1 took part in 40 collectives more during start-up; it still misses the third of this step.
    verdict = must(
        judge([inside(0, count=100, step_collectives=3), view(1, collectives=139, step_collectives=2, phase="data")])
    )
    assert (verdict.hung, verdict.waiting) == ((1,), (0,))


def test_under_nccl_the_rank_with_the_lowest_count_is_named():
    ahead = [view(rank, collectives=100, last_collective="all_gather_into_tensor") for rank in (0, 1)]
    verdict = must(judge([*ahead, view(2, phase="data", limit=9.0, collectives=96)]))
    assert (verdict.kind, verdict.hung, verdict.waiting) == ("missing", (2,), (0, 1))
    assert verdict.collective == Collective("all_gather_into_tensor", 100)


def test_a_collective_that_the_others_are_in_is_named_though_they_are_within_their_limits():
    waiting = inside(0, age=3.4, last_collective="init_process_group", count=1)
    verdict = must(judge([waiting, view(1, phase="init", age=9.7)]))
    assert (verdict.hung, verdict.collective) == ((1,), Collective("all_reduce", 1))


def test_under_nccl_ranks_between_the_last_and_the_first_wait_too():
    counts = {0: 100, 1: 98, 2: 95, 3: 98}
    verdict = must(judge([view(rank, collectives=count) for rank, count in counts.items()]))
    assert (verdict.hung, verdict.waiting) == ((2,), (0, 1, 3))


def test_under_nccl_equal_counts_cannot_be_told():
    assert must(judge([view(rank, collectives=100) for rank in range(4)])).kind == "unclear"


def test_counts_that_mean_different_things_on_different_ranks_name_nobody():
    views = [view(0, collectives=100, per_step=10), view(1, collectives=50, per_step=5)]
    assert must(judge(views)).kind == "unclear"


def test_those_ahead_wait_patiently_while_the_last_one_is_within_its_limit():
    views = [view(0, collectives=100, age=90.0), view(1, collectives=96, phase="eval", age=90.0, limit=300.0)]
    assert judge(views) is None


def test_a_run_of_one_rank_names_that_rank():
    verdict = must(judge([view(0, phase="forward", age=11.0)]))
    assert (verdict.kind, verdict.hung) == ("alone", (0,))
    assert verdict.age == 11.0


def test_slow_data_that_holds_up_nobody_else_gets_more_time():
    assert judge([view(0, phase="data", age=11.0)]) is None
    assert must(judge([view(0, phase="data", age=31.0)])).hung == (0,)


def test_a_rank_that_died_ahead_of_the_others_is_what_they_wait_for():
    verdict = must(judge([view(0, collectives=100), view(1, collectives=100), view(2, collectives=101, absent="gone")]))
    assert (verdict.hung, verdict.waiting) == ((2,), (0, 1))


def test_silence_alone_is_never_a_hang():
    assert judge([view(0, age=500.0, absent="silent")]) is None
    assert judge([view(rank, age=500.0, absent="silent") for rank in range(3)]) is None


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
    by_rank = {view.rank: view for view in views}
    for rank in verdict.hung:
        blamed = by_rank[rank]
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
    views = [view(0), view(1), view(2, phase="data")]
    verdict = must(judge(views))
    assert (verdict.kind, verdict.hung, verdict.sure) == ("missing", (2,), False)
    assert must(judge([view(0), view(1), view(2, phase="idle")])).kind == "unclear"
    assert must(judge([view(0, step=13), view(1, phase="forward", step=14)])).kind == "unclear"


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


def test_a_rank_that_is_named_as_likely_only_is_not_ended():
    assert unproven("missing", False, (0,), (1,), {1: RESTED})


def test_a_deadlock_that_nccls_own_counters_contradict_is_no_proof():
    ranks = {0: RESTED, 1: RESTED}
    assert unproven("deadlock", False, (0, 1), (), ranks)


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


def test_a_rank_asleep_in_its_first_step_is_given_8_s_and_one_in_start_up_20():
    for row in ROWS:
        first = row_of(row.phase, within_step=False, steps_seen=0, has_stepped=False)
        assert first.asleep_s == (20.0 if row.phase in ("init", "idle") else 8.0)
    within = row_of("idle", within_step=True, steps_seen=0, has_stepped=False)
    assert (within.computing_s, within.asleep_s) == (300.0, 8.0)
