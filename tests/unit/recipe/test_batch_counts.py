"""What a micro-batch holds, counted on the host for tokens/s and MFU."""

from functools import partial

import pytest

pytest.importorskip("torch")

from ftmon.trainer.recipe.data.batches import Collate, Then, WithCounts, cut
from ftmon.trainer.recipe.engine.distributed import SequenceGroup


def row(length: int, **more: object) -> "dict[str, object]":
    return {"input_ids": list(range(1, length + 1)), "labels": [-100, *range(2, length + 1)], **more}


def pairs(*lengths: int) -> int:
    return sum(key <= query for length in lengths for query in range(length) for key in range(length))


def test_padded_rows_are_documents_without_their_padding() -> None:
    batch = WithCounts(Collate(0, 64))([row(5), row(9)])
    assert batch["input_ids"].shape == (2, 16)
    assert batch["counts"].tolist() == [14, 12, pairs(5, 9), 9, 2]


def test_a_packed_row_is_as_many_documents_as_it_holds() -> None:
    batch = WithCounts(Collate(0, 16))([row(12, lengths=[4, 7, 1]), row(10, lengths=[10])])
    assert batch["input_ids"].shape == (2, 16)
    assert batch["counts"].tolist() == [22, 20, pairs(4, 7, 1, 10), 10, 2]


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
