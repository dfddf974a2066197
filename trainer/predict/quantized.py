"""Linear layers in 4 bits (QLoRA) in a dry run: bitsandbytes' own modules and operations on fake tensors.

bitsandbytes' parameter is a tensor subclass, which cannot be fake: a plain parameter with the same attributes replaces
it. The operations have fake kernels.
"""

from importlib import import_module
from typing import Any

import torch
from transformers import modeling_utils

from . import fake_tensors

_ATTRIBUTES = ("blocksize", "compress_statistics", "quant_type", "quant_storage")
"""Attributes of bitsandbytes' parameter that peft and its modules read."""


def hold_in_4_bits(model: Any, settings: Any) -> None:
    """Replace a model's linear layers as ``from_pretrained`` does, and move the model to the GPU.

    Args:
        model: the model, of fake tensors on the meta device.
        settings: transformers' ``BitsAndBytesConfig``.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    bitsandbytes: Any = import_module("bitsandbytes")
    kinds = {name: module.weight.dtype for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    biases = {name: model.get_submodule(name).bias for name in kinds}
    quantizer: Any = AutoHfQuantizer.from_config(settings)
    with fake_tensors.left():
        quantizer.preprocess_model(model=model, device_map=None)
    _warm_up(model, quantizer)
    for name, dtype in kinds.items():
        module: Any = model.get_submodule(name)
        if not isinstance(module, bitsandbytes.nn.Linear4bit):
            continue
        before = module.weight
        # As in loading: each is moved to the GPU whole, and converted to 4 bits there.
        whole = torch.empty(module.out_features, module.in_features, dtype=dtype, device="cuda")
        packed, state = bitsandbytes.functional.quantize_4bit(
            whole,
            blocksize=before.blocksize,
            compress_statistics=before.compress_statistics,
            quant_type=before.quant_type,
        )
        weight: Any = torch.nn.Parameter(packed, requires_grad=False)
        for attribute in _ATTRIBUTES:
            setattr(weight, attribute, getattr(before, attribute))
        weight.quant_state = module.quant_state = state
        module.weight, module.bias = weight, biases[name]
    quantizer.postprocess_model(model)
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if tensor.device.type != "meta":
                continue
            placed = torch.empty_like(tensor, device="cuda")
            setattr(module, name, torch.nn.Parameter(placed) if isinstance(tensor, torch.nn.Parameter) else placed)
    model.tie_weights()


def _warm_up(model: Any, quantizer: Any) -> None:
    """Allocate and free one block of the size of all weights, as ``from_pretrained`` does before it loads them.

    transformers' ``modeling_utils.py``, ``caching_allocator_warmup``.
    """
    places = {name: torch.device("cuda", 0) for name, _ in model.named_parameters()}
    for size in modeling_utils.get_total_byte_count(model, places, quantizer).values():
        torch.empty(int(size // 2), dtype=torch.float16, device="cuda")
