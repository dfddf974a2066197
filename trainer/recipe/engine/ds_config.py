"""DeepSpeed's configuration, made from ours."""

from collections.abc import Mapping
from typing import Any

from ..config.schema import Config


def deepspeed_config(config: Config, ranks: int, on_gpu: bool) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a resolved one (its precision is not ``auto``).

    DeepSpeed counts buckets in elements, the trainer in bytes. DeepSpeed counts every rank as a data-parallel one, even
    if ranks share sequences; nothing here depends on its batch size.
    """
    training, zero = config.training, config.zero
    element_bytes = 4 if training.precision == "fp32" else 2
    bucket = max(1 << 14, zero.bucket_bytes // element_bytes)
    partition: dict[str, Any] = {
        "stage": zero.stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "overlap_comm": zero.overlap and on_gpu and ranks > 1,
        "contiguous_gradients": True,
    }
    if zero.offload_optimizer:
        partition["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
    if zero.offload_parameters:
        partition["offload_param"] = {"device": "cpu", "pin_memory": on_gpu}
    if zero.stage == 3 and config.optimizer.kind == "muon":
        partition["reduce_scatter"] = False  # stage3.py refuses it: Muon needs whole gradients
    if zero.stage == 3:
        partition["stage3_prefetch_bucket_size"] = bucket
        partition["stage3_gather_16bit_weights_on_model_save"] = True
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": training.micro_batch,
        "gradient_accumulation_steps": training.grad_accumulation,
        "train_batch_size": training.micro_batch * training.grad_accumulation * ranks,
        "gradient_clipping": config.optimizer.max_grad_norm,
        "zero_optimization": partition,
        # The trainer makes the optimizer, whichever Adam is configured.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32" if zero.communication_dtype == "auto" else zero.communication_dtype,
        "data_types": {"grad_accum_dtype": grad_accum_dtype(config)},
        "wall_clock_breakdown": False,
        "steps_per_print": None,
    }
    if not masters(config):
        # At stage 0 DeepSpeed would make an fp32 copy of every weight: its precision is left unset, so that it steps
        # the optimizer on the bf16 weights themselves. The other two keys are for partitions in bf16; the states' data
        # type is the optimizer's own.
        if zero.stage:
            result["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    elif training.precision == "bf16":
        result["bf16"] = {"enabled": True}
    elif training.precision == "fp16":
        result["fp16"] = {"enabled": True, "initial_scale_power": 16}
    return _merge(result, config.deepspeed)


def masters(config: Config) -> bool:
    """Return whether updates are added to fp32 weights."""
    return config.optimizer.master_weights == "fp32"


def grad_accum_dtype(config: Config) -> str:
    """Return the data type of accumulated gradients: ``fp32``, ``bf16`` or ``fp16``."""
    if not masters(config) and config.zero.stage == 0:
        return "fp32"  # DeepSpeed compares it with its own, unset precision; gradients have the weights' type
    if config.zero.grad_accum_dtype != "auto":
        return config.zero.grad_accum_dtype
    if not masters(config):
        return config.training.precision
    # DeepSpeed 0.19 refuses types other than the model's at stage 0 (engine.py, _do_optimizer_sanity_check).
    return config.training.precision if config.zero.stage == 0 else "fp32"


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` updated with the keys of ``over``, section by section."""
    result = dict(base)
    for key, value in over.items():
        inner = result.get(key)
        result[key] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return result
