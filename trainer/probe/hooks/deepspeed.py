"""Hooks into DeepSpeed's engine. Every way to drive it (plain loop, accelerate, Trainer, pipeline) calls these methods.

The methods are replaced on the class, so engines of subclasses and engines made earlier are covered too.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import ModuleType
from typing import Any

from .. import active
from ..active import mine, switched_on
from ..events import TorchEvents, dtype_name, learning_rate
from ..guard import replace
from .torch import around, before, clipping, forwarding, scaling, scoped


def install(_module: ModuleType) -> None:
    """Install every hook. DeepSpeed has been imported."""
    from deepspeed.runtime import engine as module
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    engine: Any = DeepSpeedEngine
    replace(engine, "__init__", _making)
    replace(engine, "forward", forwarding(always=True))
    replace(engine, "backward", around(_backward))
    replace(engine, "scale", scaling)
    replace(module, "clip_grad_norm_", clipping)  # without ZeRO in fp32 the engine keeps no norm of its own
    replace(engine, "_take_model_step", partial(_step, itself=True))
    replace(engine, "step", _step)
    replace(GatheredParameters, "__enter__", _gathering)
    replace(GatheredParameters, "__exit__", before(_releasing))
    for name in ("save_checkpoint", "save_16bit_model"):
        replace(engine, name, scoped("checkpoint"))
    replace(engine, "load_checkpoint", _loading)


def attach(engine: Any) -> None:
    """Make an engine the one whose updates are this rank's steps, and report it."""
    events = switched_on()
    if events is not None:
        events.engine(engine, _describe, _partitions, share_of_engine)


def share_of_engine(engine: Any) -> tuple[int, int]:
    """Return the rank's place among the tensor-parallel ranks of an engine, and their number."""
    mpu = getattr(engine, "mpu", None)
    # Megatron and DeepSpeed, DeepSpeed's pipelines, older versions of both; sequence parallelism has none of them.
    for kind in ("tensor_model", "slice", "model"):
        size = getattr(mpu, f"get_{kind}_parallel_world_size", None)
        place = getattr(mpu, f"get_{kind}_parallel_rank", None)
        if size is not None and place is not None:
            return int(place()), int(size())
    return 0, 1


def _partitions(engine: Any) -> int:
    """Return the number of ranks over which ZeRO partitions the optimizer's state; 0: all."""
    if not engine.zero_optimization_stage():
        return 1
    ranks = getattr(engine, "dp_world_size", None)
    return ranks if isinstance(ranks, int) and ranks > 0 else 0


def _describe(engine: Any) -> dict[str, Any]:
    precision = "fp32"
    if engine.bfloat16_enabled():
        precision = "bf16"
    elif engine.fp16_enabled():
        precision = "fp16"
    elif getattr(engine, "torch_autocast_enabled", bool)():
        precision = dtype_name(engine.torch_autocast_dtype()) or precision
    return {
        "deepspeed_config": engine.config,
        "zero_stage": int(engine.zero_optimization_stage()),
        "micro_batch": int(engine.train_micro_batch_size_per_gpu()),
        "grad_accumulation": int(engine.gradient_accumulation_steps()),
        "precision": precision,
        "pipeline_stage": getattr(engine, "stage_id", None),
    }


def _making(original: Any) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        active.become_rank()
        events = active.events
        if events is None:
            original(self, *args, **kwargs)
            return
        with events.making_engine():
            original(self, *args, **kwargs)
        attach(self)

    return __init__


def _backward(events: TorchEvents, _engine: Any, loss: Any, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
    scaled = not (args[1] if len(args) > 1 else kwargs.get("scale_wrt_gas", True))
    return events.backward((loss,), scaled=scaled)


def _step(original: Any, *, itself: bool = False) -> Callable[..., Any]:
    """Wrap ``step``, or ``_take_model_step``, the update ``itself``: a pipeline engine calls it without ``step``."""

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        events = mine()
        if events is None or events.in_update or not (itself or _is_boundary(self)):
            return original(self, *args, **kwargs)
        before = self.global_steps
        with events.update(self, lambda: learning_rate(self.get_lr() or ())) as update:
            found = original(self, *args, **kwargs)
            if itself or self.global_steps != before:
                update.done(lambda: _figures(self))
        return found

    return step


def _loading(original: Any) -> Callable[..., Any]:
    def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        events = mine()
        if events is None:
            return original(self, *args, **kwargs)
        # At stage 3 DeepSpeed 0.19.8 reads the weights with the optimizer's states, or if those are not asked for.
        states = kwargs.get("load_optimizer_states", True)
        module_only = kwargs.get("load_module_only") and states and self.zero_optimization_stage() == 3
        before = events.loading_module(self) if module_only else None
        with events.phase("checkpoint"):
            found = original(self, *args, **kwargs)
        if before and isinstance(found, tuple) and found[0] is not None:
            events.loaded_module(self, before)
        return found

    return load_checkpoint


def _gathering(original: Any) -> Callable[..., Any]:
    def __enter__(self: Any) -> Any:  # noqa: N807
        events = mine()
        if events is None:
            return original(self)
        active.counts.gathers += 1
        found = original(self)
        events.gathered(self, sys._getframe(1))
        return found

    return __enter__


def _releasing(events: TorchEvents, parameters: Any, *_: Any) -> None:
    if getattr(parameters, "enabled", True):
        events.gathering_ends(parameters, kept=getattr(parameters, "src_rank", None) is not None)


def _is_boundary(engine: Any) -> bool:
    """Return whether ``engine.step()`` will update now (where the caller owns the boundary, every ``step`` does)."""
    managed = getattr(engine, "managed_gradient_accumulation", None)
    return bool(engine.is_gradient_accumulation_boundary()) or (managed is not None and not managed())


def _figures(engine: Any) -> dict[str, Any]:
    optimizer = engine.optimizer
    return {
        "number": int(engine.global_steps),
        "grad_norm": getattr(engine, "_global_grad_norm", None),  # get_global_grad_norm may be a collective call
        "loss_scale": getattr(optimizer, "cur_scale", None) if engine.fp16_enabled() else None,
        # ftmon's trainer skips on the device; the host knows it one step later.
        "overflow": getattr(optimizer, "skipped_on_device", bool(getattr(optimizer, "overflow", False))),
        "accumulation": int(engine.gradient_accumulation_steps()),
    }
