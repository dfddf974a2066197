"""Which ranks of a job are run, and what the others are given."""

import os

import pytest
from ftmon.protocol.analysis.allocator.settings import Settings
from ftmon.trainer.predict import ranks
from ftmon.trainer.predict.record import Trace
from ftmon.trainer.predict.result import Phase, Rank


def test_ranks_differ_where_a_buffer_is_cut_and_one_that_was_not_run_has_the_nearest_one_s_figures():
    assert ranks.differing(0, 8) == ranks.differing(3, 8) == [0]
    assert ranks.differing(1, 4) == ranks.differing(2, 4) == [0, 1, 2, 3]
    assert ranks.differing(2, 8) == list(range(8))
    chosen = ranks.differing(2, 64)
    assert (chosen[0], chosen[-1], len(set(chosen))) == (0, 63, 8)
    every = ranks.every({rank: Rank(rank, {"init": Phase(rank, rank)}, 0) for rank in (0, 9, 15)}, 16)
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


MIB = 1 << 20
CAPACITIES = range(0, 3000, 60)
KINDS = ("kept", "recomputed", "expandable")
NEEDED_MIB: dict[tuple[int, int, str], int] = {
    (4, 1, "kept"): 430, (4, 1, "recomputed"): 286, (4, 1, "expandable"): 400, (4, 3, "kept"): 1200,
    (4, 3, "recomputed"): 784, (4, 3, "expandable"): 1000, (4, 8, "kept"): 3088, (4, 8, "recomputed"): 2000,
    (4, 8, "expandable"): 2500, (16, 1, "kept"): 774, (16, 1, "recomputed"): 620, (16, 1, "expandable"): 700,
    (16, 3, "kept"): 1416, (16, 3, "recomputed"): 1000, (16, 3, "expandable"): 1300, (16, 8, "kept"): 3176,
    (16, 8, "recomputed"): 2088, (16, 8, "expandable"): 2780, (48, 1, "kept"): 1762, (48, 1, "recomputed"): 1796,
    (48, 1, "expandable"): 1740, (48, 3, "kept"): 2066, (48, 3, "recomputed"): 1806, (48, 3, "expandable"): 2060,
    (48, 8, "kept"): 3816, (48, 8, "recomputed"): 2728, (48, 8, "expandable"): 3580,
}  # fmt: skip
"""Stored needs by the MiB of a layer's weights, the micro-batch and the kind of run; of eight layers."""


def _training(weights: int, batch: int, kind: str) -> Trace:
    """Return two steps of eight layers with gradients in one bucket, and states from the first update on."""
    trace = Trace(Settings(expandable_segments=kind == "expandable"))
    trace.begin("init")
    for _ in range(8):
        trace.allocate(weights * MIB, "cuda")
    trace.end("init")
    for step in range(2):
        trace.begin("forward")
        inputs = [trace.allocate(batch * 5 * MIB, "cuda") for _ in range(8)]
        inner = [trace.allocate(batch * 17 * MIB, "cuda") for _ in range(0 if kind == "recomputed" else 8)]
        logits = trace.allocate(batch * 41 * MIB, "cuda")
        trace.end("forward")
        trace.begin("backward")
        trace.moment(batch * 82 * MIB)
        trace.free(logits)
        gradients: list[int] = []
        for _ in range(8):
            of_layer = inner.pop() if inner else trace.allocate(batch * 17 * MIB, "cuda")
            trace.moment(batch * 23 * MIB)
            gradients.append(trace.allocate(weights * MIB, "cuda"))
            trace.free(of_layer)
            trace.free(inputs.pop())
        trace.end("backward")
        trace.begin("optimizer")
        for _ in range(0 if step else 2):
            trace.allocate(8 * weights * MIB, "cuda")
        trace.moment(3 * weights * MIB)
        for gradient in gradients:
            trace.free(gradient)
        trace.end("optimizer")
    return trace


@pytest.mark.parametrize(("weights", "batch", "kind"), NEEDED_MIB)
def test_verdicts_are_monotone_in_capacity_and_change_at_what_is_stored(weights: int, batch: int, kind: str) -> None:
    trace = _training(weights, batch, kind)
    settings = Settings(expandable_segments=kind == "expandable")
    outcome = ranks.Outcome(64, Rank(0, {"backward": Phase(1, 1)}, 0))
    needed = NEEDED_MIB[weights, batch, kind] * MIB
    verdicts: list[int] = []
    for capacity in sorted([*(one * MIB for one in CAPACITIES), needed - 1, needed]):
        found = ranks._needs(outcome, trace.events, settings, capacity)
        assert found.rank.needed_bytes == needed
        assert bool(found.fails_in) == (capacity < needed)
        verdicts.append(2 if not found.fails_in else int(found.tight))
    assert verdicts == sorted(verdicts), "no, tight, yes"
    assert (verdicts[0], verdicts[-1]) == (0, 2)
