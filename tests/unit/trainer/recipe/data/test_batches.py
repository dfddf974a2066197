"""Packing loses nothing, and documents of one sequence do not see each other."""

from collections.abc import Iterator
from functools import partial
from itertools import islice, product
from threading import Event
from typing import Any

import numpy
import pytest
import torch
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.config.schema import Config, Data, Training
from ftmon.trainer.recipe.data.batches import Ahead, Collate, Order, Then, WithCounts, with_positions
from ftmon.trainer.recipe.data.pipeline import Examples, best_fit
from ftmon.trainer.recipe.distributed import SequenceGroup
from ftmon.trainer.recipe.model.attention import cut
from ftmon.trainer.recipe.model.loss import IGNORED, Batch, label_rows
from hypothesis import given
from hypothesis import strategies as st
from small_shape import SMALL_SHAPE
from transformers import AutoConfig, AutoModelForCausalLM


def order(examples: int, rank: int, ranks: int, micro: int = 2, accumulation: int = 2, shuffle: bool = True) -> Order:
    training = Training(micro_batch=micro, grad_accumulation=accumulation, seed=3)
    one = numpy.ones(examples, numpy.int64)
    rows = Examples(range(examples), 3 * numpy.arange(examples), one, examples)
    return Order(rows, Config(training=training, data=Data(shuffle=shuffle, packing=False)), rank, ranks)


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


def test_each_epoch_has_an_order_of_its_own_and_a_global_batch_counts_all_ranks_and_micro_steps():
    batches = list(islice(order(16, 0, 1), 16))
    assert batches[:8] != batches[8:]
    assert batches == list(islice(order(16, 0, 1), 16))
    assert list(islice(order(8, 0, 1, shuffle=False), 3)) == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ConfigError, match=r"one step takes 8 examples \(.*\), and there are 7"):
        order(7, 0, 2)
    ranks = [islice(order(50, rank, 3, 2, 2), 8) for rank in range(3)]
    taken = [[next(batches) for batches in ranks for _ in range(2)] for _ in range(4)]
    for step, micro_batches in enumerate(taken):
        rows = [row for batch in micro_batches for row in batch]
        assert order(50, 0, 3, 2, 2).counts(step) == (3 * sum(rows), len(rows))


@pytest.mark.parametrize("choice", [*product((False, True), repeat=3)])
def test_orders_of_one_kind_are_equal(choice: tuple[bool, ...]) -> None:
    tokens = numpy.random.default_rng(0).integers(1, 1000, 400)
    rows = Examples(range(400), tokens, numpy.ones(400, numpy.int64), 400)

    def one(**data: bool) -> Order:
        unpacked = Data(**{"packing": False, **data})
        return Order(rows, Config(training=Training(micro_batch=2, seed=3), data=unpacked), 0, 1)

    mine = one(**dict(zip(("shuffle", "group_by_length", "packing"), choice, strict=True)))
    for other in (one(shuffle=False), one(group_by_length=False), one()):
        assert (mine.kind == other.kind) == (list(islice(mine, 50)) == list(islice(other, 50)))


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
        one = Order(rows, Config(training=training, data=Data(group_by_length=group, packing=False)), 0, 2)
        taken = list(islice(one, 1000))
        assert len({index for batch in taken for index in batch}) == 2000
        return float(numpy.mean([tokens[batch].max() - tokens[batch].mean() for batch in taken]))

    assert spread(True) < spread(False) / 5


CPU = torch.device("cpu")


def test_batches_come_in_their_order_and_then_the_loader_s_error() -> None:
    def numbers() -> Iterator[Batch]:
        yield from ({"input_ids": torch.tensor([number])} for number in range(3))
        raise ValueError("damaged")

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


def row(length: int, **more: object) -> "dict[str, object]":
    return {"input_ids": list(range(1, length + 1)), "labels": [-100, *range(2, length + 1)], **more}


def pairs(*lengths: int) -> int:
    return sum(key <= query for length in lengths for query in range(length) for key in range(length))


@pytest.mark.parametrize(
    ("limit", "rows", "counts"),
    [
        (64, [row(5), row(9)], [14, 12, pairs(5, 9), 9, 2]),
        (16, [row(12, lengths=[4, 7, 1]), row(10, lengths=[10])], [22, 20, pairs(4, 7, 1, 10), 10, 2]),
    ],
    ids=["padded", "packed"],
)
def test_rows_are_counted_as_the_documents_they_hold(limit: int, rows: list[Any], counts: list[int]) -> None:
    batch = WithCounts(Collate(0, limit))(rows)
    assert (batch["input_ids"].shape, batch["counts"].tolist()) == ((2, 16), counts)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("lengths", [{}, {"lengths": [4, 7, 1]}], ids=["padded", "packed"])
