"""The documents of a data set's packed rows; their lengths determine attention's work and memory."""

from collections.abc import Iterable
from itertools import cycle
from typing import NamedTuple

from ...protocol.messages.throughput import causal_pairs


class Documents(NamedTuple):
    """Documents of packed rows."""

    pairs_a_token: float
    """Pairs of query and key under the causal mask, per token: the mean over all rows."""
    longest: int
    """Tokens of the longest document."""
    densest: list[int]
    """Tokens of each document in the row with most documents."""

    def pairs(self, length: int) -> float:
        """Return the pairs per token in rows of ``length`` tokens, which have no longer document."""
        return min(self.pairs_a_token, causal_pairs([length]) / length)

    def row(self, length: int) -> list[int]:
        """Return the documents of a row of ``length`` tokens, packed as densely as the densest row."""
        found: list[int] = []
        for tokens in cycle(self.densest):
            if length <= 0:
                break
            found.append(min(tokens, length))
            length -= tokens
        return found


def of_rows(rows: Iterable[list[int]]) -> Documents:
    """Return the documents of packed rows.

    Args:
        rows: tokens of each document, row by row; at least one row.
    """
    pairs = tokens = longest = 0
    densest: list[int] = []
    for row in rows:
        pairs += causal_pairs(row)
        tokens += sum(row)
        longest = max(longest, *row)
        densest = max(densest, row, key=len)
    return Documents(pairs / tokens, longest, densest)
