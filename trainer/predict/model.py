"""Makes the model of a dry run from its configuration alone."""

import json
import re
from pathlib import Path
from typing import Any

from ...protocol.errors import ConfigError
from ..recipe.preflight.inputs import hub_refusal

_CONFIG = "config.json"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""``organisation/model`` or ``model``."""
_NOT_FOUND = {
    "is not a valid model identifier": "no such folder or file, and no such model on the Hugging Face hub",
    "is not a local folder": "no such folder or file, and no such model on the Hugging Face hub",
    "gated repo": "the model is gated: accept its licence on the Hugging Face hub, then 'hf auth login'",
    "connect to": "not in the local cache, and the Hugging Face hub cannot be reached; give a folder or a file",
    "connection error": "not in the local cache, and the Hugging Face hub cannot be reached; give a folder or a file",
    "does not appear to have a file": f"has no {_CONFIG} on the Hugging Face hub",
}
"""Reasons by texts in transformers' errors (``transformers/utils/hub.py``, ``cached_files``)."""
_CUSTOM_CODE = "contains custom code"
_UNKNOWN = "Unrecognized model identifier"
"""Beginning of transformers' errors about a model, before a list of all known ones."""
_LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def read_config(where: str) -> Any:
    """Return transformers' configuration of a model: a folder, a JSON file, or a name on the Hugging Face hub.

    For a name, only ``config.json`` is downloaded, unless it is in the local cache.

    Raises:
        ConfigError: it does not exist, the hub is unreachable, transformers refuses it, or its model is not supported.
    """
    path = Path(where).expanduser()
    is_folder = path.is_dir()
    file = path / _CONFIG if is_folder else path
    try:
        if is_folder and not file.is_file():
            raise ConfigError(f"{where}: has no {_CONFIG}")
        if file.is_file():
            where = str(file)
            fields = _read_fields(file)
            config: Any = _load(str(path)) if is_folder else _make_config(file, fields)
        elif not _HUB_NAME.fullmatch(where):
            raise ConfigError(f"{where}: no such folder or file")
        else:
            if refusal := hub_refusal(where):
                raise ConfigError(refusal)
            config = _load(where)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or _why_not_found(error)}") from None
    except Exception as error:  # transformers and huggingface_hub raise various classes for a wrong value
        raise ConfigError(f"{where}: {_first_line(error.__cause__ or error)}") from None
    _check_kind(config, where)
    config.use_cache = False
    config.name_or_path = where
    return config


def _load(where: str) -> Any:
    from transformers import AutoConfig  # after the check of the hub, which may set HF_HUB_OFFLINE

    return AutoConfig.from_pretrained(where)


def _check_kind(config: Any, where: str) -> None:
    """Refuse a model that is no causal language model, or whose weights are quantized."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"{where}: model type {config.model_type} is no causal language model: only those are predicted"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{where}: quantization_config: quantized weights cannot be predicted with --model; for QLoRA use "
            "CONFIG.yaml with model.quantization=nf4"
        )


def _read_fields(path: Path) -> dict[str, Any]:
    try:
        fields: Any = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: must be a JSON object, not {type(fields).__name__}")
    return fields


def _make_config(path: Path, fields: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    kind = fields.pop("model_type", None)
    if not isinstance(kind, str):
        raise ConfigError(f"{path}: no model_type; write the type of the model, such as llama")
    for name in ("architectures", "transformers_version"):
        fields.pop(name, None)
    return AutoConfig.for_model(kind, **fields)


def _why_not_found(error: BaseException) -> str:
    """Return the reason why a name on the hub has no configuration, by the text of transformers' error."""
    text = str(error)
    for mark, reason in _NOT_FOUND.items():
        if mark in text:
            return reason
    return _first_line(error)


def make(config: Any, dtype: Any, checkpointing: bool, lora_rank: int | None, attention: str) -> Any:
    """Return the model in training mode; under fake tensors it uses no memory.

    Raises:
        ConfigError: transformers refuses the configuration.
    """
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    except RuntimeError:  # includes fake tensors' errors, which DryRun explains
        raise
    except Exception as error:
        raise ConfigError(f"{config.name_or_path}: {_first_line(error.__cause__ or error)}") from None
    model.train()
    if lora_rank:
        from peft import LoraConfig, get_peft_model

        names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
        targets: Any = [name for name in _LORA_TARGETS if name in names] or "all-linear"
        model = get_peft_model(model, LoraConfig(r=lora_rank, target_modules=targets, task_type="CAUSAL_LM"))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if lora_rank:
            model.enable_input_require_grads()
    return model


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    if _CUSTOM_CODE in text:
        return "the model is custom code, which a dry run does not execute; only models of transformers are predicted"
    if text.startswith(_UNKNOWN):
        return text.partition(". Should contain")[0].replace(_UNKNOWN, "transformers knows no model type")
    return text.splitlines()[0] if text else type(error).__name__
