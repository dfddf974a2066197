"""Checks the DeepSpeed keys in ``deepspeed:`` before any process starts.

Names are DeepSpeed 0.19's (``runtime/config.py``, ``runtime/constants.py``, ``runtime/zero/config.py``,
``runtime/precision_config.py``). DeepSpeed itself ignores most unknown keys, so a typing error would have no effect and
no message.
"""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

OWN = {
    "train_batch_size": "training.micro_batch and training.grad_accumulation",
    "train_micro_batch_size_per_gpu": "training.micro_batch",
    "gradient_accumulation_steps": "training.grad_accumulation",
    "managed_gradient_accumulation": "training.grad_accumulation",
    "gradient_clipping": "optimizer.max_grad_norm",
    "optimizer": "the section optimizer",
    "scheduler": "the section schedule",
    "steps_per_print": "output.log_every",
    "bf16.enabled": "training.precision",
    "bf16.bf16_master_weights_and_grads": "optimizer.master_weights",
    "bf16.bf16_optimizer_states": "optimizer.kind",
    "fp16.enabled": "training.precision",
    "torch_autocast": "training.precision",
    "communication_data_type": "zero.communication_dtype",
    "data_types.grad_accum_dtype": "zero.grad_accum_dtype",
    "zero_optimization.stage": "zero.stage",
    "zero_optimization.cpu_offload": "zero.offload_optimizer",
    "zero_optimization.cpu_offload_param": "zero.offload_parameters",
    "checkpoint.load_universal": "checkpoint.resume",
    "sequence_parallel_size": "training.sequence_parallel_size",
}
"""Keys that a setting of the trainer decides, and that setting."""

REMOVED = {
    "amp": "training.precision=bf16",
    "compression_training": "nothing in DeepSpeed; train a quantized base with a library made for it",
    "curriculum_learning": "data_efficiency.data_sampling.curriculum_learning",
    "eigenvalue": "nothing; mixture of quantization was removed",
    "elasticity": "a restart on other ranks, checkpoint.resume=auto",
    "graph_harvesting": "compile",
    "nebula": "checkpoint.every",
    "progressive_layer_drop": "nothing",
    "quantize_training": "nothing; mixture of quantization was removed",
    "sparse_attention": "model.attention",
    "sparse_gradients": "an embedding made with sparse=True",
    "zero_optimization.mics_hierarchical_params_gather": "zero_optimization.zero_hpz_partition_size",
    "zero_optimization.mics_shard_size": "zero_optimization.zero_hpz_partition_size",
    "zero_optimization.zeropp_loco_param": "zero_optimization.zero_quantized_gradients",
}
"""Keys that DeepSpeed 0.19 no longer has (``_REMOVED_TOP_LEVEL_CONFIG_KEYS``, ``_REMOVED_ZERO_CONFIG_KEYS``), and their
replacements.
"""

UNSUPPORTED = {
    "autotuning": "the trainer starts one configuration",
    "data_efficiency": "the trainer samples its own data",
    "data_parallel_size": "every rank must hold other data",
    "expert_parallel": "every rank must hold other data",
    "gradient_allreduce_op": "the loss is scaled for gradients averaged over ranks",
    "hybrid_engine": "the trainer does not generate while it trains",
    "pipeline": "every rank must hold the whole model",
    "tensor_parallel": "every rank must hold other data",
    "zero_optimization.zenflow": "it decides itself which micro-steps update what (DeepSpeed sets the gradient "
    "accumulation from its update_interval), so a step is not the mean over its label tokens, and cannot be rehearsed "
    "or resumed exactly; use zero.offload_optimizer",
}
"""Keys that would change the computation of a step, and why the trainer refuses them."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TOP = _names("""
    activation_checkpointing aio bf16 checkpoint comet comms_logger communication_data_type compile csv_monitor
    data_types dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc dump_state
    flops_profiler fp16 gradient_predivide_factor log_level memory_breakdown prescale_gradients
    seq_parallel_communication_data_type tensorboard timers use_data_before_expert_parallelism vocabulary_size
    wall_clock_breakdown wandb weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    zero_optimization
""")
ZERO = _names("""
    allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients cpu_offload_param
    cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks ignore_unused_parameters leaf_module
    legacy_stage1 load_from_fp32_weights log_trace_cache_warnings memory_efficient_linear offload_optimizer
    offload_param overlap_comm override_module_apply parameter_alignment pipeline_loading_checkpoint
    reduce_bucket_size reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory
    stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save
    stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters stage3_max_reuse_distance
    stage3_model_persistence_threshold stage3_module_granularity_threshold stage3_param_persistence_threshold
    stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params sub_group_size
    use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size zero_quantized_gradients
    zero_quantized_nontrainable_weights zero_quantized_weights
""")
BF16 = _names("""
    bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow immediate_grad_update
""")
FP16 = _names("""
    auto_cast consecutive_hysteresis fp16_master_weights_and_grads hysteresis initial_scale_power loss_scale
    loss_scale_window min_loss_scale
""")
DATA_TYPES = _names("buffer_dtype keep_in_fp32_modules param_dtype")
_BELOW = {"": TOP, "zero_optimization": ZERO, "bf16": BF16, "fp16": FP16, "data_types": DATA_TYPES}


def check(keys: Mapping[str, Any], error: Callable[[str, str], Exception]) -> None:
    """Refuse keys that DeepSpeed does not have or has removed, or that a setting of the trainer decides.

    ``error`` makes the exception for a dotted path below ``deepspeed`` and a text.
    """
    for section, known in _BELOW.items():
        values = keys.get(section, {}) if section else keys
        if not isinstance(values, Mapping):
            raise error(f"deepspeed.{section}", "must be a section of keys and values")
        for key in values:
            path = f"{section}.{key}" if section else key
            if path in OWN:
                raise error(f"deepspeed.{path}", f"is decided by {OWN[path]}; set that")
            if path in REMOVED:
                raise error(f"deepspeed.{path}", f"is no longer in DeepSpeed; use {REMOVED[path]}")
            if path in UNSUPPORTED:
                raise error(f"deepspeed.{path}", f"cannot be used: {UNSUPPORTED[path]}")
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise error(f"deepspeed.{path}", f"is not a key of DeepSpeed{hint}")
    _check_offload(keys, error)


def _check_offload(keys: Mapping[str, Any], error: Callable[[str, str], Exception]) -> None:
    partition = keys.get("zero_optimization", {})
    for section, setting in (("offload_optimizer", "offload_optimizer"), ("offload_param", "offload_parameters")):
        path, values = f"deepspeed.zero_optimization.{section}", partition.get(section)
        if values is None:
            continue
        if not isinstance(values, Mapping):
            raise error(path, "must be a section of keys and values")
        if values.get("device") == "nvme" or "nvme_path" in values:
            raise error(
                path,
                "nvme cannot be used: states on NVMe have not been shown to survive a resume bit by bit here; use "
                f"zero.{setting}=true, which is host memory",
            )
        if "device" in values:
            raise error(f"{path}.device", f"is decided by zero.{setting}; set that")
