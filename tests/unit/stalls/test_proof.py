"""What is proof enough to end a run, and the one table of patience."""

import pytest
from ftmon.protocol.analysis.stalls import evidence
from ftmon.protocol.analysis.stalls.judge import RankFacts, unproven
from places import ROOT

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


def test_the_guide_promises_what_the_table_holds():
    guide = (ROOT / "docs" / "guide.md").read_text()
    assert "\n".join(evidence.as_markdown()) in guide


def test_the_limits_of_early_steps_are_lower_bounds_of_every_phase():
    for row in evidence.ROWS:
        early = evidence.row_of(row.phase, within_step=False, steps_seen=1, has_stepped=True)
        first = evidence.row_of(row.phase, within_step=False, steps_seen=0, has_stepped=False)
        assert early.computing_s >= 60.0
        assert first.computing_s >= 300.0
        assert row.asleep_s < row.computing_s <= row.working_s


def test_a_rank_asleep_in_its_first_step_is_given_8_s_and_one_in_start_up_20():
    for row in evidence.ROWS:
        first = evidence.row_of(row.phase, within_step=False, steps_seen=0, has_stepped=False)
        assert first.asleep_s == (20.0 if row.phase in ("init", "idle") else 8.0)
    within = evidence.row_of("idle", within_step=True, steps_seen=0, has_stepped=False)
    assert (within.computing_s, within.asleep_s) == (300.0, 8.0)
