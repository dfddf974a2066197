"""transformers' configuration of the model, and its checks before the model is made: its maximum sequence length.

It imports neither torch nor transformers until a function needs them.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ....protocol.errors import ConfigError
from ..config.schema import Config, Model
from .bare import bare_config, declares, first_line

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


def rope_by_length(shape: Any) -> tuple[str, int] | None:
    """Return the type of rotary embeddings that depend on a batch's largest position, and from how many tokens on.

    ``modeling_rope_utils.py``, ``dynamic_rope_update``: one set of frequencies for a whole batch.
    """
    text = shape.get_text_config() if hasattr(shape, "get_text_config") else shape
    waiting: list[Any] = [getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            kind = next((str(one[name]) for name in ("rope_type", "type") if isinstance(one.get(name), str)), "")
            if "dynamic" in kind or kind == "longrope":
                return kind, int(one.get("original_max_position_embeddings") or getattr(text, _NAME, 0))
            waiting += one.values()
    return None


def has_table(shape: Any) -> bool:
    """Return whether a model reads positions from a table, which limits them; rotary models do not.

    The model is made on the meta device, and its tables are identified by name and size.
    """
    found, model = positions(shape), _without_values(shape)
    if found is None or model is None:
        return False
    return any(
        _TABLE.search(f"{name}.{own}") and tensor.ndim == 2 and 0 <= len(tensor) - found.most <= _OFFSET
        for name, module in model.named_modules()
        if not hasattr(module, "make_weights")  # XGLM's sinusoids, which grow
        for own, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    )


def is_small(config: Config, most: int) -> bool:
    """Return whether a model has at most about ``most`` parameters; False if its configuration does not say.

    By its sizes alone: making it on the meta device would import torch, 3 to 15 s, before the ranks do.
    """
    fields = config.model.config or _fields_of(config.model.name)
    text = fields.get("text_config")
    fields = text if isinstance(text, dict) else fields

    def size(*names: str) -> int:
        found = next((fields[name] for name in names if fields.get(name)), 0)
        return found if isinstance(found, int) else 0

    hidden, layers = size("hidden_size", "n_embd", "d_model"), size("num_hidden_layers", "n_layer", "num_layers")
    inner = size("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim", "d_ff") or 4 * hidden
    experts = size("num_local_experts", "num_experts", "n_routed_experts") or 1
    of_layer = hidden * (4 * hidden + 3 * inner * experts)  # attention, and an MLP with gates
    embedding = hidden * (size("vocab_size") or config.tokenizer.vocab_size)
    return bool(hidden and layers) and layers * of_layer + embedding <= most


def _fields_of(name: str) -> dict[str, Any]:
    """Return the configuration of a model on the hub or in a folder; empty if it cannot be read."""
    from huggingface_hub import hf_hub_download

    try:
        path = Path(name).expanduser() / "config.json"
        text = (path if path.is_file() else Path(hf_hub_download(name, "config.json"))).read_text("utf-8")
        found = msgspec.json.decode(text)
    except (OSError, ValueError):  # the hub's errors are among these; loading the model reports them
        return {}
    return found if isinstance(found, dict) else {}


def _without_values(shape: Any) -> Any:
    """Return a model on the meta device, or None: a model type may raise anything, which loading the model reports."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(shape)
    except Exception:
        return None


def named_config(model: Model) -> Any:
    """Return the configuration of a model on the hub or in a folder, with its overrides; else a ``ConfigError``."""
    from transformers import AutoConfig

    try:
        made = AutoConfig.from_pretrained(model.name)
    except (OSError, ValueError, ImportError, RecursionError) as error:
        raise ConfigError(f"model.name: {model.name} cannot be loaded: {first_line(error)}") from None
    return _overridden(made, model.overrides, "model.overrides") if model.overrides else made


_ROPE = "rope_parameters"
_KEPT_BY_ROPE = ("rope_theta", "partial_rotary_factor")
"""What another type of rotary embeddings keeps of the model's own."""


def _overridden(own: Any, values: Mapping[str, Any], path: str) -> Any:
    """Return a configuration with other values; an unknown name or a wrong value is a ``ConfigError``."""
    merged: dict[str, Any] = own.to_dict()
    for key, value in values.items():
        name = _ROPE if key == "rope_scaling" else getattr(own, "attribute_map", {}).get(key, key)
        if key in _KEPT_BY_ROPE and not declares(own, key) and isinstance(merged.get(_ROPE), Mapping):
            name, value = _ROPE, {key: value}  # where transformers 5 has it
        if not declares(own, name) or name == "model_type":
            raise ConfigError(f"{path}.{key}: {own.model_type} has no such setting")
        inner = vars(own).get(name)  # reading the attribute raises where its value differs between layers
        if hasattr(inner, "to_dict") and isinstance(value, Mapping):
            merged[name] = _overridden(inner, value, f"{path}.{key}").to_dict()
        elif name == _ROPE and isinstance(value, Mapping):
            merged[name] = _rotary(merged.get(name) or {}, value, f"{path}.{key}")
        elif isinstance(inner, Mapping) and isinstance(value, Mapping):
            merged[name] = {**inner, **value}
        else:
            merged[name] = value
    try:
        return type(own).from_dict(merged)
    except Exception as error:  # each model type checks its own values, with errors of its own
        raise ConfigError(f"{path}: {first_line(error)}") from None


