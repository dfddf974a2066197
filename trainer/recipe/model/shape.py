"""transformers' configuration of the model, and its checks before the model is made: its maximum sequence length.

It imports neither torch nor transformers until a function needs them.
"""

import re
from typing import Any, NamedTuple

from ....protocol.errors import ConfigError
from ..config.schema import Config
from .bare import bare_config, first_line

_NAME = "max_position_embeddings"
_TABLE = re.compile("wpe|position|pos_e")
"""Matches names of position tables: wpe, embed_positions, position_embeddings, positions_embed, pos_encoding ..."""
_OFFSET = 2
"""Rows before the first position in some tables (BART's, OPT's)."""


class Positions(NamedTuple):
    """Maximum sequence length of a model, in tokens, and its name in the model's configuration (n_positions ...)."""

    most: int
    setting: str


def positions(shape: Any) -> Positions | None:
    """Return the positions in transformers' configuration of a model; None without such a setting."""
    text = shape.get_text_config() if hasattr(shape, "get_text_config") else shape
    count = getattr(text, _NAME, None)
    if not isinstance(count, int) or count < 1:
        return None
    return Positions(count, getattr(text, "attribute_map", {}).get(_NAME, _NAME))


def beyond(shape: Any, length: int) -> str:
    """Return a sentence if ``length`` tokens exceed the model's positions; empty if not, or if unknown."""
    found = positions(shape)
    if found is None or length <= found.most:
        return ""
    return f"{length:,} tokens are more than the model's {found.setting}, {found.most:,}"


def room(shape: Any, prompt: int, longest: int, trained: int = 0) -> int:
    """Return the number of tokens an answer may have, at most ``longest``; less than 1 if the prompt leaves no room.

    ``trained``: tokens of the training's sequences, which may exceed the model's positions.
    """
    found = positions(shape)
    return longest if found is None else min(longest, max(found.most, trained) - prompt)


def has_table(shape: Any) -> bool:
    """Return whether a model reads positions from a table, which limits them; rotary models do not.

    The model is made on the meta device, and its tables are identified by name and size.
    """
    import torch
    from transformers import AutoModelForCausalLM

    found = positions(shape)
    if found is None:
        return False
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(shape)
    except Exception:  # a model type may raise anything; loading the model reports it
        return False
    return any(
        _TABLE.search(f"{name}.{own}") and tensor.ndim == 2 and 0 <= len(tensor) - found.most <= _OFFSET
        for name, module in model.named_modules()
        if not hasattr(module, "make_weights")  # XGLM's sinusoids, which grow
        for own, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    )


def named_config(name: str) -> Any:
    """Return the configuration of a model on the hub or in a folder; a failure is a ``ConfigError``."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError, ImportError, RecursionError) as error:
        raise ConfigError(f"model.name: {name} cannot be loaded: {first_line(error)}") from None


def check(config: Config) -> tuple[Any, str]:
    """Refuse a model that cannot be made, or that has too few positions for the training's sequences.

    Return the model's configuration, and a note if sequences exceed its positions (else empty).
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
