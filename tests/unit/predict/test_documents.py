"""The documents of packed rows, beside pairs that are counted one by one."""

from ftmon.trainer.predict.recipe import of_rows

ROWS = [[5, 3], [8], [2, 2, 2], [1, 6, 1]]


def pairs(documents: list[int]) -> int:
    return sum(1 for tokens in documents for query in range(tokens) for key in range(tokens) if key <= query)


def test_a_token_attends_to_the_mean_of_all_rows() -> None:
    found = of_rows(ROWS)
    tokens = sum(map(sum, ROWS))
    assert found.pairs_a_token == sum(map(pairs, ROWS)) / tokens
    assert found.longest == 8
    assert found.pairs(8) == found.pairs_a_token
    assert found.pairs(2) == pairs([2]) / 2, "no document is longer than the row"


def test_a_row_is_packed_as_densely_as_the_densest() -> None:
    found = of_rows(ROWS)
    assert found.densest == [2, 2, 2]
    assert found.row(6) == [2, 2, 2]
    assert found.row(3) == [2, 1]
    assert found.row(7) == [2, 2, 2, 1]
