"""Hooks into plain PyTorch: dataloaders, backward, optimizers, checkpoints, DDP and FSDP forwards.

Each replaces a public function or method with one that reports to the probe and calls the original; without a probe, or
on another thread, it only calls the original.
"""

import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType, ModuleType
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from .. import active
from ..active import mine, switched_on
from ..guard import log_error
from ..loop.training import Training
from ..memory.history import watch_script
from ..rank.model import describe_model, dtype_of, own_class, own_model
from ..replace import is_replaced, replace
from ..values import replicas
from ..values.model_flops import model_flops
from . import eval_mode, reducer
from .imports import after_import

_installed = False


def install(become_rank: Callable[[], None]) -> None:
    """Install every hook, once. PyTorch has been imported.

    Args:
        become_rank: makes this process a rank, where it is none and is to be one; it is about to make an optimizer, or
            to compute gradients without one.
    """
    global _installed
    if _installed:
        return
    _installed = True
    import torch
    from torch.optim import Optimizer
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    reducer.install(torch)
    watch_script()
    replace(_BaseDataLoaderIter, "__next__", _fetching)
    replace(torch.autograd, "backward", partial(_backward, become_rank))
    replace(torch.autograd, "grad", partial(_taking_gradients, become_rank))
    replace(torch, "save", _saving)
    replace(Optimizer, "__init__", partial(_making_optimizer, become_rank))
    replace(Optimizer, "zero_grad", _zeroing)
    replace(torch.nn.Module, "zero_grad", _zeroing)
    eval_mode.install()
    register_optimizer_step_pre_hook(_before_optimizer)
    register_optimizer_step_post_hook(_after_optimizer)
    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
        replace(owner, "clip_grad_norm_", _clipping)
        if hasattr(owner, "clip_grads_with_norm_"):
            replace(owner, "clip_grads_with_norm_", _clipping_with)
    replace(torch.amp.GradScaler, "__init__", _making_scaler)
    replace(torch.amp.GradScaler, "scale", scaling)
    replace(torch.amp.GradScaler, "step", _scaled_step)
    replace(torch.nn.parallel.DistributedDataParallel, "__init__", _making_parallel)
    replace(torch.nn.parallel.DistributedDataParallel, "forward", _parallel_forward("ddp"))
    after_import("torch.distributed.fsdp.fully_sharded_data_parallel", _on_fsdp)
    after_import("torch.distributed.fsdp", _on_fsdp2)
    after_import("torch.distributed._composable.fsdp", _on_fsdp2)
    after_import("torch.distributed.pipelining.stage", _on_pipeline)
    after_import("torch.distributed.pipelining.schedules", _on_schedules)
    after_import("torch.distributed.distributed_c10d", _on_process_groups)
    for name in ("torch.distributed.checkpoint.state_dict_saver", "torch.distributed.checkpoint.state_dict_loader"):
        after_import(name, _on_checkpoints)
    after_import("safetensors.torch", _on_checkpoints)


