"""Which ranks of a job are run, and what the others are given."""

import os

import pytest
from ftmon.trainer.predict import ranks
from ftmon.trainer.predict.result import Phase, Rank


def test_ranks_differ_where_one_buffer_is_cut_into_partitions() -> None:
    assert ranks.differing(0, 8) == ranks.differing(3, 8) == [0]
    assert ranks.differing(1, 4) == ranks.differing(2, 4) == [0, 1, 2, 3]
    assert ranks.differing(2, 8) == list(range(8))
    chosen = ranks.differing(2, 64)
    assert (chosen[0], chosen[-1], len(set(chosen))) == (0, 63, 8)


def test_a_rank_that_was_not_run_has_the_figures_of_the_nearest() -> None:
    found = {rank: Rank(rank, {"init": Phase(rank, rank)}, 0) for rank in (0, 9, 15)}
    every = ranks.every(found, 16)
    assert [rank.rank for rank in every] == list(range(16))
    assert [rank.phases["init"].allocated_peak_bytes for rank in every] == [0] * 5 + [9] * 8 + [15] * 3


@pytest.mark.parametrize("visible", [None, "1,0"])
def test_gpus_are_seen_again_after_the_dry_runs(monkeypatch: pytest.MonkeyPatch, visible: str | None) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with ranks.without_gpus():
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
