"""The examples that a run is evaluated on."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec

from ....protocol.errors import ConfigError
from ..config.schema import Config
from ..data import pipeline, prepare, sources
from ..data.encode import Encoder
from ..data.pipeline import Examples
from ..engine.distributed import World
from ..monitor import activity


def held_out(config: Config, world: World, tokens: Any, trained: Path) -> Examples | None:
    """Return the examples to evaluate on; None without evaluation. All ranks call this.

    Rank 0 encodes; ``trained`` is the folder of the training's encoded documents, of which ``evaluation.share`` sets
    some aside.
    """
    settings = config.evaluation
    if not settings.on:
        return None
    found = pipeline.held_out(trained, config) if settings.share else _encoded(config, world, tokens)
    count = min(settings.limit or len(found.rows), len(found.rows))
    return dataclasses.replace(
        found,
        rows=found.rows.select(range(count)),
        tokens=found.tokens[:count],
        label_tokens=found.label_tokens[:count],
    )


def _encoded(config: Config, world: World, tokens: Any) -> Examples:
    wanted = msgspec.structs.replace(config, data=config.evaluation.data(config.data))

    def encode() -> Path:
        records = sources.read(wanted)
        encoder = Encoder(tokens, wanted, pipeline.record_formats(records, wanted))
        with activity("data", "tokenizing evaluation data", total=len(records)) as progress:
            return pipeline.encode(records, encoder, tokens, wanted, progress=progress.report)

    try:
        return pipeline.examples(prepare.first_encodes(world, encode), None, wanted)
    except ConfigError as error:
        raise ConfigError(f"evaluation: {error}") from None
