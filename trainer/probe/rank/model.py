"""A model inside its wrappers: its name, its size and its data type."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch.nn.parameter import is_lazy

_MOST_WRAPPERS = 8
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "AveragedModel")


def describe_model(module: Any, tensor_parallel: int = 1) -> dict[str, Any]:
    """Return a model's name and its parameter counts (partitioned and sharded parameters at their full size).

    The name is that of the model's checkpoint if it has one, else the class of the model inside its wrappers.

    Args:
        module: the model.
        tensor_parallel: number of ranks over which its tensor-parallel parameters are split.
    """
    sizes = list(parameter_sizes(module, tensor_parallel))
    own = own_model(module)
    config = getattr(own, "config", None)
    name = str(getattr(config, "_name_or_path", "") or "") or own_class(own).__name__
    trainable = sum(size for size, is_trainable in sizes if is_trainable)
    return {"model": name, "parameters": sum(size for size, _ in sizes), "trainable_parameters": trainable}


def describe_models(modules: Sequence[Any]) -> dict[str, Any]:
    """Return the names of several models in one line, and their parameter counts summed up."""
    found = [describe_model(module) for module in modules]
    return {
        "model": " + ".join(each["model"] for each in found),
        "parameters": sum(each["parameters"] for each in found),
        "trainable_parameters": sum(each["trainable_parameters"] for each in found),
    }


def dtype_name(dtype: Any) -> str:
    """Return ``bf16``, ``fp16`` or ``fp32`` for that dtype; empty for any other."""
    return {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}.get(str(dtype), "")


def dtype_of(module: Any) -> str:
    """Return the dtype with the most parameter elements, as ``dtype_name`` returns it."""
    sizes: dict[str, int] = {}
    for parameter in module.parameters():
        name = dtype_name(parameter.dtype)
        sizes[name] = sizes.get(name, 0) + number_of_elements(parameter)
    return max(sizes, key=lambda name: sizes[name], default="")


def own_model(module: Any) -> Any:
    """Return the model inside DDP, FSDP, ``torch.compile``, DeepSpeed and PEFT wrappers."""
    for _ in range(_MOST_WRAPPERS):
        inner = _inside(module)
        if inner is None:
            break
        module = inner
    return module


def _inside(module: Any) -> Any:
    """Return the model inside a wrapper; None if it is no wrapper."""
    kind = type(module)
    home = kind.__module__.split(".")[0]
    if kind.__name__ == "OptimizedModule":
        return getattr(module, "_orig_mod", None)
    if kind.__name__ in _WRAPPERS or home == "deepspeed":
        return getattr(module, "module", None)
    if home == "peft" and callable(getattr(module, "get_base_model", None)):
        return module.get_base_model()
    return None


def own_class(module: Any) -> type:
    """Return a model's original class: FSDP2 and parametrizations replace it by a derived one."""
    kind = type(module)
    for base in kind.__mro__:
        if base.__module__.startswith(("torch.distributed.fsdp", "torch.distributed._composable")):
            continue
        if base is kind and any(parent.__name__ == "FSDPModule" for parent in kind.__bases__):
            continue
        if base.__module__ == "torch.nn.utils.parametrize":
            continue
        return base
    return kind


def number_of_elements(parameter: Any) -> int:
    """Return a parameter's number of elements, in all shards of ZeRO-3; 0 for a lazy one that has no size yet."""
    return 0 if is_lazy(parameter) else int(getattr(parameter, "ds_numel", parameter.numel()))


def full_size(parameter: Any, tensor_parallel: int = 1) -> int:
    """Return a parameter's number of elements in all its shards: of ZeRO-3, and of tensor parallelism over ranks."""
    size = number_of_elements(parameter)
    return size * tensor_parallel if getattr(parameter, "tensor_model_parallel", False) else size


def parameter_sizes(module: Any, tensor_parallel: int = 1) -> Iterator[tuple[int, bool]]:
    """Return each parameter's full number of elements, and whether it is trained."""
    # FSDP1 keeps flat shards: their handles have the full size.
    flat: dict[int, Any] = {}
    for each in module.modules() if "torch.distributed.fsdp" in sys.modules else ():
        handle = getattr(each, "_handle", None)
        whole = getattr(getattr(handle, "flat_param", None), "_unpadded_unsharded_size", None)
        if handle is not None and whole is not None:
            flat[id(handle)] = handle
    inside: set[int] = set()
    for handle in flat.values():
        parameter = handle.flat_param
        inside.add(id(parameter))
        views = [view for view in getattr(parameter, "_params", None) or () if view is not None]
        inside.update(map(id, views))
        sizes, trained = getattr(parameter, "_numels", ()), [bool(view.requires_grad) for view in views]
        if views and len(sizes) == len(trained):
            yield from zip(map(int, sizes), trained, strict=True)
        else:
            yield int(parameter._unpadded_unsharded_size.numel()), bool(parameter.requires_grad)
    for parameter in module.parameters():
        if id(parameter) not in inside:
            yield full_size(parameter, tensor_parallel), bool(parameter.requires_grad)
