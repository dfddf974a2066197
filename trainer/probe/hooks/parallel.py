"""Hooks into PyTorch's parallel training: DDP, FSDP, pipelines, and the end of process groups."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ..active import mine, switched_on
from ..events import TorchEvents
from ..guard import log_error
from ..replace import replace, replace_in_package
from .imports import after_import
from .torch import clipping


def install(_module: ModuleType) -> None:
    """Install the hooks, each when its module is imported."""
    replace(torch.nn.parallel.DistributedDataParallel, "forward", _parallel_forward("ddp"))
    after_import("torch.distributed.fsdp.fully_sharded_data_parallel", _on_fsdp)
    after_import("torch.distributed.fsdp", _on_fsdp2)
    after_import("torch.distributed._composable.fsdp", _on_fsdp2)
    after_import("torch.distributed.pipelining.stage", _on_pipeline)
    after_import("torch.distributed.pipelining.schedules", _on_schedules)
    after_import("torch.distributed.distributed_c10d", _on_process_groups)


def _parallel_forward(framework: str) -> Callable[[Any], Callable[..., Any]]:
    """Return a wrapper of a parallel module's forward. FSDP wraps modules inside modules: the outermost counts."""

    def make(original: Any) -> Callable[..., Any]:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            events = mine()
            if events is None:
                return original(self, *args, **kwargs)
            with events.forward(self, args, kwargs, framework):
                return original(self, *args, **kwargs)

        return forward

    return make


def _on_fsdp(module: ModuleType) -> None:
    fsdp: Any = module
    replace(fsdp.FullyShardedDataParallel, "forward", _parallel_forward("fsdp"))
    replace(fsdp.FullyShardedDataParallel, "clip_grad_norm_", clipping)


def _on_fsdp2(module: ModuleType) -> None:
    """Hook ``fully_shard``. The package and the module that defines it have moved between versions of PyTorch."""

    def make(original: Any) -> Callable[..., Any]:
        def fully_shard(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            events, module = switched_on(), found[-1] if isinstance(found, list | tuple) and found else found
            if events is not None and hasattr(module, "parameters"):
                events.sharded(module)
            return found

        return fully_shard

    replace_in_package(module, "fully_shard", make, ("torch.distributed.fsdp", "torch.distributed._composable"))
    sharded = getattr(module, "FSDPModule", None)
    if hasattr(sharded, "set_gradient_divide_factor"):
        replace(sharded, "set_gradient_divide_factor", _setting_divisor)


def _setting_divisor(original: Any) -> Callable[..., Any]:
    """Wrap ``set_gradient_divide_factor``: FSDP then divides gradients by this factor instead of by its ranks."""

    def set_gradient_divide_factor(self: Any, factor: float) -> None:
        original(self, factor)
        events = switched_on()
        if events is not None:
            try:
                _note_divisor(events, self, factor)
            except Exception as error:
                log_error("the divisor of FSDP's gradients is not known", error)

    return set_gradient_divide_factor


def _note_divisor(events: TorchEvents, module: Any, factor: float) -> None:
    """Note that the ranks' losses add up, if their gradients do. Experts are sharded over fewer ranks than the rest."""
    state = module._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        mesh = getattr(group, "mesh_info", None)
        ranks = getattr(mesh, "shard_mesh_size", 1) * getattr(mesh, "replicate_mesh_size", 1)
        if ranks > factor > 0:
            events.adds_up(ranks / factor)


def _on_process_groups(module: ModuleType) -> None:
    """Note the backend before it is destroyed: the rank's hello may be sent later."""

    def make(original: Any) -> Callable[..., Any]:
        def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
            events = switched_on()
            if events is not None:
                events.leaving_group()
            return original(*args, **kwargs)

        return destroy_process_group

    replace_in_package(module, "destroy_process_group", make, ("torch.distributed",))


def _on_pipeline(module: ModuleType) -> None:
    """Hook the stages of PyTorch's pipelines; of several on a rank the lowest is reported."""

    def make(original: Any) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(self, *args, **kwargs)
            events = switched_on()
            if events is not None:
                events.stage(self.stage_index)

        return __init__

    stage: Any = module
    replace(stage._PipelineStageBase, "__init__", make)


def _on_schedules(module: ModuleType) -> None:
    """Hook the schedules of PyTorch's pipelines: by default they divide gradients by the number of micro-batches."""

    def make(original: Any) -> Callable[..., Any]:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            events = mine()
            if events is not None:
                events.divided(getattr(self, "_n_microbatches", 0) if getattr(self, "scale_grads", True) else 1)
            return original(self, *args, **kwargs)

        return step

    schedules: Any = module
    for each in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        replace(each, "step", make)
