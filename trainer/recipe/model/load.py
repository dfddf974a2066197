"""Loads the model: weights from the hub or a folder, or random ones from a bare configuration."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from ....protocol.errors import ConfigError
from ..config.schema import Config
from ..distributed import World
from . import activations
from .bare import bare_config, first_line
from .loss import use_summed_loss
from .shape import named_config


def quiet_bitsandbytes() -> None:
    """Suppress bitsandbytes' log line that it has no kernel from the hub for 4-bit weights on the CPU.

    It is logged at import, and peft imports it for all kinds of adapters.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def add_lora(model: Any, config: Config) -> Any:
    """Put adapters on a model and freeze the rest; ``lora.targets`` that name no layer of it are a ``ConfigError``."""
    from peft import LoraConfig, TaskType, get_peft_model

    lora = config.lora
    adapters = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # fractions work too
        lora_dropout=lora.dropout,
        use_dora=lora.kind == "dora",
        target_modules=lora.targets or "all-linear",
    )
    try:
        return get_peft_model(model, adapters)
    except ValueError as error:
        raise ConfigError(f"lora.targets: {str(error).splitlines()[0]}") from None


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Quantize = Callable[[Any, Any], None]
"""Converts a model's linear layers to 4 bits, by a ``BitsAndBytesConfig``."""


def make(
    config: Config, settings: dict[str, Any], tokenizer: Any, world: World, without_weights: Quantize | None = None
) -> Any:
    """Make the model, partitioned from the start under ZeRO-3; one that cannot be made is a ``ConfigError``.

    ``without_weights`` makes a dry run's model: of the shape of ``model.name``, without weights; it converts them to 4
    bits.
    """
    # transformers finds this object while it lives, and partitions parameters as they are made.
    partitioning = HfDeepSpeedConfig(settings) if config.zero.stage == 3 else None
    torch.manual_seed(config.training.seed)
    if config.model.name:
        model = _from_shape(config, world, without_weights) if without_weights else _from_weights(config, world)
    else:
        model = _from_config(config, tokenizer, world)
    del partitioning
    if world.on_gpu and config.model.quantization != "none":
        # Several weights at a time were whole on the GPU before their conversion to 4 bits.
        torch.cuda.empty_cache()
    vocabulary = model.config.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        raise ConfigError(
            f"model: its vocabulary has {vocabulary} tokens, fewer than the tokenizer's {len(tokenizer)}; "
            "use the model's own tokenizer (tokenizer.name empty), or a matching one"
        )
    use_summed_loss(model)
    inner = model
    if config.lora.rank:
        model = add_lora(model, config)
    activations.set_up(inner, config)
    return model


def count_parameters(model: Any) -> int:
    """Return the number of a model's parameters over all ranks.

    ``ds_numel`` is a parameter's whole size under ZeRO-3; bitsandbytes packs two 4-bit weights into a byte.
    """
    return sum(
        int(getattr(parameter, "ds_numel", parameter.numel())) * (2 if hasattr(parameter, "quant_state") else 1)
        for parameter in model.parameters()
    )


def _from_config(config: Config, tokenizer: Any, world: World) -> Any:
    bare = bare_config(config, len(tokenizer))
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        setattr(bare, name, getattr(tokenizer, name))
    try:
        # Random numbers are drawn on the weights' device: seconds on a GPU, minutes on a CPU for large models.
        with world.device if config.zero.stage < 3 else torch.device("cpu"):
            return AutoModelForCausalLM.from_config(bare, dtype=DTYPES[config.training.precision], **_attention(config))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # model types raise various errors about their sizes and names
        raise ConfigError(f"model.config: {first_line(error)}") from None


def _from_weights(config: Config, world: World) -> Any:
    name = config.model.name
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=DTYPES[config.training.precision], **_attention(config), **_quantization(config, world)
        )
        _keep_quantized(model)
        return model
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"model.name: {name} cannot be loaded: {str(error).strip().splitlines()[0]}") from None


def _keep_quantized(model: Any) -> None:
    """Keep bitsandbytes from repacking 4-bit weights when an evaluation runs on a CPU that has AVX512-BF16.

    Scales are rounded to bf16 there, so the frozen base would change under the adapters (``nn/modules.py``,
    ``Linear4bit.forward``), and layers narrower than a block of 64 fail.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _from_shape(config: Config, world: World, quantize: Quantize) -> Any:
    name = config.model.name
    shape = named_config(name)
    try:
        if getattr(shape, "quantization_config", None) is not None:
            raise ConfigError(f"model.name: {name} has quantized weights, which a dry run cannot make")
        quantization = _quantization(config, world).get("quantization_config")
        # Weights in 4 bits are moved to the GPU one by one; the host never holds all of them.
        with torch.device("cpu" if quantization is None else "meta"):
            model = AutoModelForCausalLM.from_config(
                shape, dtype=DTYPES[config.training.precision], **_attention(config)
            )
        if quantization is not None:
            quantize(model, quantization)
        return model
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"model.name: {name} cannot be made: {first_line(error)}") from None


def _attention(config: Config) -> dict[str, str]:
    return {} if config.model.attention == "auto" else {"attn_implementation": config.model.attention}


def _quantization(config: Config, world: World) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` for linear layers in 4 bits (QLoRA, arXiv 2305.14314)."""
    if config.model.quantization == "none":
        return {}
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[config.training.precision],
    )
    # Weights are quantized on their final device.
    return {"quantization_config": settings, "device_map": {"": world.device}}
