"""Micro-batches that are loaded one ahead."""

from collections.abc import Iterator
from threading import Event

import pytest

pytest.importorskip("torch")

import torch
from ftmon.trainer.recipe.data.batches import Ahead, Batch

CPU = torch.device("cpu")


def numbers() -> Iterator[Batch]:
    for number in range(3):
        yield {"input_ids": torch.tensor([number])}
    raise ValueError("damaged")


def test_batches_come_in_their_order_and_then_the_loader_s_error() -> None:
    ahead = Ahead(numbers(), CPU)
    assert [ahead.next_batch()["input_ids"].tolist() for _ in range(3)] == [[0], [1], [2]]
    with pytest.raises(ValueError, match="damaged"):
        ahead.next_batch()


def test_the_next_batch_is_loaded_while_the_last_one_is_used() -> None:
    loading = [Event() for _ in range(3)]

    def batches() -> Iterator[Batch]:
        for event in loading:
            event.set()
            yield {}

    ahead = Ahead(batches(), CPU)
    ahead.next_batch()
    assert loading[1].wait(60)
    assert not loading[2].is_set()
    ahead.close()
