"""Hooks into DeepSpeed's engine. Every way to drive it (plain loop, accelerate, Trainer, pipeline) calls these methods.

The methods are replaced on the class, so engines of subclasses and engines made earlier are covered too.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .. import active
from ..active import mine, switched_on
from ..events import dtype_name
from ..guard import replace
from .torch import scaling, scoped

_installed = False


def install(_module: ModuleType) -> None:
    """Install every hook, once. DeepSpeed has been imported."""
    global _installed
    if _installed:
        return
    _installed = True
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    engine: Any = DeepSpeedEngine
    replace(engine, "__init__", _making)
    replace(engine, "forward", _forward)
    replace(engine, "backward", _backward)
    if hasattr(engine, "scale"):
        replace(engine, "scale", scaling)
    replace(engine, "_take_model_step", _take_model_step)
    replace(engine, "step", _step)
    replace(GatheredParameters, "__enter__", _gathering)
    replace(GatheredParameters, "__exit__", _gathered)
    for name in ("save_checkpoint", "load_checkpoint", "save_16bit_model", "save_fp16_model"):
        if hasattr(engine, name):
            replace(engine, name, scoped("checkpoint"))


def attach(engine: Any) -> None:
    """Make an engine the one whose updates are this rank's steps, and report it."""
    events = switched_on()
    if events is None:
        return
    try:
        partitions, share = _partitions(engine), share_of_engine(engine)
    except Exception as error:
        events.guard.disable(error)
        return
    events.engine(engine, _describe, partitions=partitions, share=share)


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


def _forward(original: Any) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        events = mine()
        if events is None:
            return original(self, *args, **kwargs)
        with events.forward(self, args, kwargs, always=True):
            return original(self, *args, **kwargs)

    return forward


def _backward(original: Any) -> Callable[..., Any]:
    def backward(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        events = mine()
        if events is None:
            return original(self, loss, *args, **kwargs)
        scaled = not (args[1] if len(args) > 1 else kwargs.get("scale_wrt_gas", True))
        with events.backward((loss,), scaled=scaled):
            return original(self, loss, *args, **kwargs)

    return backward


def _step(original: Any) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        events = mine()
        if events is None or not _is_boundary(self):
            return original(self, *args, **kwargs)
        before = self.global_steps
        with events.update(self, lambda: _rate(self)) as update:
            found = original(self, *args, **kwargs)
            if self.global_steps != before:
                update.done(lambda: _figures(self))
        return found

    return step


def _take_model_step(original: Any) -> Callable[..., Any]:
    """Wrap ``_take_model_step``, the update itself: a pipeline engine calls it without ``step``."""

    def take_model_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        events = mine()
        if events is None:
            return original(self, *args, **kwargs)
        with events.update(self, lambda: _rate(self)) as update:
            found = original(self, *args, **kwargs)
            update.done(lambda: _figures(self))
        return found

    return take_model_step


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


def _gathered(original: Any) -> Callable[..., Any]:
    def __exit__(self: Any, *exception: Any) -> Any:  # noqa: N807
        events = mine()
        if events is not None and getattr(self, "enabled", True):
            events.gathering_ends(self, kept=getattr(self, "src_rank", None) is not None)
        return original(self, *exception)

    return __exit__


def _is_boundary(engine: Any) -> bool:
    """Return whether ``engine.step()`` will update now (where the caller owns the boundary, every ``step`` does)."""
    managed = getattr(engine, "managed_gradient_accumulation", None)
    return bool(engine.is_gradient_accumulation_boundary()) or (managed is not None and not managed())


def _rate(engine: Any) -> Any:
    rates = engine.get_lr()
    return rates[0] if rates else None


def _figures(engine: Any) -> dict[str, Any]:
    optimizer = engine.optimizer
    return {
        "number": int(engine.global_steps),
        "grad_norm": getattr(engine, "_global_grad_norm", None),  # get_global_grad_norm may be a collective call
        "loss_scale": getattr(optimizer, "cur_scale", None) if engine.fp16_enabled() else None,
        "overflow": bool(getattr(optimizer, "overflow", False)),
        "accumulation": int(engine.gradient_accumulation_steps()),
    }
