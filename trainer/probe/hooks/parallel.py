"""Hooks into PyTorch's parallel training: DDP, FSDP, pipelines, and the end of process groups."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ..active import mine, switched_on
from ..guard import log_error
from ..loop.training import Training
from ..replace import replace, replace_in_package
from .imports import after_import
from .torch import clipping
from .trained_model import report_framework


def install() -> None:
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
            training = mine()
            if training is None or training.state.in_forward or training.state.in_backward:
                return original(self, *args, **kwargs)
            training.manual_updates.go_on()
            _begin_forward(training, framework, self, args, kwargs)
            training.state.in_forward = True
            try:
                return original(self, *args, **kwargs)
            except BaseException:
                training.micro_steps.failed_forward()
                raise
            finally:
                training.state.in_forward = False

        return forward

    return make


def _begin_forward(training: Training, framework: str, module: Any, args: Any, kwargs: Any) -> None:
    state, micro_steps = training.state, training.micro_steps
    try:
        trained = training.forwards.is_trained(module)
        if trained and not state.forward_by:
            micro_steps.expect_forward("parallel")
            report_framework(framework, module)
        # A Trainer or an engine reports itself where the forward of its model begins.
        if state.forward_by == "parallel" or (state.forward_by and not trained):
            micro_steps.forwarding(module, args, kwargs)
    except Exception as error:
        training.guard.disable(error)


def _on_fsdp(module: ModuleType) -> None:
    fsdp: Any = module
    replace(fsdp.FullyShardedDataParallel, "forward", _parallel_forward("fsdp"))
    replace(fsdp.FullyShardedDataParallel, "clip_grad_norm_", clipping)


def _on_fsdp2(module: ModuleType) -> None:
    """Hook ``fully_shard``. The package and the module that defines it have moved between versions of PyTorch."""

    def make(original: Any) -> Callable[..., Any]:
        def fully_shard(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            _note_sharded(found)
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
        training = switched_on()
        if training is not None:
            try:
                _note_divisor(training, self, factor)
            except Exception as error:
                log_error("the divisor of FSDP's gradients is not known", error)

    return set_gradient_divide_factor


def _note_divisor(training: Training, module: Any, factor: float) -> None:
    """Note that the ranks' losses add up, if their gradients do. Experts are sharded over fewer ranks than the rest."""
    state = module._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        mesh = getattr(group, "mesh_info", None)
        ranks = getattr(mesh, "shard_mesh_size", 1) * getattr(mesh, "replicate_mesh_size", 1)
        if ranks > factor > 0:
            training.state.added_ranks = max(training.state.added_ranks, ranks / factor)
            training.state.normalised_over_ranks = True


def _note_sharded(found: Any) -> None:
    """Report the largest module sharded so far as the model: its layers are sharded before it."""
    training = switched_on()
    module: Any = found[-1] if isinstance(found, list | tuple) and found else found
    if training is None or not hasattr(module, "parameters"):
        return
    try:
        known = training.trained.model()
        if known is None or sum(1 for _ in module.parameters()) >= sum(1 for _ in known.parameters()):
            report_framework("fsdp", module)
    except Exception as error:
        training.guard.disable(error)


def _on_process_groups(module: ModuleType) -> None:
    """Note the backend before it is destroyed: the rank's hello may be sent later."""

    def make(original: Any) -> Callable[..., Any]:
        def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
            training = switched_on()
            if training is not None:
                training.introduction.note_backend()
            return original(*args, **kwargs)

        return destroy_process_group

    replace_in_package(module, "destroy_process_group", make, ("torch.distributed",))


def _on_pipeline(module: ModuleType) -> None:
    """Hook the stages of PyTorch's pipelines; of several on a rank the lowest is reported."""

    def make(original: Any) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(self, *args, **kwargs)
            training = switched_on()
            if training is not None:
                facts = training.introduction.facts
                known = facts.get("pipeline_stage")  # None after an engine of DeepSpeed without a pipeline
                facts["pipeline_stage"] = self.stage_index if known is None else min(self.stage_index, known)

        return __init__

    stage: Any = module
    replace(stage._PipelineStageBase, "__init__", make)


def _on_schedules(module: ModuleType) -> None:
    """Hook the schedules of PyTorch's pipelines: by default they divide gradients by the number of micro-batches."""

    def make(original: Any) -> Callable[..., Any]:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            training = mine()
            if training is not None:
                divisor = getattr(self, "_n_microbatches", 0) if getattr(self, "scale_grads", True) else 1
                training.tracker.notes.accumulation = divisor
            return original(self, *args, **kwargs)

        return step

    schedules: Any = module
    for each in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        replace(each, "step", make)
