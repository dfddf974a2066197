"""Which rank takes which example, and where a resumed run goes on."""

from itertools import islice

import pytest

pytest.importorskip("torch")

from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.config import Config, Data, Training
from ftmon.trainer.recipe.data import Order
from hypothesis import given
from hypothesis import strategies as st


def order(examples: int, rank: int, ranks: int, micro: int = 2, accumulation: int = 2, shuffle: bool = True) -> Order:
    training = Training(micro_batch=micro, grad_accumulation=accumulation, seed=3)
    return Order(examples, Config(training=training, data=Data(shuffle=shuffle)), rank, ranks)


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


def test_data_that_does_not_fill_one_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="7 examples are fewer than one step takes, 8"):
        order(7, 0, 2)
