"""Values of all ranks, collected by step."""

from ftmon.protocol.analysis.health.by_step import KEPT, RanksByStep


def test_a_step_is_complete_once_all_known_ranks_have_reported_it() -> None:
    steps = RanksByStep[str]()
    assert steps.add(10, 0, "a") is None
    assert steps.add(10, 1, "b") == {0: "a", 1: "b"}
    assert steps.add(20, 2, "c") is None
    assert steps.add(20, 0, "d") is None
    steps.drop(1)
    assert steps.add(20, 2, "e") == {2: "e", 0: "d"}


def test_a_late_rank_does_not_complete_a_step_that_is_no_longer_kept() -> None:
    steps = RanksByStep[int]()
    assert steps.add(0, 0, 1) is None
    assert steps.add(1, 1, 1) is None
    for step in range(2, KEPT + 2):
        assert steps.add(step, 0, 1) is None
    assert steps.add(0, 1, 1) is None
    assert steps.add(KEPT, 1, 1) == {0: 1, 1: 1}
