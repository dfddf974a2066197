"""Gathers the weights of a training from every ZeRO stage, merges adapters, and compares them with files."""

import copy
from collections.abc import Generator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch

from ....protocol.errors import FtmonError
from ..config.schema import Config
from ..engine.distributed import World
from ..model.adapters import add_lora
from ..monitor import Progress

_PREFIX = "base_model.model."
_LAYER = ".base_layer"
"""Parts that peft adds to the names of a model and of its adapted layers."""


class ExportError(FtmonError):
    """The written model differs from the trained one."""


def gathered(engine: Any, model: Any, config: Config, world: World) -> dict[str, torch.Tensor] | None:
    """Return all weights and buffers by name, on the CPU of rank 0; None elsewhere. All ranks call this."""
    if config.zero.stage == 3:
        return engine._zero3_consolidated_16bit_state_dict()
    if not world.is_first:
        return None
    quantized = config.model.quantization != "none"
    own = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    copies: dict[int, torch.Tensor] = {}
    result: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if quantized and not is_adapter(name) and (name not in own or not config.lora.merge):
            continue  # bitsandbytes' auxiliary tensors; and the base, if adapters alone are saved
        if is_quantized(tensor):
            copies[id(tensor)] = dequantized(tensor).cpu()
        if id(tensor) not in copies:
            # Merging adapters changes weights in place: on the CPU those of the training itself, without a copy.
            copies[id(tensor)] = tensor.detach().to("cpu", copy=bool(config.lora.rank))
        result[name] = copies[id(tensor)]
    return result


def live(model: Any, config: Config) -> Generator[tuple[str, Any]]:
    """Yield every parameter of the training, whole, one by one. All ranks iterate over it together.

    It is independent of ``gathered``: a comparison with a file must not use the file's own source.
    """
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]) if config.zero.stage == 3 else nullcontext():
            yield name, dequantized(parameter) if is_quantized(parameter) else parameter.detach()


def is_quantized(tensor: Any) -> bool:
    """Return whether a parameter is held in 4 bits."""
    return type(tensor).__name__ == "Params4bit"


def dequantized(parameter: Any) -> torch.Tensor:
    """Return the dequantized weights of a parameter in 4 bits, as the forward uses them."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, parameter.quant_state)


def plain_name(name: str) -> str:
    """Return the name of a parameter of an adapted model in the model without adapters."""
    return name.removeprefix(_PREFIX).replace(_LAYER, "")


def is_adapter(name: str) -> bool:
    """Return whether a parameter is part of an adapter."""
    return ".lora_" in name or ".modules_to_save." in name


def base_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights under the adapters, by their names in the model without adapters."""
    return {plain_name(name): tensor for name, tensor in weights.items() if not is_adapter(name)}


def empty_model(model: Any) -> Any:
    """Return a model like this one without adapters and without allocated weights."""
    from transformers import AutoModelForCausalLM

    settings = copy.deepcopy(model.config)
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config  # dequantized weights are written
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(settings, dtype=model.dtype)
    made.generation_config = model.generation_config
    return made


def merged(model: Any, weights: dict[str, torch.Tensor], config: Config) -> Any:
    """Return the model with its adapters merged, on the CPU: the same for every ZeRO stage.

    Raises:
        ExportError: weights are missing or unknown.
    """
    fresh = add_lora(empty_model(model.get_base_model()), config)
    missing, unexpected = fresh.load_state_dict(weights, strict=False, assign=True)
    if missing or unexpected:
        what = f"missing {', '.join(missing[:3])}" if missing else f"unknown {', '.join(unexpected[:3])}"
        raise ExportError(f"the adapters cannot be merged: {what}")
    return fresh.merge_and_unload()


