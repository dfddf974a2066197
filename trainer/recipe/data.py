"""The training data: read through ``datasets``, tokenized once, and visited in an order that a resume can re-enter."""

import hashlib
from collections.abc import Iterator
from typing import Any

import datasets
import torch
from torch.utils.data import DataLoader

from ...protocol.errors import ConfigError, UsageError
from .check import data_format
from .config import Config
from .examples import IGNORED, Encoder

_PAD_TO = 8
"""Sequences are padded to a multiple of this: tensor cores like it, and the allocator sees fewer sizes."""

Batch = dict[str, torch.Tensor]


def read(config: Config) -> Any:
    """Read the records as a ``datasets.Dataset``.

    Raises:
        ConfigError: they cannot be read.
    """
    datasets.disable_progress_bars()
    data = config.data
    try:
        if data.path:
            builder = "parquet" if data.path.endswith(".parquet") else "json"
            records: Any = datasets.load_dataset(builder, data_files=data.path, split="train")
        else:
            records = datasets.load_dataset(data.name, data.subset or None, split=data.split)
    except Exception as error:  # datasets raises errors of its own, of pyarrow, of the hub and of the file system
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        key, where = ("data.path", data.path) if data.path else ("data.name", data.name)
        raise ConfigError(f"{key}: {where} cannot be read: {str(cause).strip().splitlines()[0]}") from None
    if not isinstance(records, datasets.Dataset):
        raise ConfigError(f"data.split: {data.split} is not one split of {data.path or data.name}")
    return records.select(range(min(data.limit, len(records)))) if data.limit else records


def kind_of(config: Config, records: Any) -> str:
    """Return what a record is: ``text``, ``instruction`` or ``chat``.

    Raises:
        ConfigError: the columns do not fit the configuration.
    """
    try:
        return data_format(config, records.column_names)
    except UsageError as error:
        raise ConfigError(str(error)) from None


def tokenize(records: Any, encoder: Encoder, config: Config, tokenizer_name: str) -> Any:
    """Encode all records into columns ``input_ids`` and ``labels``; ``datasets`` keeps the result on disk.

    Raises:
        ConfigError: no example is left.
    """
    settings = f"{records._fingerprint} {tokenizer_name} {config.data} {config.training.sequence_length}"
    key = hashlib.sha256(settings.encode()).hexdigest()[:16]
    encoded = records.map(
        encoder.batch, batched=True, remove_columns=records.column_names, new_fingerprint=key, load_from_cache_file=True
    )
    if config.data.packing:
        length = config.training.sequence_length
        encoded = encoded.map(
            lambda columns: pack(columns, length), batched=True, batch_size=2048, new_fingerprint=f"{key}p"
        )
    if not len(encoded):
        raise ConfigError("data: no record holds a token to learn within training.sequence_length")
    return encoded


def pack(columns: dict[str, list[list[int]]], length: int) -> dict[str, list[list[int]]]:
    """Join examples and cut them into sequences of exactly ``length`` tokens; the rest is left out."""
    result: dict[str, list[list[int]]] = {}
    for name, rows in columns.items():
        joined = [value for row in rows for value in row]
        result[name] = [joined[start : start + length] for start in range(0, len(joined) - length + 1, length)]
    return result


class Order:
    """Which examples each rank takes, micro-batch after micro-batch, epoch after epoch, without end.

    An epoch is cut to whole optimizer steps. All ranks know the whole order, so the place in it is one number: the
    optimizer steps done.
    """

    def __init__(self, examples: int, config: Config, rank: int, ranks: int) -> None:
        training = config.training
        self._micro_batch = training.micro_batch
        self._accumulation = training.grad_accumulation
        self._rank = rank
        self._ranks = ranks
        self._seed = training.seed
        self._shuffle = config.data.shuffle
        self._examples = examples
        self.samples_per_step = training.micro_batch * training.grad_accumulation * ranks
        self.steps_per_epoch = examples // self.samples_per_step
        self.first_step = 0
        """Steps that are already done when iteration begins."""
        if self.steps_per_epoch == 0:
            raise ConfigError(
                f"data: {examples} examples are fewer than one step takes, {self.samples_per_step} (micro_batch x "
                "grad_accumulation x ranks)"
            )

    def __iter__(self) -> Iterator[list[int]]:
        epoch, offset = divmod(self.first_step, self.steps_per_epoch)
        while True:
            order = self._epoch(epoch)
            for step in range(offset, self.steps_per_epoch):
                for micro in range(self._accumulation):
                    start = step * self.samples_per_step + (micro * self._ranks + self._rank) * self._micro_batch
                    yield order[start : start + self._micro_batch]
            epoch, offset = epoch + 1, 0

    def _epoch(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._examples))
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        order: list[int] = torch.randperm(self._examples, generator=generator).tolist()
        return order


class Collate:
    """Pads examples to one length."""

    def __init__(self, pad_id: int, limit: int) -> None:
        self._pad_id = pad_id
        self._limit = limit

    def __call__(self, examples: list[dict[str, list[int]]]) -> Batch:
        """Make tensors of shape [examples, longest length rounded up to a multiple of 8]."""
        longest = max(len(example["input_ids"]) for example in examples)
        width = min(-(-longest // _PAD_TO) * _PAD_TO, max(self._limit, longest))
        shape = (len(examples), width)
        ids = torch.full(shape, self._pad_id, dtype=torch.long)
        labels = torch.full(shape, IGNORED, dtype=torch.long)
        mask = torch.zeros(shape, dtype=torch.long)
        for row, example in enumerate(examples):
            length = len(example["input_ids"])
            ids[row, :length] = torch.tensor(example["input_ids"])
            labels[row, :length] = torch.tensor(example["labels"])
            mask[row, :length] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def loader(examples: Any, order: Order, collate: Collate, config: Config, pin: bool) -> DataLoader[Batch]:
    """Make the loader of one rank's micro-batches, without end; ``pin``: in page-locked memory."""
    return DataLoader(
        examples,
        batch_sampler=order,  # type: ignore[arg-type]
        collate_fn=collate,
        num_workers=config.data.workers,
        pin_memory=pin,
    )
