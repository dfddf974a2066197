"""Finds the storages of the engine, the model and the optimizer by walking them.

The attributes are DeepSpeed's own, read in the source of 0.19.8 (``runtime/zero/stage_1_and_2.py``, ``stage3.py``,
``partition_parameters.py``, ``bf16_optimizer.py``, ``fp16/fused_optimizer.py``, ``fp16/unfused_optimizer.py``); a few
are names of older versions. Storages without such an attribute are not found; a wrong name has no other effect.
"""

from collections.abc import Iterable
from typing import Any

from .storages import Storages

_STAGE3 = "_DeepSpeedZeroOptimizer_Stage3__"

PARAMETERS = (
    "bit16_groups_flat",
    "bf16_groups_flat",
    "fp16_groups_flat",
    "fp16_partitioned_groups_flat",
    "lp_param_buffer",
)
MASTERS = (
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
    "fp32_groups_flat",
    "fp32_groups",
)
GRADIENTS = (
    "averaged_gradients",
    "grad_partitions_flat_buffer",
    "grads_in_partition",
    "all_grad_tensors",
    "fp32_groups_gradients_flat",
    "accumulated_grads_in_cpu",
    "offload_gradient_dict",
)
PARTITIONS = (
    "param_buffer_of_bit16_for_cpu_offload_groups",
    "param_groups_fp16_flat_cpu_memory",
    "hp_params_pin_buffers",
    "lp_params_pin_buffers",
    "lp_param_contiguous_pin_buffer",
    "lp_grad_partitions_flat_pin_buffers",
)
BUCKETS = (
    "temp_grad_buffer_for_gpu_offload",
    "temp_grad_buffer_for_cpu_offload",
    "_muon_allgather_buffers",
    "ipg_buffer",
    f"{_STAGE3}ipg_bucket_flat_buffer",
)

_OF_PARAMETER = {
    "ds_tensor": "parameters",  # ZeRO-3's partition of it
    "_local_shard": "parameters",  # FSDP's
    "_mp_shard": "parameters",
    "_full_param_padded": "parameters",
    "grad_accum": "gradients",  # DeepSpeed's, where gradients are added up in another dtype
    "main_grad": "gradients",  # Megatron's
    "_saved_grad_shard": "gradients",
    "ds_secondary_tensor": "partitions",  # ZeRO++'s copy within a node
}


class Roots:
    """Roots of a walk; each may be missing.

    Args:
        engine: a DeepSpeed engine.
        model: the model, where it is known.
        optimizer: the bare optimizer whose updates are the steps, where no engine makes them.
    """

    def __init__(self, engine: Any, model: Any, optimizer: Any) -> None:
        self.wrapper = getattr(engine, "optimizer", None)
        """The engine's optimizer: a ZeRO or mixed-precision optimizer around a bare one, or the bare one."""
        self.model = model if model is not None else getattr(engine, "module", None)
        self.optimizer = _innermost(self.wrapper) if self.wrapper is not None else optimizer

    def parameters(self) -> list[Any]:
        """List the model's parameters; where no model is known, those the optimizer updates."""
        if self.model is not None:
            return list(self.model.parameters())
        return [parameter for group in _groups(self.optimizer) for parameter in group]


def walk(roots: Roots, storages: Storages) -> None:
    """Find every storage of ``roots``."""
    add, wrapper = storages.add, roots.wrapper
    parameters = roots.parameters()
    for parameter in parameters:
        add("parameters", parameter.data)
    if roots.model is not None:
        add("parameters", list(roots.model.buffers()))
    _add(storages, "parameters", wrapper, PARAMETERS)
    # A gradient may be a view of the bucket it is reduced in.
    walk_buckets(roots, storages)
    walk_gradients(roots, storages, parameters)
    for parameter in parameters:
        for name, value in vars(parameter).items():
            part = _OF_PARAMETER.get(name)
            if part is not None:
                add(part, value)
    state = getattr(roots.optimizer, "state", None)
    if isinstance(state, dict):
        add("optimizer_states", list(state.values()))
    _add(storages, "master_copies", wrapper, MASTERS)
    _add(storages, "partitions", wrapper, PARTITIONS)


def walk_gradients(roots: Roots, storages: Storages, parameters: Iterable[Any] | None = None) -> None:
    """Find the gradients alone: of the model, of the master copies, and DeepSpeed's partitions and accumulators."""
    for parameter in roots.parameters() if parameters is None else parameters:
        storages.add("gradients", parameter.grad)
    if roots.wrapper is not None:
        for group in _groups(roots.optimizer):
            for parameter in group:
                storages.add("gradients", parameter.grad)
        _add(storages, "gradients", roots.wrapper, GRADIENTS)


def walk_buckets(roots: Roots, storages: Storages) -> None:
    """Find the reduction buckets alone."""
    _add(storages, "buckets", roots.wrapper, BUCKETS)
    buckets = getattr(roots.wrapper, "ipg_buckets", None)
    if isinstance(buckets, dict):
        for bucket in buckets.values():
            storages.add("buckets", getattr(bucket, "buffer", None))


def _add(storages: Storages, part: str, owner: Any, names: Iterable[str]) -> None:
    if owner is not None:
        for name in names:
            storages.add(part, getattr(owner, name, None))


def _innermost(optimizer: Any) -> Any:
    for _ in range(4):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None or inner is optimizer:
            break
        optimizer = inner
    return optimizer


def _groups(optimizer: Any) -> list[list[Any]]:
    return [list(group["params"]) for group in getattr(optimizer, "param_groups", None) or []]