def compare(model: Any, folder: Path, config: Config, world: World, progress: Progress | None = None) -> int:
    """Compare a written model with the training's weights, tensor by tensor. All ranks call this.

    Returns:
        The number of equal tensors.

    Raises:
        ExportError: one differs; in every rank.
    """
    problem, count = "", 0
    written = _Written(folder, bool(config.lora.rank) and not config.lora.merge) if world.is_first else None
    pending: dict[str, dict[str, torch.Tensor]] = {}
    merge = bool(config.lora.rank) and config.lora.merge
    scaling = _scalings(model) if merge else {}
    for done, (name, tensor) in enumerate(live(model, config)):
        if progress is not None:
            progress.report(done, "comparing tensors")
        if written is None or problem:
            continue
        layer = plain_name(name).partition(".lora_")[0].removesuffix(".weight")
        if merge and (is_adapter(name) or name.endswith(".base_layer.weight")):
            if layer not in scaling:
                continue  # an adapted layer that is no linear one
            key = name.partition(".lora_")[2].partition(".")[0] or "base"
            pending.setdefault(layer, {})[key] = tensor.cpu()
            if len(pending[layer]) < (4 if config.lora.kind == "dora" else 3):
                continue
            problem = written.differs_merged(f"{layer}.weight", pending.pop(layer), scaling[layer])
        else:
            problem = written.differs(name, tensor.cpu())
        count += not problem
    if not problem and written is not None:
        problem = written.left_over()
    problem = world.share_text(problem)
    if problem:
        raise ExportError(f"the written model differs from the trained one: {problem}; {folder} was not kept")
    return count


class _Written:
    """The tensors of a written model."""

    def __init__(self, folder: Path, adapters: bool) -> None:
        from safetensors.torch import load_file

        self._adapters = adapters
        self._tensors: dict[str, torch.Tensor] = {}
        if adapters:
            self._tensors = load_file(folder / "adapter_model.safetensors")
            base = folder / "base"
            self._base: dict[str, torch.Tensor] | None = _reload(base) if base.is_dir() else None
        else:
            self._tensors = _reload(folder)
        self._seen: set[str] = set()

    def differs(self, name: str, tensor: torch.Tensor) -> str:
        """Return the difference from the written tensor in words, or an empty text."""
        if self._adapters and not is_adapter(name):
            # The base was loaded by its name, unless it has none.
            return "" if self._base is None else _difference(name, tensor, self._base.get(plain_name(name)))
        key = name.replace(".default", "") if self._adapters else plain_name(name)
        if key.endswith(".lora_magnitude_vector.weight"):
            key = key.removesuffix(".weight")  # as peft writes it
        self._seen.add(key)
        return _difference(key, tensor, self._tensors.get(key))

    def differs_merged(self, name: str, parts: dict[str, torch.Tensor], scaling: float) -> str:
        """Compare the written tensor with base + scaling x B A, to the rounding of the data type."""
        found = self._tensors.get(name)
        self._seen.add(name)
        base = parts["base"]
        if found is None:
            return f"{name} is missing"
        delta = scaling * (parts["B"].float() @ parts["A"].float())
        wanted = base.float() + delta
        size = base.float().abs() + delta.abs()
        if "magnitude_vector" in parts:  # DoRA: the norm of each row is replaced by a trained magnitude
            factor = parts["magnitude_vector"].float().view(-1, 1) / wanted.norm(dim=1, keepdim=True)
            wanted, size = wanted * factor, 4 * size * factor
        # One rounding of the delta and one of the sum, each half a unit in the last place.
        room = torch.finfo(found.dtype).eps * (size + wanted.abs()) + 1e-6 * wanted.abs().max()
        if bool(((found.float() - wanted).abs() > room).any()):
            return f"{name} is not its base plus its adapter"
        if parts["B"].abs().max() > 0 and delta.abs().max() > room.max() and torch.equal(found, base):
            return f"{name} does not hold its adapter"
        return ""

    def left_over(self) -> str:
        """Return the name of a written tensor that the training does not have; empty if there is none."""
        if not self._adapters:
            return ""  # a tied weight has two names
        rest = sorted(set(self._tensors) - self._seen)
        return f"{rest[0]} was not trained" if rest else ""


def _difference(name: str, wanted: torch.Tensor, found: torch.Tensor | None) -> str:
    if found is None:
        return f"{name} is missing"
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{name} is {list(found.shape)} {found.dtype}, not {list(wanted.shape)} {wanted.dtype}"
    return "" if torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)) else name


def _reload(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a written model as ``from_pretrained`` reads them."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype="auto", device_map={"": "cpu"})
    return model.state_dict()


def _scalings(model: Any) -> dict[str, float]:
    """Return the factor of each layer's plain adapter; layers with other kinds of adapters are left out."""
    found: dict[str, float] = {}
    for name, module in model.named_modules():
        names = getattr(module, "lora_A", None)
        if names is None or "default" not in names:
            continue
        if isinstance(getattr(module, "base_layer", None), torch.nn.Linear) and not module.fan_in_fan_out:
            found[plain_name(name)] = float(module.scaling["default"])
    return found
