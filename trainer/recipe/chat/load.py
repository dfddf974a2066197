"""Loads a model for a chat, from Hugging Face's format or from the shards of a checkpoint."""

import contextlib
import io
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from ....protocol.errors import UsageError
from ..checkpoint import manifest as manifests
from ..checkpoint.manifest import Base, Manifest
from ..checkpoint.save import DESCRIPTION
from ..model.load import DTYPES
from .source import Source


class Loaded(NamedTuple):
    """A loaded model and its tokenizer."""

    model: Any
    tokenizer: Any
    text: str
    """Description of the model and its device, for display."""


def load(source: Source, device: str) -> Loaded:
    """Load a model and its tokenizer.

    ``device`` auto is a GPU if there is one, but the CPU for a checkpoint, whose run may be training on the GPUs.

    Raises:
        UsageError: it cannot be loaded.
    """
    disable_progress_bar()
    where = _device(device, source.is_checkpoint)
    tokens = str(Path(source.path) / DESCRIPTION) if source.is_checkpoint else source.path
    try:
        model = _from_checkpoint(Path(source.path), where) if source.is_checkpoint else _from_model(source.path, where)
        tokenizer: Any = AutoTokenizer.from_pretrained(tokens)
    except UsageError:
        raise
    except torch.OutOfMemoryError:
        raise UsageError(f"{source.path}: does not fit on the GPU; use --device cpu") from None
    except Exception as error:  # the hub's, the files' and the model types' own errors
        first = (str(error).strip() or repr(error)).splitlines()[0]
        raise UsageError(f"{source.path}: cannot be loaded: {first}") from None
    model = model.to(where).eval()
    dtype = str(model.dtype).removeprefix("torch.")
    return Loaded(model, tokenizer, f"{source.text} ({dtype} on {'the CPU' if where.type == 'cpu' else where})")


def _device(device: str, is_checkpoint: bool) -> torch.device:
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: no GPU can be used here; see 'ftmon doctor'")
    if device == "cpu" or (is_checkpoint and device == "auto"):
        return torch.device("cpu")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _from_model(path: str, device: torch.device) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype="auto", device_map={"": "cpu"})
    return _fitting(model, device)


def _from_checkpoint(path: Path, device: torch.device) -> Any:
    content = manifests.read(path)
    if content is None:
        raise UsageError(f"{path}: is not a complete checkpoint")
    weights = _weights(path, content)
    dtype = DTYPES[content.precision]
    if content.base is not None:
        return _fitting(_adapted(path, content.base, weights, dtype), device)
    config = AutoConfig.from_pretrained(path / DESCRIPTION)
    with torch.device("meta"):
        kind: Any = type(AutoModelForCausalLM.from_config(config))
    # The auto class requires a path.
    model, report = kind.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=dtype,
        output_loading_info=True,
    )
    wrong = [*report["missing_keys"], *report["unexpected_keys"]]
    if wrong:
        raise UsageError(f"{path}: does not hold the whole model: {sorted(wrong)[0]}")
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(path / DESCRIPTION)
    return _fitting(model, device)


def _adapted(path: Path, base: Base, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """Return the base model with a checkpoint's adapters."""
    from peft import LoraConfig, get_peft_model

    if not base.name:
        raise UsageError(
            f"{path}: holds adapters of a model with random weights, which no checkpoint keeps; its final model can be "
            "talked to"
        )
    plain = AutoModelForCausalLM.from_pretrained(base.name, dtype=dtype, device_map={"": "cpu"})
    model: Any = get_peft_model(plain, LoraConfig.from_pretrained(str(path / DESCRIPTION)))  # type: ignore[arg-type]
    missing, unexpected = model.load_state_dict(weights, strict=False)
    wrong = [*unexpected, *(name for name in missing if ".lora_" in name)]
    if wrong:
        raise UsageError(f"{path}: its adapters do not fit {base.name}: {wrong[0]}")
    return model.merge_and_unload()


def _weights(path: Path, content: Manifest) -> dict[str, torch.Tensor]:
    """Return the whole weights of a checkpoint by name, on the CPU."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    if content.zero_stage == 0:
        state: Any = torch.load(path / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=False)
        return state["module"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        consolidated: Any = get_fp32_state_dict_from_zero_checkpoint(
            str(path.parent), tag=path.name, exclude_frozen_parameters=content.base is not None
        )
    return consolidated


def _fitting(model: Any, device: torch.device) -> Any:
    """Return the model in fp32 on a CPU with memory for it, where half precision is slow."""
    if device.type == "cpu" and model.dtype != torch.float32:
        needed = 4 * sum(parameter.numel() for parameter in model.parameters())
        if needed < psutil.virtual_memory().available // 2:
            return model.float()
    return model
