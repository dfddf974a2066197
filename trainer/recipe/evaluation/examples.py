"""The examples that a run is evaluated on."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import torch

from ....protocol.errors import ConfigError
from ..config.schema import Config
from ..data import pipeline, prepare, sources
from ..data.encode import Encoder
from ..data.pipeline import Examples
from ..engine.distributed import World
from ..monitor import Monitor


def split(
    config: Config, world: World, monitor: Monitor, tokens: Any, examples: Examples
) -> tuple[Examples, Examples | None]:
    """Return the examples to train on and those to evaluate on (None without evaluation). All ranks call this.

    Args:
        config: the resolved configuration.
        world: the ranks; rank 0 encodes, the others read its results from disk.
        monitor: gets the activity.
        tokens: the tokenizer.
        examples: all encoded training examples.

    Raises:
        ConfigError: the evaluation data cannot be read, or nothing is left on one side.
    """
    settings = config.evaluation
    if not settings.on:
        return examples, None
    if settings.share:
        trained, held_out = hold_out(examples, settings.share, config.training.seed)
    else:
        trained, held_out = examples, _encoded(config, world, monitor, tokens)
    if settings.limit:
        held_out = _rows(held_out, range(min(settings.limit, len(held_out.rows))), "")
    return trained, held_out


def hold_out(examples: Examples, share: float, seed: int) -> tuple[Examples, Examples]:
    """Split examples at random into those to train on and those to evaluate on; the same split for the same seed.

    Raises:
        ConfigError: there are too few to split.
    """
    count = len(examples.rows)
    chosen = max(1, round(share * count))
    if chosen >= count:
        raise ConfigError(f"evaluation.share: {count} examples cannot be split into training and evaluation")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    held_out, trained = sorted(order[:chosen]), sorted(order[chosen:])
    return _rows(examples, trained, f"-without-{share:g}-{seed}"), _rows(examples, held_out, "")


def _rows(examples: Examples, chosen: Any, suffix: str) -> Examples:
    where = list(chosen)
    return dataclasses.replace(
        examples,
        rows=examples.rows.select(where),
        tokens=examples.tokens[where],
        label_tokens=examples.label_tokens[where],
        key=examples.key + suffix,
    )


def _encoded(config: Config, world: World, monitor: Monitor, tokens: Any) -> Examples:
    wanted = msgspec.structs.replace(config, data=config.evaluation.data(config.data))

    def encode() -> Path:
        records = sources.read(wanted)
        encoder = Encoder(tokens, wanted, pipeline.record_formats(records, wanted))
        with monitor.activity("data", "tokenizing evaluation data", total=len(records)) as progress:
            return pipeline.encode(records, encoder, tokens, wanted, progress=progress.report)

    try:
        return pipeline.examples(prepare.first_encodes(world, encode), None, wanted)
    except ConfigError as error:
        raise ConfigError(f"evaluation: {error}") from None
