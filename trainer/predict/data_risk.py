"""Finds the steps of a run's first epoch that do not fit, from the padded micro-batches of its data set.

Memory grows with the length of a micro-batch, so the occurring lengths are searched for the largest that fits.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...protocol.analysis.estimates.largest import Need, largest_that_fit
from ...protocol.errors import ConfigError
from ..recipe.config.schema import Config
from ..recipe.data import pipeline, sources
from ..recipe.data.collate import padded_length
from ..recipe.data.encode import Encoder
from ..recipe.data.order import Order
from ..recipe.data.pipeline import Examples
from ..recipe.data.sources import Records
from .result import DataRisk, RiskyStep

_MOST_NAMED = 3


class Step(NamedTuple):
    """The longest micro-batch of an optimizer step."""

    step: int
    """Number of the step, from 1."""
    rank: int
    """The first of the ranks that share the rows."""
    rows: list[int]
    length: int
    """Padded length of its rows, in tokens."""


def steps_an_epoch(config: Config, examples: Examples) -> int:
    """Return the optimizer steps of an epoch.

    Raises:
        ConfigError: there are fewer examples than one step needs.
    """
    return Order(examples, config, 0, _data_ranks(config)).steps_per_epoch


def _data_ranks(config: Config) -> int:
    return config.run.ranks // config.training.sequence_parallel_size


def read(config: Config) -> tuple[Records, Examples]:
    """Return a configuration's records and training examples.

    Raises:
        ConfigError: the data or the tokenizer do not fit the configuration.
    """
    records = sources.read(config)
    forms = pipeline.record_formats(records, config)
    tokenizer = pipeline.load_tokenizer(config, records, forms)
    folder = pipeline.encode(records, Encoder(tokenizer, config, forms), tokenizer, config)
    return records, pipeline.examples(folder, records, config)


def find(
    config: Config,
    records: Records,
    examples: Examples,
    capacity_bytes: int,
    run: Callable[[list[int]], Sequence[Need]],
) -> DataRisk:
    """Return the steps of the first epoch that do not fit.

    Args:
        config: configuration of the run.
        records: records of the data set.
        examples: training examples.
        capacity_bytes: limit of PyTorch's reserved memory on one GPU.
        run: predicts whether lengths, in rising order, fit.

    Raises:
        ConfigError: from ``run``, or there are fewer examples than one step needs.
    """
    steps = _steps(config, examples)
    lengths = sorted({step.length for step in steps})
    largest = largest_that_fit(lengths, [capacity_bytes], run)[0].value
    failing = [step for step in steps if largest is None or step.length > largest]

    def named(step: Step) -> RiskyStep:
        places = [", ".join(records.place(one) for one in examples.rows.records(row)) for row in step.rows]
        return RiskyStep(step.step, step.rank, step.rows, places, step.length)

    return DataRisk(
        steps=len(steps),
        longest=named(max(steps, key=lambda step: step.length)),
        largest_length=largest,
        failing_steps=len(failing),
        failing=[named(step) for step in failing[:_MOST_NAMED]],
    )


def _steps(config: Config, examples: Examples) -> list[Step]:
    """Return the longest micro-batch of each optimizer step of the first epoch, of all ranks."""
    training, ranks = config.training, _data_ranks(config)
    found: list[Step] = []
    orders = [iter(Order(examples, config, rank, ranks)) for rank in range(ranks)]
    for step in range(1, steps_an_epoch(config, examples) + 1):
        batches = [(rank, next(order)) for _ in range(training.grad_accumulation) for rank, order in enumerate(orders)]
        lengths = [max(int(examples.tokens[row]) for row in rows) for _, rows in batches]
        longest = max(range(len(batches)), key=lambda number: lengths[number])
        rank, rows = batches[longest]
        limit = training.sequence_length
        length = limit if config.data.packing else padded_length(lengths[longest], limit)
        found.append(Step(step, rank * training.sequence_parallel_size, rows, length))
    if not found:
        raise ConfigError("data: an epoch has no step")
    return found
