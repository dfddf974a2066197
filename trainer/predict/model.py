"""The model of a dry run, from its configuration alone."""

import json
import re
from pathlib import Path
from typing import Any

from ...protocol.errors import ConfigError

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
"""Reasons by words of transformers' errors (``transformers/utils/hub.py``, ``cached_files``)."""
_CUSTOM_CODE = "contains custom code"
_UNKNOWN = "Unrecognized model identifier"
"""Beginnings of what transformers says of a model; a list of all that it knows follows."""
_LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def read_config(where: str) -> Any:
    """Return transformers' configuration of a model: a folder, a JSON file, or a name on the Hugging Face hub.

    Of a name only ``config.json`` is downloaded, unless it is in the local cache.

    Raises:
        ConfigError: there is none, the hub cannot be reached, or transformers does not know the model.
    """
    from transformers import AutoConfig

    path = Path(where).expanduser()
    try:
        if path.is_file():
            config: Any = _from_file(path)
        elif path.is_dir():
            if not (path / _CONFIG).is_file():
                raise ConfigError(f"{where}: has no {_CONFIG}")
            config = AutoConfig.from_pretrained(str(path))
        elif not _HUB_NAME.fullmatch(where):
            raise ConfigError(f"{where}: no such folder or file")
        else:
            config = AutoConfig.from_pretrained(where)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or _why_not_found(error)}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where}: {_first_line(error)}") from None
    config.use_cache = False
    return config


def _from_file(path: Path) -> Any:
    from transformers import AutoConfig

    fields: Any = json.loads(path.read_text())
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: must be a JSON object, not {type(fields).__name__}")
    kind = fields.pop("model_type", None)
    if not isinstance(kind, str):
        raise ConfigError(f"{path}: no model_type; write the type of the model, such as llama")
    for name in ("architectures", "transformers_version"):
        fields.pop(name, None)
    return AutoConfig.for_model(kind, **fields)


def _why_not_found(error: BaseException) -> str:
    """Return why a name of the hub has no configuration: the text of transformers' error depends on its cause."""
    text = str(error)
    for mark, reason in _NOT_FOUND.items():
        if mark in text:
            return reason
    return _first_line(error)


def make(config: Any, dtype: Any, checkpointing: bool, lora_rank: int | None, attention: str) -> Any:
    """Return the model, in training mode; under fake tensors it takes no memory.

    Raises:
        ConfigError: transformers has no causal language model of this type, or LoRA finds no layers.
    """
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    except ValueError as error:
        raise ConfigError(f"{config.model_type}: {_first_line(error)}") from None
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
