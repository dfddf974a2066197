"""Rows cut to a length: the last tokens, each in its document, every label that still carries loss."""

from typing import Any

import numpy
import pytest
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.data.batches import Collate
from ftmon.trainer.recipe.data.pipeline import Examples
from ftmon.trainer.recipe.model.loss import IGNORED
from ftmon.trainer.recipe.rehearse import Sampled, cut, label_tokens, long_rows
from hypothesis import given
from hypothesis import strategies as st


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    ids = numpy.arange(sum(lengths)) + 1
    learned = numpy.array(draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))))
    row: dict[str, Any] = {"input_ids": ids, "labels": numpy.where(learned, ids, IGNORED)}
    return {**row, "lengths": lengths} if draw(st.booleans()) else row


@given(rows(), st.data())
def test_a_cut_row_has_the_last_tokens_of_its_documents(row: dict[str, Any], data: st.DataObject) -> None:
    length = data.draw(st.integers(1, len(row["input_ids"])))
    found = cut(row, length)
    documents = row.get("lengths", [len(row["input_ids"])])
    of = [number for number, size in enumerate(documents) for _ in range(size)][-length:]
    assert found["input_ids"].tolist() == row["input_ids"].tolist()[-length:]
    assert found["labels"].tolist() == row["labels"].tolist()[-length:]
    assert found.get("lengths", [length]) == [of.count(number) for number in sorted(set(of))]
    carrying = 0
    for place, document in enumerate(of):
        first = place == 0 or of[place - 1] != document
        carrying += not first and found["labels"][place] != IGNORED
    assert label_tokens(found) == carrying


def sampled(sizes: list[int], packed: bool) -> Sampled:
    found: list[dict[str, Any]] = [
        {"input_ids": numpy.full(size, number), "labels": numpy.full(size, number)} for number, size in enumerate(sizes)
    ]
    if packed:
        found = [{**row, "lengths": [size]} for row, size in zip(found, sizes, strict=True)]
    tokens = numpy.array(sizes)
    return Sampled(Examples(found, tokens, tokens, len(sizes)), Collate(0, 1))


def test_packed_rows_that_are_too_short_are_joined() -> None:
    found = long_rows(sampled([5, 9, 3, 7, 6], packed=True), 2, 9)
    assert [row["lengths"] for row in found] == [[9], [7, 6]]
    assert found[1]["input_ids"].tolist() == [3] * 7 + [4] * 6


@pytest.mark.parametrize(("sizes", "packed"), [([9, 8], False), ([9, 4], True), ([9], True)])
def test_data_that_are_too_short_are_refused(sizes: list[int], packed: bool) -> None:
    with pytest.raises(ConfigError, match="the data have no 2 rows of 9 tokens"):
        long_rows(sampled(sizes, packed), 2, 9)
