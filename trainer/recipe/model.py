"""The model: weights from the hub or a folder, or random ones from a bare configuration."""

from difflib import get_close_matches
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from ...protocol.errors import ConfigError
from .config import Config
from .ranks import World

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_VOCABULARY_MULTIPLE = 64
"""A trained tokenizer's vocabulary is rounded up to this: matrix products like it."""


def make(config: Config, settings: dict[str, Any], tokenizer: Any, world: World) -> Any:
    """Make the model, partitioned from the start under ZeRO-3.

    Args:
        config: the settled configuration.
        settings: DeepSpeed's configuration.
        tokenizer: gives the vocabulary's size where the configuration leaves it out.
        world: the ranks.

    Raises:
        ConfigError: there is no such model, or its configuration does not hold together.
    """
    # transformers looks at this object, while it lives, to partition parameters as they are made.
    partitioning = HfDeepSpeedConfig(settings) if config.zero.stage == 3 else None
    torch.manual_seed(config.training.seed)
    model = _from_weights(config) if config.model.name else _from_config(config, tokenizer, world)
    del partitioning
    model.config.use_cache = False
    if len(tokenizer) > model.config.vocab_size:
        raise ConfigError(
            f"model: its vocabulary has {model.config.vocab_size} tokens, fewer than the tokenizer's {len(tokenizer)}"
        )
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.lora.rank:
        model = add_lora(model, config)
        if config.model.gradient_checkpointing:
            model.enable_input_require_grads()
    return model


def add_lora(model: Any, config: Config) -> Any:
    """Put adapters on a model and freeze the rest.

    Raises:
        ConfigError: ``lora.targets`` names no layer of the model.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    lora = config.lora
    adapters = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # fractions work too
        lora_dropout=lora.dropout,
        target_modules=lora.targets or "all-linear",
    )
    try:
        return get_peft_model(model, adapters)
    except ValueError as error:
        raise ConfigError(f"lora.targets: {str(error).splitlines()[0]}") from None


def bare_config(config: Config, vocabulary: int) -> Any:
    """Make the transformers configuration of a model with random weights.

    Raises:
        ConfigError: the model type or one of its sizes is wrong.
    """
    values = dict(config.model.config)
    kind = str(values.pop("model_type"))
    rounded = -(-vocabulary // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    values.setdefault("vocab_size", rounded)
    values.setdefault("max_position_embeddings", max(config.training.sequence_length, 512))
    try:
        made: Any = AutoConfig.for_model(kind, **values)
    except ValueError as error:
        # transformers lists all of its hundreds of model types; the first sentence says what is wrong.
        what = str(error).splitlines()[0].partition(". Should contain")[0]
        near = get_close_matches(kind, list(CONFIG_MAPPING.keys()), 1)
        mend = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"model.config.model_type: {what}{mend}") from None
    except Exception as error:  # each model type checks its own values, with errors of its own
        raise ConfigError(f"model.config: {_first_line(error)}") from None
    unknown = [key for key in values if not hasattr(AutoConfig.for_model(kind), key)]
    if unknown:
        raise ConfigError(f"model.config.{unknown[0]}: {kind} has no such setting")
    _check_heads(made, values)
    return made


def _check_heads(made: Any, values: dict[str, Any]) -> None:
    """Refuse heads that do not divide the width: the model would be made, and fail at its first step."""
    width, heads = getattr(made, "hidden_size", None), getattr(made, "num_attention_heads", None)
    if not isinstance(width, int) or not isinstance(heads, int) or heads < 1:
        return
    if "head_dim" not in values and width % heads:
        raise ConfigError(f"model.config.hidden_size: {width} is not a multiple of num_attention_heads, {heads}")
    groups = getattr(made, "num_key_value_heads", None)
    if isinstance(groups, int) and groups > 0 and heads % groups:
        raise ConfigError(
            f"model.config.num_attention_heads: {heads} is not a multiple of num_key_value_heads, {groups}"
        )


def _from_config(config: Config, tokenizer: Any, world: World) -> Any:
    bare = bare_config(config, len(tokenizer))
    bare.pad_token_id = tokenizer.pad_token_id
    bare.eos_token_id = tokenizer.eos_token_id
    bare.bos_token_id = tokenizer.bos_token_id
    try:
        # Random numbers are drawn where the weights will be: seconds on a GPU, minutes on a CPU for large models.
        with world.device if config.zero.stage < 3 else torch.device("cpu"):
            return AutoModelForCausalLM.from_config(
                bare, dtype=_DTYPES[config.training.precision], **_attention(config)
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model type stumbles over in its sizes and names
        raise ConfigError(f"model.config: {_first_line(error)}") from None


def _from_weights(config: Config) -> Any:
    name = config.model.name
    try:
        return AutoModelForCausalLM.from_pretrained(
            name, dtype=_DTYPES[config.training.precision], **_attention(config)
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"model.name: {name} cannot be loaded: {str(error).strip().splitlines()[0]}") from None


def _first_line(error: Exception) -> str:
    text = str(error).strip() if not isinstance(error, KeyError) else f"unknown value {error}"
    return (text or repr(error)).splitlines()[0]


def _attention(config: Config) -> dict[str, str]:
    return {} if config.model.attention == "auto" else {"attn_implementation": config.model.attention}
