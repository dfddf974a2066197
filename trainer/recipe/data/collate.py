"""Collates examples into tensors, and makes the loader of a rank's micro-batches."""

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader

from ..config.schema import Config
from ..model.loss import IGNORED
from .order import Order

_PAD_TO = 8
"""Sequences are padded to a multiple of this: tensor cores are faster, and the allocator gets fewer sizes."""

Batch = dict[str, torch.Tensor]


def padded_length(longest: int, limit: int) -> int:
    """Return the length of a batch that is not packed, in tokens."""
    return min(-(-longest // _PAD_TO) * _PAD_TO, max(limit, longest))


class Collate:
    """Pads examples to one length."""

    def __init__(self, pad_id: int, limit: int) -> None:
        self._pad_id = pad_id
        self.limit = limit
        """``training.sequence_length``: packed examples are padded up to it."""

    def __call__(self, examples: list[dict[str, Any]]) -> Batch:
        """Make tensors of shape [examples, length].

        Without packing, the length is that of the longest example, rounded up to a multiple of 8, and an
        ``attention_mask`` hides the padding. Packed examples are all of the full length. They have no
        ``attention_mask`` but ``position_ids``, which restart at 0 in each document, and ``sequence_ids``, which number
        the documents of a row from 1; attention must not cross them. Padding has the number 0.
        """
        packed = "lengths" in examples[0]
        longest = max(len(example["input_ids"]) for example in examples)
        width = max(self.limit, longest) if packed else padded_length(longest, self.limit)
        shape = (len(examples), width)
        ids = torch.full(shape, self._pad_id, dtype=torch.long)
        labels = torch.full(shape, IGNORED, dtype=torch.long)
        mask = torch.zeros(shape, dtype=torch.long)
        positions = torch.zeros(shape, dtype=torch.long)
        for row, example in enumerate(examples):
            length = len(example["input_ids"])
            ids[row, :length] = torch.as_tensor(example["input_ids"])
            labels[row, :length] = torch.as_tensor(example["labels"])
            if not packed:
                mask[row, :length] = 1
                continue
            # With numpy: repeat_interleave would wake every OpenMP thread for these few numbers.
            lengths = numpy.array([*example["lengths"], width - length])
            starts = numpy.repeat(numpy.cumsum(lengths) - lengths, lengths)
            positions[row] = torch.from_numpy(numpy.arange(width) - starts)
            numbers = numpy.array([*range(1, len(lengths)), 0])
            mask[row] = torch.from_numpy(numpy.repeat(numbers, lengths))
        if packed:
            return {"input_ids": ids, "labels": labels, "position_ids": positions, "sequence_ids": mask}
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Then(Collate):
    """Wraps another collation, and changes its batches."""

    def __init__(self, collate: Collate, change: Callable[[Batch], Batch]) -> None:
        self._inner = collate
        self._change = change

    def __call__(self, examples: list[dict[str, Any]]) -> Batch:
        """Return the changed batch."""
        return self._change(self._inner(examples))


def loader(examples: Any, order: Order, collate: Collate, config: Config, pin: bool) -> DataLoader[Batch]:
    """Return the endless loader of one rank's micro-batches; ``pin``: in page-locked memory."""
    return DataLoader(
        examples,
        batch_sampler=order,  # type: ignore[arg-type]
        collate_fn=collate,
        num_workers=config.data.workers,
        pin_memory=pin,
        # Without a generator of its own a loader draws from the global one, and dropout differs after a resume.
        generator=torch.Generator().manual_seed(config.training.seed),
    )
