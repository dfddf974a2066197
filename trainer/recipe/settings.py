"""DeepSpeed's configuration, made from ours."""

from typing import Any

from .config import Config


def deepspeed_config(config: Config, ranks: int, on_gpu: bool) -> dict[str, Any]:
    """Write DeepSpeed's configuration for a settled configuration (its precision is not ``auto``).

    Buckets are counted in elements there and in bytes here.
    """
    training, zero = config.training, config.zero
    element_bytes = 4 if training.precision == "fp32" else 2
    bucket = max(1 << 14, zero.bucket_bytes // element_bytes)
    partition: dict[str, Any] = {
        "stage": zero.stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "overlap_comm": zero.overlap and on_gpu,
        "contiguous_gradients": True,
    }
    if zero.offload_optimizer:
        partition["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
    if zero.stage == 3:
        partition["stage3_prefetch_bucket_size"] = bucket
        partition["stage3_gather_16bit_weights_on_model_save"] = True
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": training.micro_batch,
        "gradient_accumulation_steps": training.grad_accumulation,
        "train_batch_size": training.micro_batch * training.grad_accumulation * ranks,
        "gradient_clipping": config.optimizer.max_grad_norm,
        "zero_optimization": partition,
        # The optimizer is made by us, whichever Adam was asked for.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": False,
        "steps_per_print": None,
    }
    if training.precision == "bf16":
        result["bf16"] = {"enabled": True}
    elif training.precision == "fp16":
        result["fp16"] = {"enabled": True, "initial_scale_power": 16}
    return result
