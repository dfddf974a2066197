"""Settings with a default that depends on others."""

import pytest
from ftmon.trainer.recipe import support
from ftmon.trainer.recipe.config.schema import Config, Run, Training


def batch(ranks: int, rows: int = 0, **training: object) -> tuple[int, int]:
    config = Config(training=Training(**training), run=Run(ranks=ranks))  # type: ignore[arg-type]
    settled = support.settle_batch(config, rows).training
    sharing = settled.sequence_parallel_size
    return settled.micro_steps, settled.micro_batch * settled.micro_steps * ranks // sharing


@pytest.mark.parametrize(
    ("ranks", "rows", "training", "expected"),
    [
        (1, 0, {}, (32, 32)),
        (8, 0, {"micro_batch": 2}, (2, 32)),
        (8, 0, {"micro_batch": 8}, (1, 64)),
        (3, 0, {"micro_batch": 3}, (4, 36)),
        (8, 0, {"sequence_parallel_size": 4}, (16, 32)),
        (1, 320, {}, (32, 32)),
        (1, 319, {}, (16, 16)),
        (2, 319, {}, (8, 16)),
        (1, 7, {}, (1, 1)),
        (2, 20, {"micro_batch": 4}, (1, 8)),
        (2, 20, {"total_batch": 12}, (6, 12)),
        (1, 20, {"grad_accumulation": 5, "micro_batch": 2}, (5, 10)),
    ],
)
def test_a_step_has_the_target_batch(ranks, rows, training, expected):
    assert batch(ranks, rows, **training) == expected


def test_numbers_of_ranks_that_divide_the_batch_take_the_same_one():
    for rows, expected in ((0, 32), (40, 4), (100, 8), (500, 32)):
        assert {batch(ranks, rows)[1] for ranks in (1, 2, 4)} == {expected}
