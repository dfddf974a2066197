"""The longest sequence that a model is made for, and whether longer ones are possible. Does not import torch."""

import re
from typing import Any, NamedTuple

_NAME = "max_position_embeddings"
_TABLE = re.compile("wpe|position|pos_e")
"""In the names of tables of positions: wpe, embed_positions, position_embeddings, positions_embed, pos_encoding ..."""
_OFFSET = 2
"""Rows that some tables (BART's, OPT's) have before the first position."""


class Positions(NamedTuple):
    """Tokens of the longest sequence that a model is made for."""

    most: int
    setting: str
    """What the model's configuration calls it, such as n_positions."""


def positions(shape: Any) -> Positions | None:
    """Return the positions in transformers' configuration of a model; None where it has no such setting."""
    text = shape.get_text_config() if hasattr(shape, "get_text_config") else shape
    count = getattr(text, _NAME, None)
    if not isinstance(count, int) or count < 1:
        return None
    return Positions(count, getattr(text, "attribute_map", {}).get(_NAME, _NAME))


def beyond(shape: Any, length: int) -> str:
    """Return that ``length`` tokens are more than a model is made for; empty: they are not, or it is not known."""
    found = positions(shape)
    if found is None or length <= found.most:
        return ""
    return f"{length:,} tokens are more than the model's {found.setting}, {found.most:,}"


def room(shape: Any, prompt: int, longest: int, trained: int = 0) -> int:
    """Return how many tokens an answer may have, at most ``longest``; less than 1 where the prompt leaves no room.

    Args:
        shape: transformers' configuration of the model.
        prompt: tokens before the answer.
        longest: tokens of an answer, if there is room.
        trained: tokens of the sequences that the model is trained on, which may be more than it was made for.
    """
    found = positions(shape)
    return longest if found is None else min(longest, max(found.most, trained) - prompt)


def has_table(shape: Any) -> bool:
    """Return whether a model reads each position from a table, and so has none beyond it; rotary models do not.

    The model is made without memory for its weights, and its tables are known by name and size.
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
