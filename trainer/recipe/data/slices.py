"""Batches of ranks that share sequences: each rank's slice of every row."""

import zlib

import torch
from torch.nn.functional import pad

from ..model.loss import IGNORED, next_labels
from .collate import Batch

ROWS_KEY = "rows_key"
"""Name of a checksum of the whole rows and the slice's number: equal slices elsewhere do not give equal losses."""


def cut(batch: Batch, size: int, rank: int) -> Batch:
    """Return slice ``rank`` of ``size`` of a batch of whole rows, which are padded to a multiple of ``size``.

    Returns:
        ``input_ids``, ``labels``, ``position_ids`` within the whole row, and ``shift_labels``: for each position the
        label that follows it in the whole row, possibly in the next slice. ``sequence_ids`` stay whole. There is no
        ``attention_mask``: padding is on the right, where causal attention does not reach.
    """
    ids, labels = batch["input_ids"], batch["labels"]
    length = ids.shape[1]
    missing = -length % size
    width = (length + missing) // size
    positions = batch["position_ids"] if "position_ids" in batch else torch.arange(length).expand_as(ids)

    def part(tensor: torch.Tensor, filler: int) -> torch.Tensor:
        return pad(tensor, (0, missing), value=filler)[:, rank * width : (rank + 1) * width].contiguous()

    result = {
        "input_ids": part(ids, 0),
        "labels": part(labels, IGNORED),
        "shift_labels": part(next_labels(labels), IGNORED),
        # The model may have no positions beyond the longest row.
        "position_ids": part(positions, 0),
        ROWS_KEY: torch.tensor(zlib.crc32(labels.numpy().tobytes(), zlib.crc32(ids.numpy().tobytes(), rank))),
    }
    if "sequence_ids" in batch:
        result["sequence_ids"] = pad(batch["sequence_ids"], (0, missing), value=0)
    return result
