"""Makes transformers' configuration of a model with random weights."""

import inspect
import sys
from difflib import get_close_matches
from typing import Any

from ....protocol.errors import ConfigError
from ..config.schema import Config

_VOCABULARY_MULTIPLE = 64
"""A trained tokenizer's vocabulary is rounded up to a multiple of this, for faster matrix products."""
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
"""Sizes that must be at least 1, by transformers' common names; some types would make a model without layers."""


FAILURES = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""Errors of a model whose settings do not fit each other; not their subclasses, of memory, devices or communication."""


def bare_config(config: Config, vocabulary: int) -> Any:
    """Make the transformers configuration of a model with random weights; a wrong type or size is a ``ConfigError``."""
    from transformers import CONFIG_MAPPING, AutoConfig

    values = dict(config.model.config)
    kind = str(values.pop("model_type"))
    rounded = -(-vocabulary // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    try:
        default: Any = AutoConfig.for_model(kind)
    except ValueError as error:
        # transformers' message lists hundreds of model types; the first sentence has the error.
        what = str(error).splitlines()[0].partition(". Should contain")[0]
        near = get_close_matches(kind, list(CONFIG_MAPPING.keys()), 1)
        remedy = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"model.config.model_type: {what}{remedy}") from None
    # A model type may have its own name for a size (n_positions); a size given by that name is kept.
    own_names: dict[str, str] = default.attribute_map
    for name in _SIZES:
        for key in {name, own_names.get(name, name)}:
            if isinstance(size := values.get(key), int) and size < 1:
                raise ConfigError(f"model.config.{key}: must be at least 1, not {size}")
    positions = max(config.training.sequence_length, 512)
    for name, value in (("vocab_size", rounded), ("max_position_embeddings", positions)):
        if own_names.get(name) not in values and declares(default, name):
            values.setdefault(name, value)
    # The tokenizer's ids replace them; the type's own may exceed the vocabulary, which causes a warning.
    ids = {name: None for name in ("bos_token_id", "eos_token_id", "pad_token_id") if declares(default, name)}
    try:
        made: Any = AutoConfig.for_model(kind, **{**ids, **values})
    except Exception as error:  # each model type checks its own values, with errors of its own
        raise ConfigError(f"model.config: {first_line(error)}") from None
    # transformers keeps what it does not know as it is, and moves older names (rope_theta) to where they are read.
    unknown = [key for key in values if not declares(default, key) and declares(made, key) and not _is_read(key, made)]
    if unknown:
        raise ConfigError(f"model.config.{unknown[0]}: {kind} has no such setting")
    _check_heads(made, values)
    return made


def _is_read(key: str, made: Any) -> bool:
    """Return whether a model reads a setting that its configuration does not declare, as Qwen3-MoE's ``head_dim``."""
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM._model_mapping[type(made)]
    except KeyError:
        return False
    return f'config, "{key}"' in inspect.getsource(sys.modules[model.__module__])


def declares(shape: Any, name: str) -> bool:
    """Return whether a transformers configuration has a setting, possibly another one per layer."""
    try:
        return hasattr(shape, name)
    except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError
        return True


def layer_configs(shape: Any) -> list[Any]:
    """Return the configurations of the layers if they differ (Gemma 4's ``head_dim``), else the one of all."""
    return list(shape.per_layer_config) if getattr(shape, "is_heterogeneous", False) else [shape]


def _check_heads(made: Any, values: dict[str, Any]) -> None:
    """Refuse heads that do not divide the width: the model would fail at its first step."""
    for layer in layer_configs(made):
        width, heads = getattr(layer, "hidden_size", None), getattr(layer, "num_attention_heads", None)
        if not isinstance(width, int) or not isinstance(heads, int) or heads < 1:
            return
        if "head_dim" not in values and width % heads:
            raise ConfigError(f"model.config.hidden_size: {width} is not a multiple of num_attention_heads, {heads}")
        groups = getattr(layer, "num_key_value_heads", None)
        if isinstance(groups, int) and groups > 0 and heads % groups:
            raise ConfigError(
                f"model.config.num_attention_heads: {heads} is not a multiple of num_key_value_heads, {groups}"
            )


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or of its cause's, which transformers wraps."""
    error = error.__cause__ or error
    text = str(error).strip() if not isinstance(error, KeyError) else f"unknown value {error}"
    return (text or repr(error)).splitlines()[0]
