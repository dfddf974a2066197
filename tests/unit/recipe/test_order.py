"""Which rank takes which example, and where a resumed run goes on."""

from itertools import islice

import numpy
import pytest

pytest.importorskip("torch")

from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.config.schema import Config, Data, Training
from ftmon.trainer.recipe.data.batches import Order
from ftmon.trainer.recipe.data.pipeline import Examples
from hypothesis import given
from hypothesis import strategies as st


def order(examples: int, rank: int, ranks: int, micro: int = 2, accumulation: int = 2, shuffle: bool = True) -> Order:
    training = Training(micro_batch=micro, grad_accumulation=accumulation, seed=3)
    one = numpy.ones(examples, numpy.int64)
    rows = Examples(range(examples), 3 * numpy.arange(examples), one, examples)
    return Order(rows, Config(training=training, data=Data(shuffle=shuffle)), rank, ranks)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 11))
def test_an_epoch_gives_every_example_once_over_all_ranks(ranks: int, micro: int, accumulation: int, rest: int) -> None:
    step = ranks * micro * accumulation
    examples = 4 * step + rest % step
    seen: list[int] = []
    for rank in range(ranks):
        batches = islice(order(examples, rank, ranks, micro, accumulation), 4 * accumulation)
        seen += [index for batch in batches for index in batch]
    assert len(seen) == len(set(seen)) == 4 * step
    assert set(seen) <= set(range(examples))


@given(st.integers(0, 25))
def test_a_resumed_run_sees_what_the_uninterrupted_one_would_have_seen(done: int) -> None:
    whole = list(islice(order(50, 1, 2), 60))
    resumed = order(50, 1, 2)
    resumed.first_step = done
    assert list(islice(resumed, 60 - 2 * done)) == whole[2 * done :]


def test_each_epoch_has_an_order_of_its_own_that_the_seed_decides() -> None:
    one = order(16, 0, 1)
    batches = list(islice(one, 16))
    assert batches[:8] != batches[8:]
    assert batches == list(islice(order(16, 0, 1), 16))


def test_without_shuffling_the_data_is_read_as_it_stands() -> None:
    assert list(islice(order(8, 0, 1, shuffle=False), 3)) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_orders_of_one_kind_are_equal(shuffle: bool, group: bool, packing: bool) -> None:
    tokens = numpy.random.default_rng(0).integers(1, 1000, 400)
    rows = Examples(range(400), tokens, numpy.ones(400, numpy.int64), 400)

    def one(**data: bool) -> Order:
        return Order(rows, Config(training=Training(micro_batch=2, seed=3), data=Data(**data)), 0, 1)

    mine = one(shuffle=shuffle, group_by_length=group, packing=packing)
    for other in (one(shuffle=False), one(group_by_length=False), one()):
        assert (mine.kind == other.kind) == (list(islice(mine, 50)) == list(islice(other, 50)))


def test_data_that_does_not_fill_one_step_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"one step takes 8 examples \(.*\), and there are 7"):
        order(7, 0, 2)


def test_the_counts_of_a_global_batch_are_those_of_all_ranks_and_micro_steps() -> None:
    ranks = [islice(order(50, rank, 3, 2, 2), 8) for rank in range(3)]
    taken = [[next(batches) for batches in ranks for _ in range(2)] for _ in range(4)]
    for step, micro_batches in enumerate(taken):
        rows = [row for batch in micro_batches for row in batch]
        assert order(50, 0, 3, 2, 2).counts(step) == (3 * sum(rows), len(rows))


@given(st.integers(0, 7), st.booleans())
def test_fewer_ranks_with_more_accumulation_take_the_same_global_batches(done: int, shuffle: bool) -> None:
    def global_batches(ranks: int, micro: int, accumulation: int) -> list[set[int]]:
        taken: list[set[int]] = [set() for _ in range(6)]
        for rank in range(ranks):
            one = order(64, rank, ranks, micro, accumulation, shuffle)
            one.first_step = done
            for number, batch in enumerate(islice(one, 6 * accumulation)):
                taken[number // accumulation] |= set(batch)
        return taken

    assert global_batches(4, 2, 1) == global_batches(2, 2, 2) == global_batches(1, 4, 2)


def test_rows_of_similar_length_share_a_global_batch_and_none_is_lost() -> None:
    training = Training(micro_batch=2, grad_accumulation=2, seed=3)
    tokens = numpy.random.default_rng(0).integers(1, 1000, 4000)
    rows = Examples(range(4000), tokens, numpy.ones(4000, numpy.int64), 4000)

    def spread(group: bool) -> float:
        one = Order(rows, Config(training=training, data=Data(group_by_length=group)), 0, 2)
        taken = list(islice(one, 1000))
        assert len({index for batch in taken for index in batch}) == 2000
        return float(numpy.mean([tokens[batch].max() - tokens[batch].mean() for batch in taken]))

    assert spread(True) < spread(False) / 5
