"""Adds label positions and counts to batches on the host; on a GPU they would need a synchronization."""

from typing import Any

import torch

from ....protocol.messages.throughput import causal_pairs
from ..engine.sequence_group import SequenceGroup
from ..model.loss import IGNORED, label_positions, next_labels
from .collate import Batch, Collate


def with_positions(batch: Batch) -> Batch:
    """Return a collated batch and its ``label_positions`` (see ``model.loss``)."""
    return {**batch, "label_positions": label_positions(shift_labels(batch))}


def shift_labels(batch: Batch) -> torch.Tensor:
    """Return the label that each position's logits predict; the batch of a slice contains it."""
    return batch["shift_labels"] if "shift_labels" in batch else next_labels(batch["labels"])


class WithCounts(Collate):
    """Wraps another collation, and adds ``counts``, a tensor that stays on the host.

    It contains the tokens without padding, the labels that carry loss, the pairs of query and key in all documents
    (``causal_pairs``), the tokens of the longest document, and the rows. The counts of ranks that share sequences are
    shares that add up to the rows' counts.
    """

    def __init__(self, collate: Collate, group: SequenceGroup | None = None) -> None:
        self._inner = collate
        self._group = group or SequenceGroup()

    def __call__(self, examples: list[dict[str, Any]]) -> Batch:
        """Return the collated batch and its counts."""
        batch = self._inner(examples)
        lengths = [int(one) for example in examples for one in example.get("lengths", [len(example["input_ids"])])]
        labels = int((shift_labels(batch) != IGNORED).sum())
        size, rank, width = self._group.size, self._group.rank, batch["input_ids"].shape[1]
        tokens = sum(min(width, max(0, len(example["input_ids"]) - rank * width)) for example in examples)

        def share(total: int) -> int:
            return total * (rank + 1) // size - total * rank // size

        pairs, rows = share(causal_pairs(lengths)), share(len(examples))
        return {**batch, "counts": torch.tensor([tokens, labels, pairs, max(lengths), rows])}