def test_ranks_that_share_rows_count_shares_that_add_up(size: int, lengths: "dict[str, object]") -> None:
    rows = [row(12, **lengths)] * 3
    whole = WithCounts(Collate(0, 17))(rows)["counts"]
    parts = [
        WithCounts(Then(Collate(0, 17), partial(cut, size=size, rank=rank)), SequenceGroup(size, rank))(rows)["counts"]
        for rank in range(size)
    ]
    assert sum(parts)[[0, 1, 2, 4]].tolist() == whole[[0, 1, 2, 4]].tolist()  # type: ignore[index]
    assert {int(part[3]) for part in parts} == {int(whole[3])}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_slices_hold_each_token_and_each_label_of_the_whole_rows_once(size: int, packed: bool) -> None:
    rows = [row(15, lengths=[7, 8]), row(10, lengths=[10])] if packed else [row(15), row(10)]
    whole = Collate(0, 17)(rows)  # no multiple of any size
    slices: list[Any] = [with_positions(cut(whole, size, rank), rows=True) for rank in range(size)]
    length = whole["input_ids"].shape[1]
    joined = {name: torch.cat([one[name] for one in slices], 1) for name in ("input_ids", "labels", "position_ids")}
    assert torch.equal(joined["input_ids"][:, :length], whole["input_ids"])
    assert torch.equal(joined["labels"][:, :length], whole["labels"])
    assert not (joined["labels"][:, length:] != IGNORED).any()
    expected = whole["position_ids"] if packed else torch.arange(length).expand(2, -1)
    assert torch.equal(joined["position_ids"][:, :length], expected)
    # The label after a slice's last token is the next slice's first one.
    targets = torch.cat([one["shift_labels"] for one in slices], 1)
    assert torch.equal(targets[:, : length - 1], whole["labels"][:, 1:])
    assert not (targets[:, length - 1 :] != IGNORED).any()
    for one in slices:
        width = one["input_ids"].shape[1]
        assert width * size >= length > (width - 1) * size
        positions, chosen = one["label_positions"].tolist(), one["label_rows"].tolist()
        assert positions == (one["shift_labels"] != IGNORED).flatten().nonzero()[:, 0].tolist()
        assert set(positions) <= set(chosen)
        assert chosen == sorted(set(chosen))
        if packed:
            assert torch.equal(one["sequence_ids"][:, :length], whole["sequence_ids"])
            assert not one["sequence_ids"][:, length:].any()
    assert len({int(one["rows_key"]) for one in slices}) == size


def test_equal_slices_of_different_rows_are_told_apart() -> None:
    one, other = row(16), row(16)
    other["input_ids"][0] = 99
    slices = [cut(Collate(0, 16)([each]), 2, 1) for each in (one, other)]
    assert torch.equal(slices[0]["input_ids"], slices[1]["input_ids"])
    assert int(slices[0]["rows_key"]) != int(slices[1]["rows_key"])


LENGTHS = st.lists(st.integers(1, 50), max_size=200)


@given(LENGTHS, st.integers(50, 80))
def test_every_document_is_in_one_sequence_that_it_fits_where_the_least_room_is_left(lengths, capacity):
    bins = best_fit(lengths, capacity)
    assert sorted(document for row in bins for document in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[document] for document in row) <= capacity for row in bins)
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - length)
    made = [capacity - sum(lengths[document] for document in row) for row in best_fit(lengths, capacity)]
    assert sorted(made) == sorted(rooms)
    with pytest.raises(ValueError, match="document 1 has 81 tokens"):
        best_fit([3, 81], capacity)


def packed(*lengths: int) -> dict[str, Any]:
    ids = numpy.arange(10, 10 + sum(lengths))
    return {"input_ids": ids, "labels": ids, "lengths": list(lengths)}


def test_positions_restart_in_a_packed_batch_and_padding_is_masked_without_loss_or_excess():
    batch = Collate(0, 8)([packed(3, 4), packed(8)])
    assert set(batch) == {"input_ids", "labels", "position_ids", "sequence_ids"}
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], list(range(8))]
    assert batch["sequence_ids"].tolist() == [[1, 1, 1, 2, 2, 2, 2, 0], [1] * 8]
    assert batch["labels"][0].tolist() == [*range(10, 17), IGNORED]
    ten = list(range(10, 20))
    short = {"input_ids": [5, 6, 7], "labels": [IGNORED, 6, 7]}
    batch = Collate(pad_id=0, limit=128)([short, {"input_ids": ten, "labels": ten}])
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(batch, (2, 16))
    assert batch["input_ids"][0].tolist() == [5, 6, 7] + [0] * 13
    assert batch["attention_mask"].sum(1).tolist() == [3, 10]
    assert batch["labels"][0].tolist() == [IGNORED, 6, 7] + [IGNORED] * 13
    assert Collate(pad_id=0, limit=13)([row(13)])["input_ids"].shape == (1, 13)


def test_a_change_of_one_document_leaves_the_logits_of_the_next_bitwise_unchanged() -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **SMALL_SHAPE)).eval()
    batch = Collate(0, 16)([packed(6, 7)])
    batch.pop("labels")
    sequences = batch.pop("sequence_ids")
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][sequences == 1] = 5
    with torch.no_grad():
        one, two = model(**batch, use_cache=False).logits, model(**other, use_cache=False).logits
    assert torch.equal(one[sequences == 2], two[sequences == 2])
    assert not torch.equal(one[sequences == 1], two[sequences == 1])


@pytest.mark.parametrize(("labels", "expected"), [(0, 4), (1, 4), (4, 4), (5, 8), (127, 128), (128, 128)])
def test_chosen_rows_have_few_numbers(labels: int, expected: int) -> None:
    shifted = torch.full((2, 64), IGNORED)
    places = torch.randperm(128, generator=torch.Generator().manual_seed(labels))[:labels]
    shifted.view(-1)[places] = 1
    rows = label_rows(shifted)
    assert len(rows) == expected
    assert set(places.tolist()) <= set(rows.tolist())
