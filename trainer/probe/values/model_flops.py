"""FLOPs of a Hugging Face model, from its parameters and configuration (``protocol.host.machine``)."""

import re
from collections.abc import Iterator
from typing import Any

import torch

from ....protocol.host.machine import ModelFlops
from .. import guard
from ..rank.model import full_size, own_class, own_model, parameter_sizes

_EXPERTS = re.compile(r"(^|\.)experts\.")
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_FULL = "full_attention"
_WINDOWED = ("sliding_attention", "chunked_attention")


@guard.logged("the FLOPs of the model are not known")  # a model's class and configuration may be anything
def model_flops(module: Any, tensor_parallel: int = 1) -> ModelFlops | None:
    """Return a causal language model's FLOPs; None for other kinds of models and for incomplete configurations."""
    model = own_model(module)
    config: Any = getattr(model, "config", None)
    if config is None or not own_class(model).__name__.endswith(_CAUSAL) or hasattr(config, "vision_config"):
        return None
    active = _active_experts(config)
    token = 0.0
    trained_below = False
    for size, trainable, is_expert in _matrices(model, config, tensor_parallel):
        if is_expert and active is None:
            return None
        weight = 6 if trainable else 4 if trained_below else 2
        token += size * weight * (active if is_expert and active is not None else 1.0)
        trained_below = trained_below or trainable
    attention = _attention(config)
    return None if attention is None or token <= 0 else ModelFlops(token, *attention)


def _matrices(model: Any, config: Any, tensor_parallel: int) -> Iterator[tuple[int, bool, bool]]:
    """Return each parameter's size, whether it is trained, and whether it is an expert's; without embeddings."""
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    multiplied = id(getattr(output, "weight", None))
    embeddings = {
        id(each.weight)
        for each in model.modules()
        if isinstance(each, torch.nn.Embedding) and id(each.weight) != multiplied
    }
    if any(type(each).__name__ == "FullyShardedDataParallel" for each in model.modules()) or not any(
        id(parameter) in embeddings or id(parameter) == multiplied for parameter in model.parameters()
    ):
        # FSDP1 keeps flat shards: the size of the embedding is only in the configuration.
        skipped = 0 if getattr(config, "tie_word_embeddings", False) else config.vocab_size * config.hidden_size
        for size, trainable in parameter_sizes(model, tensor_parallel):
            left = max(0, size - skipped)
            skipped -= size - left
            yield left, trainable, False
        return
    for name, parameter in model.named_parameters():
        if id(parameter) not in embeddings:
            yield _size(parameter, tensor_parallel), bool(parameter.requires_grad), bool(_EXPERTS.search(name))


def _size(parameter: Any, tensor_parallel: int) -> int:
    quantised = getattr(getattr(parameter, "quant_state", None), "shape", None)
    if quantised is not None:
        return int(torch.Size(quantised).numel())
    return full_size(parameter, tensor_parallel)


def _active_experts(config: Any) -> float | None:
    """Return the share of the experts that a token uses; None without experts, or if unknown."""
    used = getattr(config, "num_experts_per_tok", None)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        total = getattr(config, name, None)
        if isinstance(total, int) and isinstance(used, int) and total > 0:
            return min(1.0, used / total)
    return None


def _attention(config: Any) -> tuple[float, float, int] | None:
    """Return FLOPs per token pair in full and in windowed layers, and the window; None if sizes are missing."""
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        return None
    # Settings that differ between layers (Gemma 4's head_dim) cannot be read from the whole configuration.
    each = list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config] * layers
    kinds: Any = getattr(config, "layer_types", None)
    full = short = 0.0
    longest = 0
    for number, layer in enumerate(each):
        pair = _pair(layer)
        if pair is None:
            return None
        window = getattr(layer, "sliding_window", None) or getattr(layer, "attention_chunk_size", None) or 0
        if isinstance(kinds, list | tuple):
            kind = kinds[number] if number < len(kinds) else ""
        else:
            kind = _WINDOWED[0] if window and getattr(layer, "use_sliding_window", True) else _FULL
        if kind in _WINDOWED and window:
            short, longest = short + pair, max(longest, int(window))
        elif kind in (_FULL, *_WINDOWED):
            full += pair
    return full, short, longest


def _pair(config: Any) -> float | None:
    """Return a layer's FLOPs per token pair; None if sizes are missing."""
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1:
        return None
    own = getattr(config, "head_dim", None)
    head = own if isinstance(own, int) and own > 0 else hidden // heads
    query = (getattr(config, "qk_nope_head_dim", 0) or 0) + (getattr(config, "qk_rope_head_dim", 0) or 0)
    value = getattr(config, "v_head_dim", 0) or 0
    return 6.0 * heads * ((query or head) + (value if query and value else head))
