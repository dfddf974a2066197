"""One rank's micro-batches: their order, their tensors, and loading the next one while the device computes."""

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from ....protocol.errors import ConfigError
from ....protocol.host.machine import causal_pairs
from ..config.schema import Config
from ..distributed import SequenceGroup
from ..model.loss import IGNORED, Batch, label_positions, label_rows, next_labels
from .pipeline import Examples

_WINDOW = 64
"""Number of global batches sorted by length together; beyond that, order and content stay random."""


class Counts(NamedTuple):
    """Contents of a global batch."""

    tokens: int
    label_tokens: int


class Order:
    """Endless sequence of one rank's micro-batches, over all epochs.

    Examples of similar length make a global batch, unless they are packed; its content does not depend on the number of
    ranks. An epoch is cut to whole optimizer steps. All ranks compute the whole order, so a position in it is one
    number: the global batches used.
    """

    def __init__(self, examples: Examples, config: Config, rank: int, ranks: int) -> None:
        training = config.training
        self._micro_batch = training.micro_batch
        self._accumulation = training.micro_steps
        self._rank = rank
        self._ranks = ranks
        self._seed = training.seed
        self._shuffle = config.data.shuffle
        self._group = config.data.group_by_length and config.data.shuffle and not config.data.packing
        self._tokens = examples.tokens
        self._label_tokens = examples.label_tokens
        self._examples = count = len(examples.tokens)
        self.samples_per_step = training.micro_batch * training.micro_steps * ranks
        self.steps_per_epoch = count // self.samples_per_step
        self._drawn = (-1, numpy.empty(0, numpy.int64))
        self.first_step = 0
        """Number of global batches before the iteration's first."""
        if self.steps_per_epoch == 0:
            raise ConfigError(
                f"data: one step takes {self.samples_per_step} examples (micro_batch x grad_accumulation x ranks), and "
                f"there {'is' if count == 1 else 'are'} {count}: give more data, or make the batch smaller"
            )

    @property
    def kind(self) -> str:
        """The order of an epoch, in words."""
        if not self._shuffle:
            return "in the data's order"
        return "shuffled, grouped by length" if self._group else "shuffled"

    def __iter__(self) -> Iterator[list[int]]:
        epoch, offset = divmod(self.first_step, self.steps_per_epoch)
        while True:
            order = self._epoch(epoch)
            for step in range(offset, self.steps_per_epoch):
                for micro in range(self._accumulation):
                    start = step * self.samples_per_step + (micro * self._ranks + self._rank) * self._micro_batch
                    yield order[start : start + self._micro_batch].tolist()
            epoch, offset = epoch + 1, 0

    def counts(self, step: int) -> Counts:
        """Return the counts of the global batch numbered ``step`` (from 0) over all ranks and micro-steps."""
        epoch, offset = divmod(step, self.steps_per_epoch)
        start = offset * self.samples_per_step
        rows = self._epoch(epoch)[start : start + self.samples_per_step]
        return Counts(int(self._tokens[rows].sum()), int(self._label_tokens[rows].sum()))

    def _epoch(self, epoch: int) -> NDArray[numpy.int64]:
        drawn = self._drawn  # once: a thread may be an epoch ahead
        if drawn[0] != epoch:
            rows = numpy.arange(self._examples)
            if self._shuffle:
                generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
                rows = torch.randperm(self._examples, generator=generator).numpy()
                if self._group:
                    rows = self._grouped(rows, generator)
            self._drawn = drawn = (epoch, rows)
        return drawn[1]

    def _grouped(self, rows: NDArray[numpy.int64], generator: torch.Generator) -> NDArray[numpy.int64]:
        """Sort windows of a random order by length, cut them to global batches, and shuffle these."""
        size = self.samples_per_step
        used = rows[: self.steps_per_epoch * size]
        windows = [used[start : start + _WINDOW * size] for start in range(0, len(used), _WINDOW * size)]
        by_length = [window[numpy.argsort(-self._tokens[window], kind="stable")] for window in windows]
        batches = numpy.concatenate(by_length).reshape(-1, size)
        shuffled = batches[torch.randperm(len(batches), generator=generator).numpy()]
        return numpy.concatenate([shuffled.reshape(-1), rows[len(used) :]])


_PAD_TO = 8
"""Sequences are padded to a multiple of this: tensor cores are faster, and the allocator gets fewer sizes."""


def padded_length(longest: int, limit: int) -> int:
    """Return the length of a batch that is not packed, in tokens."""
    return min(-(-longest // _PAD_TO) * _PAD_TO, max(limit, longest))


class Collate:
    """Pads examples to one length; packed ones up to ``limit`` (``training.sequence_length``)."""

    def __init__(self, pad_id: int, limit: int) -> None:
        self._pad_id = pad_id
        self.limit = limit

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


def with_positions(batch: Batch, rows: bool) -> Batch:
    """Return a batch with its ``label_positions`` and, if ``rows``, its ``label_rows`` (``model.loss``).

    Computed on the host: on a GPU they would need a synchronization.
    """
    labels = shift_labels(batch)
    return {**batch, "label_positions": label_positions(labels), **({"label_rows": label_rows(labels)} if rows else {})}


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


class Ahead:
    """Loads one batch ahead, in a thread: a forked process would copy the rank's offloaded memory."""

    def __init__(self, batches: Iterator[Batch], device: torch.device) -> None:
        """Begin to load the first batch; from now on only the thread may use the endless ``batches``."""
        self._batches = batches
        self._device = device
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._loaded: SimpleQueue[Batch | BaseException] = SimpleQueue()
        # A daemon: a file system that no longer answers must not keep the rank from ending.
        Thread(target=self._load, name="next batch", daemon=True).start()
        self._asked.put(True)

    def next_batch(self) -> Batch:
        """Return the next batch, or raise what the loader raised, and begin to load the one after it."""
        found = self._loaded.get()
        if isinstance(found, BaseException):
            raise found
        self._asked.put(True)
        return found

    def close(self) -> None:
        """Stop loading."""
        self._asked.put(False)

    def _load(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread begins on the first GPU
        while self._asked.get():
            try:
                self._loaded.put(next(self._batches))
            except BaseException as error:
                self._loaded.put(error)
                return