def _rotary(own: Mapping[str, Any], value: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return settings of rotary embeddings with other values, possibly by kind of layer (Gemma 3)."""
    if own and all(isinstance(one, Mapping) for one in own.values()):
        if not all(isinstance(one, Mapping) for one in value.values()):
            value = {"full_attention": value}  # as transformers reads older configurations of such models
        if other := next((kind for kind in value if kind not in own), ""):
            raise ConfigError(f"{path}: {other} is no kind of layer; use {', '.join(own)}")
        return {**own, **{kind: _rotary(own[kind], one, path) for kind, one in value.items()}}
    retyped = value.get("rope_type", own.get("rope_type")) != own.get("rope_type")
    return {key: one for key, one in own.items() if not retyped or key in _KEPT_BY_ROPE} | dict(value)


def _check_sizes(model: Model, shape: Any) -> None:
    """Refuse overrides that change names or shapes of the weights: those of ``model.name`` would not fit."""
    import torch
    from transformers import AutoModelForCausalLM

    def sizes(one: Any) -> dict[str, list[int]]:
        with torch.device("meta"):
            made: Any = AutoModelForCausalLM.from_config(one)
        return {name: list(tensor.shape) for name, tensor in made.named_parameters()}

    try:
        before, after = sizes(named_config(msgspec.structs.replace(model, overrides={}))), sizes(shape)
    except Exception as error:  # as above
        raise ConfigError(f"model.overrides: {first_line(error)}") from None
    for name in [*before, *after]:
        if before.get(name) != after.get(name):
            raise ConfigError(
                f"model.overrides: {name} is {before.get(name, 'missing')} in {model.name} and would be "
                f"{after.get(name, 'left out')}; only values that keep the weights' shapes can be replaced"
            )


_DEQUANTIZED = ("mxfp4", "fp8")
"""Kinds of quantized weights that transformers dequantizes where the device has no kernels for them."""


def quantized(settings: Any) -> tuple[str, bool]:
    """Return how a model's weights are quantized, by transformers' name (empty: not), and whether in QLoRA's 4 bits."""
    own = getattr(settings, "quantization_config", None) or {}
    values: Mapping[str, Any] = own if isinstance(own, Mapping) else own.to_dict()
    method = values.get("quant_method", "")
    return str(getattr(method, "value", method)), bool(values.get("load_in_4bit"))


def refuse_quantized(config: Config, settings: Any) -> None:
    """Refuse a model with quantized weights, but in 4 bits under adapters where ``model.quantization`` says so."""
    method, in_4_bits = quantized(settings)
    if not method or (in_4_bits and config.lora.rank and config.model.quantization == "nf4"):
        return
    adapters = ", or train adapters on them with lora.rank=16 and model.quantization=nf4" if in_4_bits else ""
    raise ConfigError(
        f"model.name: {config.model.name} has quantized weights ({method}), which are not trained; give the model that "
        f"they were made of{adapters}"
    )


def check(config: Config) -> tuple[Any, str]:
    """Refuse a model that cannot be made or trained, or that has too few positions for the training's sequences.

    Return the model's configuration, and a note if sequences exceed its positions, or change its rotary embeddings.
    """
    shape = named_config(config.model) if config.model.name else bare_config(config, config.tokenizer.vocab_size)
    if config.model.name and quantized(shape)[0] not in _DEQUANTIZED:
        refuse_quantized(config, shape)
    if config.model.overrides:
        _check_sizes(config.model, shape)
    # Of several lengths in one process, those within the model's positions are measured.
    note = beyond(shape, min(config.debug.lengths, default=config.training.sequence_length))
    found = positions(shape)
    if note and found is not None and has_table(shape):
        raising = "" if config.model.name else f", or raise model.config.{found.setting}"
        raise ConfigError(
            f"training.sequence_length: {note}, and it has no positions beyond them; use "
            f"training.sequence_length={found.most} or less{raising}"
        )
    scaled = rope_by_length(shape)
    if not note and scaled and config.training.sequence_length > scaled[1]:
        note = (
            f"rotary embeddings of type {scaled[0]} have one set of frequencies for a micro-batch: a document of up to "
            f"{scaled[1]:,} tokens gets another beside a longer one than alone (training.micro_batch=1 and "
            f"data.packing=false keep them apart)"
        )
    return shape, note
