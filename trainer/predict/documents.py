"""The documents of a data set's packed rows: their lengths decide what attention computes and allocates."""

from collections.abc import Iterable
from itertools import cycle
from typing import NamedTuple

from ...protocol.messages.throughput import causal_pairs


class Documents(NamedTuple):
    """Documents of packed rows."""

    pairs_a_token: float
    """Pairs of query and key that the causal mask admits, for each token: the mean over all rows."""
    longest: int
    """Tokens of the longest document."""
    densest: list[int]
    """Tokens of each document of the row that has most documents."""

    def pairs(self, length: int) -> float:
        """Return the pairs a token in rows of ``length`` tokens, which hold no longer document."""
        return min(self.pairs_a_token, causal_pairs([length]) / length)

    def row(self, length: int) -> list[int]:
        """Return the documents of a row of ``length`` tokens that is packed as densely as the densest."""
        found: list[int] = []
        for tokens in cycle(self.densest):
            if length <= 0:
                break
            found.append(min(tokens, length))
            length -= tokens
        return found


def of_rows(rows: Iterable[list[int]]) -> Documents:
    """Return what packed rows consist of.

    Args:
        rows: tokens of each document, row by row; at least one.
    """
    pairs = tokens = longest = 0
    densest: list[int] = []
    for row in rows:
        pairs += causal_pairs(row)
        tokens += sum(row)
        longest = max(longest, *row)
        densest = max(densest, row, key=len)
    return Documents(pairs / tokens, longest, densest)
