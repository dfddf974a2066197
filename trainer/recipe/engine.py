"""Makes DeepSpeed's engine of a run, and the model inside it."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ...protocol.errors import ConfigError
from .config.schema import Config
from .distributed import World
from .model import load
from .model.cross_entropy import GradientSum, sum_rows
from .model.loss import causal_model
from .optim import optimizer
from .support import zero_stage


def deepspeed_config(config: Config, ranks: int, on_gpu: bool) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a resolved one (its precision is not ``auto``).

    DeepSpeed counts buckets in elements, the trainer in bytes. DeepSpeed counts every rank as a data-parallel one, even
    if ranks share sequences; nothing here depends on its batch size.
    """
    training, zero, stage = config.training, config.zero, zero_stage(config, ranks)
    element_bytes = 4 if training.precision == "fp32" else 2
    bucket = max(1 << 14, zero.bucket_bytes // element_bytes)
    partition: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "overlap_comm": zero.overlap and on_gpu and ranks > 1,
        "contiguous_gradients": True,
    }
    for name, asked in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_parameters)):
        if asked:
            partition[name] = {"device": "cpu", "pin_memory": on_gpu}
    if stage == 3:
        partition |= {"stage3_prefetch_bucket_size": bucket, "stage3_gather_16bit_weights_on_model_save": True}
        if config.optimizer.kind == "muon":
            partition["reduce_scatter"] = False  # stage3.py refuses it: Muon needs whole gradients
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": training.micro_batch,
        "gradient_accumulation_steps": training.micro_steps,
        "train_batch_size": training.micro_batch * training.micro_steps * ranks,
        "gradient_clipping": config.optimizer.max_grad_norm,
        "zero_optimization": partition,
        # The trainer makes the optimizer, whichever Adam is configured.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32" if zero.communication_dtype == "auto" else zero.communication_dtype,
        "data_types": {"grad_accum_dtype": grad_accum_dtype(config, stage)},
        "wall_clock_breakdown": False,
        "steps_per_print": None,
        # It makes the host wait for the device twice a micro-batch (utils/timer.py), for figures that nothing prints.
        "timers": {"throughput": {"enabled": False}},
    }
    if not masters(config):
        # At stage 0 DeepSpeed would make an fp32 copy of every weight: its precision is left unset, so that it steps
        # the optimizer on the bf16 weights themselves. The other two keys are for partitions in bf16; the states' data
        # type is the optimizer's own.
        if stage:
            result["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    elif training.precision == "bf16":
        # Stage 1 with fp32 gradients: each is added to them, and freed, as soon as the backward pass has it.
        result["bf16"] = {"enabled": True, "immediate_grad_update": True}
    elif training.precision == "fp16":
        result["fp16"] = {"enabled": True, "initial_scale_power": 16}
    return _merge(result, config.deepspeed)


def masters(config: Config) -> bool:
    """Return whether updates are added to fp32 weights."""
    return config.optimizer.master_weights == "fp32"


def grad_accum_dtype(config: Config, stage: int) -> str:
    """Return the data type of accumulated gradients at DeepSpeed's ``stage``: ``fp32``, ``bf16`` or ``fp16``."""
    if stage == 0:
        return "fp32"  # DeepSpeed compares it with its own precision, unset for bf16; gradients have the weights' type
    if config.zero.grad_accum_dtype != "auto":
        return config.zero.grad_accum_dtype
    return "fp32" if masters(config) else config.training.precision


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        inner = result.get(key)
        result[key] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return result


_aten: Any = torch.ops.aten


def compute_together(optimizer: Any) -> None:
    """Make ZeRO compute its gradients' norms together, in fp64 as before but without copies in fp64.

    DeepSpeed converts each gradient and computes its norm (``get_grad_norm_direct`` of ``stage_1_and_2.py`` and
    ``stage3.py``); the converted gradient of the embeddings can be the largest tensor of an update. Here it receives
    one tensor with the norms of all gradients, which has the same norm.
    """
    of_each = getattr(optimizer, "get_grad_norm_direct", None)
    if of_each is None:  # no ZeRO
        return

    def norm(gradients: Any, params: Any, norm_type: float = 2) -> Any:
        held = [one for one in gradients if not getattr(one, "_zero_padding", False)]
        if norm_type != 2 or not held or any(one.device != held[0].device for one in held):
            return of_each(gradients, params, norm_type)
        return of_each([torch.stack(_aten._foreach_norm(held, 2, dtype=torch.float64))], params, norm_type)

    optimizer.get_grad_norm_direct = norm


def let_norm_decide(optimizer: Any) -> None:
    """Make ZeRO detect inf and NaN in gradients by their norm alone.

    DeepSpeed's stages 1 and 2 check each gradient first, with half a dozen kernels, and then the norm, which is not
    finite if a gradient is not (``stage_1_and_2.py``, ``step``).
    """
    from deepspeed.runtime.zero import stage_1_and_2

    if not isinstance(optimizer, stage_1_and_2.DeepSpeedZeroOptimizer) or optimizer.cpu_offload:
        return
    # A release without this function does not check the norm: its own check is kept.
    if hasattr(stage_1_and_2, "is_invalid_grad_norm") and getattr(optimizer, "compute_grad_norm", False):
        optimizer.check_overflow = lambda partition_gradients=True: None


class LateStep:
    """Makes DeepSpeed clip and update in bf16 without waiting for the device, at stages 1 and 2 with fused AdamW.

    DeepSpeed waits for it several times a step: to copy a constant to it (``runtime/utils.py``,
    ``mask_nan_or_inf_with_val_inplace``), to read whether the norm is finite (``is_invalid_grad_norm``, in
    ``stage_1_and_2.py`` again for each group) and, in ``BF16_Optimizer``, whether it clips
    (``clip_tensors_by_global_norm``). Here PyTorch's fused AdamW divides by the clipping factor, and skips an update
    whose norm is not finite, on the device, as under ``torch.amp.GradScaler``. A skipped update is known at the next
    step, which then does not count and leaves the learning rate where it is.

    ``BF16_Optimizer``'s gradients are reduced here, in fp32, to the part that a rank updates: half the traffic of
    DeepSpeed's all-reduce, and none of its copies (``buffered_allreduce_fallback``).
    """

    def __init__(self, engine: Any, reads: bool) -> None:
        """Replace parts of an engine's optimizer; ``reads``: the device has values, which a dry run's has not."""
        self._optimizer = optimizer = engine.optimizer
        self._reads = reads
        self._skipped: torch.Tensor | None = None
        self._copied: Any = None
        self._late = False
        if _is_bf16_optimizer(optimizer):
            optimizer.step = self._step
            plain = engine.gradient_predivide_factor() == 1.0 and engine.postscale_gradients()
            self._reduces = plain and engine.communication_data_type == torch.float32
            engine.enable_backward_allreduce = engine.enable_backward_allreduce and not self._reduces
        else:
            optimizer.check_grad_overflow = False
            optimizer.scaled_global_norm = self._partitions_norm
            optimizer.unscale_and_clip_grads = self._report_late

    @staticmethod
    def fits(optimizer: Any) -> bool:
        """Return whether an engine's optimizer can be changed so."""
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

        inner = getattr(optimizer, "optimizer", None)
        if type(inner) is not torch.optim.AdamW or not all(group["fused"] for group in inner.param_groups):
            return False
        if _is_bf16_optimizer(optimizer):
            used = ("fp32_groups_gradients_flat", "fp32_groups_flat_partition", "fp32_groups_gradient_flat_partition")
            return optimizer.grad_acc_dtype == torch.float32 and all(hasattr(optimizer, name) for name in used)
        return (
            type(optimizer) is DeepSpeedZeroOptimizer
            and optimizer.dtype == torch.bfloat16
            and not optimizer.cpu_offload
            and getattr(optimizer, "check_grad_overflow", False)
            and getattr(optimizer, "compute_grad_norm", False)
        )

    @torch.no_grad()
    def _step(self, closure: Any = None) -> None:
        """Replace ``BF16_Optimizer.step``: every rank has gradients of all weights, with zeros as padding."""
        outer = self._optimizer
        parts = outer.fp32_groups_gradient_flat_partition
        if self._reduces:
            for part, whole in zip(parts, outer.fp32_groups_gradients_flat, strict=True):
                _average_to(part, whole, outer.dp_process_group)
        outer._global_grad_norm = self._norm(parts)
        for master, gradient in zip(outer.fp32_groups_flat_partition, parts, strict=True):
            master.grad = gradient
        outer.optimizer.step()
        self._report_late()
        outer._lazy_init_hp_params_optimizer_state()
        outer.update_lp_params()
        outer.clear_hp_grads()

    @torch.no_grad()
    def _partitions_norm(self, norm_type: float = 2) -> torch.Tensor:
        """Replace ``scaled_global_norm`` of stages 1 and 2: every rank has a part of the gradients."""
        outer = self._optimizer
        parts = [one for group in outer.averaged_gradients.values() for one in group]
        # A rank's part may be padding alone, which is zero.
        return self._norm([one for one in parts if not getattr(one, "_zero_padding", False)] or parts[:1])

    def _norm(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the norm of all ranks' ``parts``; tell AdamW what to divide by and whether to skip."""
        outer, inner = self._optimizer, self._optimizer.optimizer
        square = torch.stack(_aten._foreach_norm(parts, 2, dtype=torch.float64)).square_().sum()
        if dist.get_world_size(outer.dp_process_group) > 1:
            dist.all_reduce(square, group=outer.dp_process_group)
        self._late = self._was_skipped()
        norm = square.sqrt().float()
        clips = outer.clip_grad > 0.0
        inner.grad_scale = ((norm + 1e-6) / outer.clip_grad).clamp_(min=1.0) if clips else None
        inner.found_inf = outer.skipped_on_device = norm.isfinite().logical_not_().float()  # the probe reads it too
        if self._reads:
            self._skipped = inner.found_inf
            if norm.is_cuda:
                self._skipped = torch.empty((), pin_memory=True).copy_(inner.found_inf, non_blocking=True)
                self._copied = torch.cuda.Event()
                self._copied.record()
        return norm

    def _was_skipped(self) -> bool:
        if self._copied is not None:
            self._copied.synchronize()
        skipped, self._skipped, self._copied = self._skipped, None, None
        return skipped is not None and bool(skipped)

    def _report_late(self, *_: Any) -> None:
        """Replace ``unscale_and_clip_grads``, after which DeepSpeed no longer looks at ``overflow`` in its step."""
        self._optimizer.overflow = self._late


_SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")  # from PyTorch 2.13 on, and before
_reduce_scatter: Any = next(getattr(dist, name) for name in _SCATTERS if hasattr(dist, name))


def _average_to(part: torch.Tensor, whole: torch.Tensor, group: Any) -> None:
    """Average a rank's ``part``, a view of ``whole``, over ranks; the rest of ``whole`` is undefined after this."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return
    _reduce_scatter(part, whole, dist.ReduceOp.AVG if whole.is_cuda else dist.ReduceOp.SUM, group)
    if not whole.is_cuda:  # Gloo does not average
        part /= ranks


def _is_bf16_optimizer(optimizer: Any) -> bool:
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    return isinstance(optimizer, BF16_Optimizer)


def make_engine(
    config: Config, world: World, tokens: Any, total_steps: int, without_weights: load.Quantize | None = None
) -> tuple[Any, Any]:
    """Return DeepSpeed's engine and the model inside it. All ranks call this.

    ``without_weights``: for a dry run, see ``load.make``.
    """
    import deepspeed  # not at the import of this file: a prediction chooses its accelerator first
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.config import DeepSpeedConfig

    # It prints memory figures, with a garbage collection for each, whatever the level of DeepSpeed's log.
    for name in ("see_memory_usage", "print"):
        setattr(bf16_optimizer, name, lambda *_, **__: None)
    settings = deepspeed_config(config, world.size, world.on_gpu)
    with _own_keys(config):
        DeepSpeedConfig(settings)  # before ZeRO-3 makes the model by it
    model = load.make(config, settings, tokens, world, without_weights)
    # From here on each rank draws different dropout.
    torch.manual_seed(config.training.seed + 1 + world.rank)
    made = optimizer.make(model, config, world)
    with _own_keys(config):
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=made, lr_scheduler=optimizer.scheduler(config, total_steps), config=settings
        )
    let_norm_decide(engine.optimizer)
    compute_together(engine.optimizer)
    if _is_bf16_optimizer(engine.optimizer):
        _complete_bf16(engine, world)
    if LateStep.fits(engine.optimizer):
        LateStep(engine, world.has_values)
    _learn_order_with_backward(engine)
    _gather_in_base(engine)
    return engine, model


@contextmanager
def _own_keys(config: Config) -> Generator[None]:
    """Raise a ``ConfigError`` about ``deepspeed:`` where DeepSpeed refuses its keys, alone or together with others."""
    try:
        yield
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        if not config.deepspeed:
            raise
        # pydantic names the section, the key and the value in a line each.
        text = ": ".join(line.strip() for line in str(error).splitlines()[:3]) or repr(error)
        raise ConfigError(f"deepspeed: DeepSpeed refuses its keys: {text}; change them, or leave them out") from error


def _complete_bf16(engine: Any, world: World) -> None:
    """Complete what DeepSpeed's ``BF16_Optimizer`` (stage 1 with fp32 gradients) leaves out."""
    from deepspeed.checkpoint.constants import ZERO_STAGE

    sum_in_place(engine.optimizer, world.on_gpu and world.has_values)
    inner = causal_model(engine.module)
    embedding, head = inner.get_input_embeddings(), inner.get_output_embeddings()
    give_sums(engine.optimizer, [table.weight for table in (embedding, head) if hasattr(table, "weight")])
    sum_rows(embedding)
    state_dict: Any = engine.optimizer.state_dict
    # zero_to_fp32.py refuses checkpoints without it.
    engine.optimizer.state_dict = lambda: {**state_dict(), ZERO_STAGE: 1}
    if world.size == 1:
        # DeepSpeed would copy all gradients into one tensor, reduce it over one rank and copy it back.
        engine.enable_backward_allreduce = False


_LARGE = 1 << 20  # Elements from which a kernel of Triton, slower to start, is faster than PyTorch's


def sum_in_place(outer: Any, on_gpu: bool) -> None:
    """Make ``BF16_Optimizer`` write each gradient of a step's first backward pass, and add later ones, in one kernel.

    DeepSpeed fills the fp32 sums with zeros after each step, copies each gradient to fp32 and adds the copy: 22 bytes
    of traffic a parameter, in place of 6, and of 18 in place of 10 for each further pass.
    """
    sums, written = outer.fp32_groups_gradients, outer.fp32_groups_has_gradients
    kernel: Any = None
    if on_gpu:
        from .model.kernels import write as kernel  # PyTorch for CPUs comes without Triton

    def add(weight: Any, group: int, index: int, clear_lp_grads: bool = False) -> None:
        if weight.grad is None:
            return
        total = sums[group][index]
        gradient = weight.grad.view(total.shape)
        if kernel is not None and total.numel() >= _LARGE:
            kernel(total, gradient, add=written[group][index])
        else:
            (total.add_ if written[group][index] else total.copy_)(gradient)
        weight._hp_grad = total
        written[group][index] = True
        if clear_lp_grads:
            weight.grad.zero_()

    def complete(*arguments: Any, **named: Any) -> None:
        plain(*arguments, **named)
        for totals, flags in zip(sums, written, strict=True):
            for index, total in enumerate(totals):
                if not flags[index]:  # of a weight that was not used
                    total.zero_()
                    flags[index] = True

    def clear() -> None:
        for flags in written:
            flags[:] = [False] * len(flags)

    plain = outer.backward_epilogue
    outer._update_hp_grad, outer.clear_hp_grads, outer.backward_epilogue = add, clear, torch.no_grad()(complete)


def give_sums(outer: Any, weights: list[Any]) -> None:
    """Give those of the ``weights`` that ``BF16_Optimizer`` trains their ``GradientSum``, after ``sum_in_place``."""
    wanted = {id(weight) for weight in weights}
    parts = (outer.bf16_groups, outer.fp32_groups_gradients, outer.fp32_groups_has_gradients)
    for group, totals, written in zip(*parts, strict=True):
        for place, (weight, total) in enumerate(zip(group, totals, strict=True)):
            if id(weight) in wanted:
                weight._hp_grad = total
                weight.gradient_sum = GradientSum(total.view(weight.shape), written, place)


def forget_module_order(engine: Any) -> None:
    """Make ZeRO-3 record the order of modules in the next pass; the last one had no backward.

    It records the order in one pass, gathers by it in later ones, and caches permanently which parameters to release
    (``partitioned_param_coordinator.py``, ``__params_to_release``). With the order of a forward alone it keeps nothing
    for the backward, regardless of ``stage3_max_reuse_distance``.
    """
    offload = getattr(engine.optimizer, "parameter_offload", None)
    if offload is not None and not offload.get_param_coordinator().is_invalid_trace():
        offload.get_param_coordinator()._invalidate_trace()


def _learn_order_with_backward(engine: Any) -> None:
    """Keep ZeRO-3 from recording the order of modules in a forward without gradients, as in checks of the model."""
    offload: Any = getattr(engine.optimizer, "parameter_offload", None)

    def after(*_: Any) -> None:
        if not torch.is_grad_enabled() and offload.get_param_coordinator().is_record_trace():
            forget_module_order(engine)

    if offload is not None:
        engine.module.register_forward_hook(after)


def _gather_in_base(engine: Any) -> None:
    """Make ZeRO-3 gather weights that modules read from others, also where the model inside peft's is called alone.

    DeepSpeed does so while the engine's own module runs (``engine.py``, ``_forward_prologue``); the checks of a model,
    and generation, call the one inside.
    """
    inner = causal_model(engine.module)
    if inner is engine.module or getattr(engine.optimizer, "parameter_offload", None) is None:
        return

    def allow(allowed: bool) -> None:
        for module in engine.module.modules():
            module._parameters._in_forward = allowed

    inner.register_forward_pre_hook(lambda *_: allow(True))
    inner.register_forward_hook(lambda *_: allow(False), always_call=True)
