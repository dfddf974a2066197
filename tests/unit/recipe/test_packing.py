"""Packing loses nothing, and documents of one sequence do not see each other."""

from typing import Any

import numpy
import pytest

pytest.importorskip("transformers")

import torch
from ftmon.trainer.recipe.data.batches import Collate
from ftmon.trainer.recipe.data.pipeline import best_fit
from ftmon.trainer.recipe.model.loss import IGNORED
from hypothesis import given
from hypothesis import strategies as st

LENGTHS = st.lists(st.integers(1, 50), max_size=200)


@given(LENGTHS, st.integers(50, 80))
def test_every_document_is_in_exactly_one_sequence_that_it_fits(lengths: list[int], capacity: int) -> None:
    bins = best_fit(lengths, capacity)
    assert sorted(document for row in bins for document in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[document] for document in row) <= capacity for row in bins)


@given(LENGTHS, st.integers(50, 80))
def test_each_document_goes_where_the_least_room_is_left(lengths: list[int], capacity: int) -> None:
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - length)
    made = [capacity - sum(lengths[document] for document in row) for row in best_fit(lengths, capacity)]
    assert sorted(made) == sorted(rooms)


def test_a_document_longer_than_a_sequence_is_an_error() -> None:
    with pytest.raises(ValueError, match="document 1 has 9 tokens"):
        best_fit([3, 9], 8)


def packed(*lengths: int) -> dict[str, Any]:
    ids = numpy.arange(10, 10 + sum(lengths))
    return {"input_ids": ids, "labels": ids, "lengths": list(lengths)}


def test_positions_restart_and_sequences_are_numbered_in_a_packed_batch() -> None:
    batch = Collate(0, 8)([packed(3, 4), packed(8)])
    assert set(batch) == {"input_ids", "labels", "position_ids", "sequence_ids"}
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], list(range(8))]
    assert batch["sequence_ids"].tolist() == [[1, 1, 1, 2, 2, 2, 2, 0], [1] * 8]
    assert batch["labels"][0].tolist() == [*range(10, 17), IGNORED]


def test_padding_is_masked_and_carries_no_loss() -> None:
    ten = list(range(10, 20))
    short = {"input_ids": [5, 6, 7], "labels": [IGNORED, 6, 7]}
    batch = Collate(pad_id=0, limit=128)([short, {"input_ids": ten, "labels": ten}])
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(batch, (2, 16))
    assert batch["input_ids"][0].tolist() == [5, 6, 7] + [0] * 13
    assert batch["attention_mask"].sum(1).tolist() == [3, 10]
    assert batch["labels"][0].tolist() == [IGNORED, 6, 7] + [IGNORED] * 13


def test_padding_never_exceeds_the_sequence_length() -> None:
    batch = Collate(pad_id=0, limit=13)([{"input_ids": list(range(13)), "labels": list(range(13))}])
    assert batch["input_ids"].shape == (1, 13)


def test_a_change_of_one_document_leaves_the_logits_of_the_next_bitwise_unchanged() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = Qwen2ForCausalLM(config).eval()
    batch = Collate(0, 16)([packed(6, 7)])
    batch.pop("labels")
    sequences = batch.pop("sequence_ids")
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][sequences == 1] = 5
    with torch.no_grad():
        one, two = model(**batch, use_cache=False).logits, model(**other, use_cache=False).logits
    assert torch.equal(one[sequences == 2], two[sequences == 2])
    assert not torch.equal(one[sequences == 1], two[sequences == 1])
