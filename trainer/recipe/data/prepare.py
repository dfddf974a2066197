"""The tokenizer and the encoded examples of a run."""

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ....protocol.errors import ConfigError, FtmonError
from ..config.schema import Config
from ..engine.distributed import World
from ..model import tokenizer
from ..monitor import activity
from . import handover, pipeline, sources
from .encode import Encoder
from .pipeline import Examples


def prepare(config: Config, world: World, output: Path, resumed: Path | None) -> tuple[Any, Path, Examples]:
    """Return the tokenizer, the folder of the encoded documents, and the examples to train on. All ranks call this."""
    kept = output / "tokenizer"
    trained = resumed.parent.parent / "tokenizer" if resumed else None
    made: Any = None

    def encode() -> Path:
        nonlocal made
        made, folder = _encode(config, trained, kept, world.log)
        return folder

    folder = first_encodes(world, encode)
    if made is None:
        made = tokenizer.load(config, kept)
    # Rank 0 has chosen the template, if there are chats.
    made.chat_template = json.loads(world.share_text(json.dumps(made.chat_template)))
    with activity("data", "packing" if config.data.packing else "reading the tokens"):
        # Every rank reads and hashes whole files, so only if their weights differ.
        weighted = any(file.weight != 1 for file in config.data.files)
        result = pipeline.examples(folder, sources.read(config) if weighted else None, config)
    for line in result.report.notes():
        world.log(line)
    return made, folder, result


def first_encodes(world: World, encode: Callable[[], Path]) -> Path:
    """Return what ``encode`` returns in rank 0. All ranks call this.

    The others wait without a collective, so that no timeout ends a run with slow data.
    """
    place = pipeline.cache_folder()
    status_file = Path(world.share_text(str(place / f"prepared-{secrets.token_hex(8)}")))
    first = int(world.share_text(str(os.getpid())))
    if world.is_first:
        place.mkdir(parents=True, exist_ok=True)
        status = handover.Status(error="rank 0 failed while it prepared the data")
        try:
            folder = encode()
            status = handover.Status(str(folder))
        except FtmonError as error:
            status = handover.Status(error=str(error))
            raise
        finally:
            handover.leave(status_file, status)
    else:
        status = handover.wait(status_file, first)
    world.barrier()
    if world.is_first:
        status_file.unlink(missing_ok=True)
    if status.error:
        raise ConfigError(status.error)
    return Path(status.folder)


def _encode(config: Config, trained: Path | None, keep: Path, say: Any) -> tuple[Any, Path]:
    records = sources.read(config)
    forms = pipeline.record_formats(records, config)
    with activity("data", "the tokenizer"):
        made = pipeline.load_tokenizer(config, records, forms, trained)
    encoder = Encoder(made, config, forms)
    if not (config.tokenizer.name or config.model.name):
        made.save_pretrained(str(keep))
    with activity("data", "tokenizing", total=len(records)) as progress:
        return made, pipeline.encode(records, encoder, made, config, say, progress.report)