def scoped(phase: str) -> Callable[[Any], Callable[..., Any]]:
    """Make a wrapper that is in ``phase`` for the length of the call."""

    def make(original: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            training = mine()
            before = training.phases.open_scope(phase) if training is not None else None
            try:
                return original(*args, **kwargs)
            finally:
                if training is not None and before is not None:
                    training.phases.close_scope(before)

        return call

    return make


def _saving(original: Any) -> Callable[..., Any]:
    """Pickling a tensor saves its storage in memory, as for ``broadcast_object_list``: no checkpoint."""
    checkpoint = scoped("checkpoint")(original)

    def save(*args: Any, **kwargs: Any) -> Any:
        pickled = sys._getframe(1).f_globals.get("__name__") == "torch.storage"
        return (original if pickled else checkpoint)(*args, **kwargs)

    return save


def _fetching(original: Any) -> Callable[..., Any]:
    def __next__(self: Any) -> Any:  # noqa: N807
        training = mine()
        if training is None:
            return original(self)
        training.manual_updates.go_on()
        training.micro_steps.fetching(self)
        try:
            found = original(self)
        except StopIteration:
            training.micro_steps.exhausted(self)
            training.updates.exhausted()
            raise
        training.micro_steps.fetched(found)
        return found

    return __next__


def _backward(become_rank: Callable[[], None], original: Any) -> Callable[..., Any]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        training = mine() or _adopted(updates=False) or _started(become_rank)
        if training is None or training.state.in_backward:
            return original(tensors, *args, **kwargs)
        given = tensors if isinstance(tensors, list | tuple) else (tensors,)
        losses = [one for one in given if isinstance(one, Tensor)]  # a graph's edge is a tuple, too
        _find_manual_updater(training, losses, sys._getframe(1))
        outermost = training.micro_steps.going_backward(losses)
        try:
            found = original(tensors, *args, **kwargs)
        except BaseException:
            if outermost:
                training.micro_steps.failed_backward()
            raise
        if outermost:
            training.micro_steps.went_backward()
            training.manual_updates.went_backward()
        return found

    return backward


def _taking_gradients(become_rank: Callable[[], None], original: Any) -> Callable[..., Any]:
    """The gradients of one loss by parameters, for no further derivative: a script that sets them itself."""

    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        training = mine()
        if (training is None and active.probe is not None) or (training is not None and training.state.in_backward):
            return original(outputs, inputs, *args, **kwargs)
        if not isinstance(inputs, Tensor | list | tuple | dict):
            inputs = tuple(inputs)  # a model's ``parameters()``, which can be read once
        create_graph = args[2] if len(args) > 2 else kwargs.get("create_graph")
        one = outputs[0] if isinstance(outputs, list | tuple) and len(outputs) == 1 else outputs
        several: Any = inputs.values() if isinstance(inputs, dict) else inputs
        first = inputs if isinstance(inputs, Tensor) else next(iter(several), None)
        if not (isinstance(one, Tensor) and one.numel() == 1 and isinstance(first, Parameter)) or create_graph:
            return original(outputs, inputs, *args, **kwargs)
        training = training or _started(become_rank)
        if training is None:
            return original(outputs, inputs, *args, **kwargs)
        _find_manual_updater(training, [one], sys._getframe(1))
        outermost = training.micro_steps.taking_gradients(one)
        try:
            found = original(outputs, inputs, *args, **kwargs)
        except BaseException:
            if outermost:
                training.micro_steps.failed_backward()
            raise
        if outermost:
            training.micro_steps.went_backward()
            training.manual_updates.went_backward(taken=True)
        return found

    return grad


def _started(become_rank: Callable[[], None]) -> Training | None:
    """Make this process a rank if it trains without an optimizer of PyTorch's, which would have made it one."""
    if active.probe is not None:
        return None
    become_rank()
    return mine()


def _find_manual_updater(training: Training, losses: list[Any], frame: FrameType) -> None:
    """Say in the rank's hello what a script without an optimizer trains, before its first backward."""
    updater = None if training.state.engine_steps else training.manual_updates.going_backward(losses)
    if updater is not None:
        _report_optimized(training, updater, frame)


def _making_optimizer(become_rank: Callable[[], None], original: Any) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        become_rank()
        original(self, *args, **kwargs)
        training = active.training
        if training is not None:
            training.manual_updates.found_optimizer()
            training.updates.found_optimizer(self)
        training = mine()
        if training is not None and not training.state.making_engine:
            training.updates.made_updater(self)
            _report_optimized(training, self, sys._getframe(1))

    return __init__


def _report_optimized(training: Training, optimizer: Any, frame: FrameType) -> None:
    """Say in the rank's hello what a bare optimizer trains, until something more telling is known."""
    if training.trained.model() is not None or training.state.engine_steps:
        return
    try:
        if training.tracker.step:
            training.optimized.forget()
        training.introduction.facts.update(training.optimized.add(optimizer, frame))
        training.outbox.send_hello()
    except Exception as error:
        training.guard.disable(error)


def _zeroing(original: Any) -> Callable[..., Any]:
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        training = mine()
        if training is not None:
            training.manual_updates.zeroing()
            training.updates.zeroing(self)
        return original(self, *args, **kwargs)

    return zero_grad


def _before_optimizer(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Begin an update; returns the arguments, a closure wrapped so that its work is not the update's."""
    training = mine()
    if training is None:
        training = _adopted()
        if training is None:
            return None
    updates = training.updates
    training.manual_updates.found_optimizer()
    if training.state.in_update and updates.updater is not optimizer:
        return None  # a part of an engine's update, or of another optimizer's
    return _with_closure(args, kwargs) if updates.begin_update(optimizer) else None


def _with_closure(args: Any, kwargs: Any) -> Any:
    """Wrap the closure in the arguments of ``Optimizer.step`` (the first is the optimizer); None: there is none."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return None
    wrapped = _closure(closure)
    return ((args[0], wrapped, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": wrapped})


def _closure(original: Any) -> Callable[..., Any]:
    def closure(*args: Any, **kwargs: Any) -> Any:
        training = mine()
        if training is None or not training.state.in_update:
            return original(*args, **kwargs)
        training.updates.open_closure()
        try:
            found = original(*args, **kwargs)
        except BaseException:
            training.updates.close_closure(failed=True)
            raise
        training.updates.close_closure()
        return found

    return closure


def _adopted(*, updates: bool = True) -> Training | None:
    """Make this thread the training thread, unless another one trains: before the first update, or once that one ended.

    Args:
        updates: the thread updates. Before the first update only that shows which thread trains.

    Returns:
        Receiver of the hooks' reports; None if another thread trains, or there is no probe.
    """
    training = switched_on()
    if training is None or training.state.engine_steps:
        return None
    if not training.tracker.step:
        if not updates:
            return None
    elif any(thread.ident == training.guard.thread for thread in threading.enumerate()):
        return None
    training.guard.adopt_thread()
    return training


def _after_optimizer(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    training = mine()
    if training is not None and training.updates.updater is optimizer:
        training.updates.end_update(optimizer)


def _clipping(original: Any) -> Callable[..., Any]:
    def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        training = mine()
        if training is not None and norm is not None and not training.state.engine_steps:
            training.updates.note_grad_norm(norm)
        return norm

    return clip_grad_norm_


def _clipping_with(original: Any) -> Callable[..., Any]:
    def clip_grads_with_norm_(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        training = mine()
        if training is not None and not training.state.engine_steps:
            training.updates.note_grad_norm(total_norm)
        return original(parameters, max_norm, total_norm, *args, **kwargs)

    return clip_grads_with_norm_


def scaling(original: Any) -> Callable[..., Any]:
    """Make a wrapper of a method that scales a loss, its only argument: it records the factor."""

    def scale(self: Any, *args: Any, **kwargs: Any) -> Any:
        scaled = original(self, *args, **kwargs)
        training = mine()
        if training is not None:
            loss = args[0] if args else next(iter(kwargs.values()))
            if scaled is not loss:
                training.micro_steps.note_scaling(scaled, loss)
        return scaled

    return scale


def _making_scaler(original: Any) -> Callable[..., Any]:
    """A subclass may have a ``scale`` of its own, as FSDP's ``ShardedGradScaler`` has."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        replace(type(self), "scale", scaling)

    return __init__


def _making_parallel(original: Any) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        replicas.note_parallel(self)

    return __init__


def _scaled_step(original: Any) -> Callable[..., Any]:
    """A loss scaler that finds infinite gradients leaves the optimizer alone: a step all the same, and skipped."""

    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        training = mine()
        before = training.updaters.updates if training is not None else 0
        found = original(self, optimizer, *args, **kwargs)
        if training is not None and not training.state.engine_steps and training.updaters.updates == before:
            training.updates.skipped_update(optimizer, getattr(self, "_scale", None))
        return found

    return step


def _parallel_forward(framework: str) -> Callable[[Any], Callable[..., Any]]:
    """Make a wrapper of a parallel module's forward. FSDP wraps modules inside modules: the outermost one counts."""

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


def register_model(training: Training, model: Any) -> None:
    """Register the trained model: its name and size for the hello, the model itself for its memory."""
    introduction, trained = training.introduction, training.trained
    introduction.facts.update(describe_model(model, trained.tensor_parallel.ranks))
    introduction.facts["flops"] = model_flops(model, trained.tensor_parallel.ranks)
    introduction.parameter_dtype = dtype_of(model)
    trained.model = weakref.ref(getattr(model, "module", model))
    trained.shifts_labels = own_class(own_model(model)).__name__.endswith(("ForCausalLM", "LMHeadModel"))


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


def report_framework(framework: str, model: Any = None) -> None:
    """Report the framework in the rank's hello, unless a more specific one is known already."""
    training = switched_on()
    if training is None or training.introduction.facts["framework"] not in ("pytorch", framework):
        return
    try:
        training.introduction.facts["framework"] = framework
        if model is not None:
            register_model(training, model)
        training.outbox.send_hello()
    except Exception as error:
        training.guard.disable(error)


def _on_fsdp(module: ModuleType) -> None:
    fsdp: Any = module
    replace(fsdp.FullyShardedDataParallel, "forward", _parallel_forward("fsdp"))
    replace(fsdp.FullyShardedDataParallel, "clip_grad_norm_", _clipping)


def _on_fsdp2(module: ModuleType) -> None:
    """Hook ``fully_shard``. The package and the module that defines it have moved between versions of PyTorch."""

    def make(original: Any) -> Callable[..., Any]:
        def fully_shard(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            _note_sharded(found)
            return found

        return fully_shard

    _replace_in_package(module, "fully_shard", make, ("torch.distributed.fsdp", "torch.distributed._composable"))
    sharded = getattr(module, "FSDPModule", None)
    if hasattr(sharded, "set_gradient_divide_factor"):
        replace(sharded, "set_gradient_divide_factor", _setting_divisor)


def _setting_divisor(original: Any) -> Callable[..., Any]:
    """FSDP is to divide the sum of its ranks' gradients by another number than theirs."""

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


def _on_process_groups(module: ModuleType) -> None:
    """Note the backend before it is destroyed: the rank's hello may be sent later."""

    def make(original: Any) -> Callable[..., Any]:
        def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
            training = switched_on()
            if training is not None:
                training.introduction.note_backend()
            return original(*args, **kwargs)

        return destroy_process_group

    _replace_in_package(module, "destroy_process_group", make, ("torch.distributed",))


def _on_pipeline(module: ModuleType) -> None:
    """Hook the stages of PyTorch's pipelines: a rank may have several."""

    def make(original: Any) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(self, *args, **kwargs)
            training = switched_on()
            if training is not None:
                facts = training.introduction.facts
                facts["pipeline_stage"] = min(self.stage_index, facts.get("pipeline_stage", self.stage_index))

        return __init__

    stage: Any = module
    replace(stage._PipelineStageBase, "__init__", make)


def _on_schedules(module: ModuleType) -> None:
    """Hook the schedules of PyTorch's pipelines: unless told not to, they divide gradients by the micro-batches."""

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


def _on_checkpoints(module: ModuleType) -> None:
    """Hook what saves and loads distributed checkpoints and safetensors; of ``async_save``, what the call waits for."""
    for name in ("save", "async_save", "load", "save_file", "save_model"):
        _replace_in_package(module, name, scoped("checkpoint"), (module.__name__.rpartition(".")[0],))


def _replace_in_package(
    module: ModuleType, name: str, make: Callable[[Any], Callable[..., Any]], packages: tuple[str, ...]
) -> None:
    """Replace a function in its module, if it is there, and in those of its packages that have imported it by name."""
    original = getattr(module, name, None)
    if original is None or is_replaced(original):
        return
    replace(module, name, make)
    for place, other in list(sys.modules.items()):
        if place.startswith(packages) and getattr(other, name, None) is original:
            setattr(other, name, getattr(module, name))


def _note_sharded(found: Any) -> None:
    """A model is sharded layer by layer and as a whole at the end: the largest so far is the model."""
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
