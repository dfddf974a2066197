"""transformers' configuration of the model, and its checks before the model is made."""

from typing import Any

from transformers import AutoConfig

from ....protocol.errors import ConfigError
from ..config.schema import Config
from .bare import bare_config, first_line
from .positions import beyond, has_table, positions


def named_config(name: str) -> Any:
    """Return the configuration of a model on the hub or in a folder.

    Raises:
        ConfigError: it cannot be loaded.
    """
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError, ImportError, RecursionError) as error:
        raise ConfigError(f"model.name: {name} cannot be loaded: {first_line(error)}") from None


def check(config: Config) -> tuple[Any, str]:
    """Refuse a model that cannot be made, or that has too few positions for the training's sequences.

    Returns:
        The model's configuration, and a note if sequences exceed its positions (else empty).

    Raises:
        ConfigError: it is refused.
    """
    shape = named_config(config.model.name) if config.model.name else bare_config(config, config.tokenizer.vocab_size)
    # Of several lengths in one process, those within the model's positions are measured.
    note = beyond(shape, min(config.debug.lengths, default=config.training.sequence_length))
    found = positions(shape)
    if note and found is not None and has_table(shape):
        raising = "" if config.model.name else f", or raise model.config.{found.setting}"
        raise ConfigError(
            f"training.sequence_length: {note}, and it has no positions beyond them; use "
            f"training.sequence_length={found.most} or less{raising}"
        )
    return shape, note
