"""The order in which ranks visit the examples; a resume continues it at any step."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray

from ....protocol.errors import ConfigError
from ..config.schema import Config
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
        self._accumulation = training.grad_accumulation
        self._rank = rank
        self._ranks = ranks
        self._seed = training.seed
        self._shuffle = config.data.shuffle
        self._group = config.data.group_by_length and config.data.shuffle and not config.data.packing
        self._tokens = examples.tokens
        self._label_tokens = examples.label_tokens
        self._examples = count = len(examples.tokens)
        self.samples_per_step = training.micro_batch * training.grad_accumulation * ranks
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
