"""Hooks into plain PyTorch: dataloaders, backward, optimizers, loss scalers, clipping, checkpoints.

Each replaces a public function or method with one that reports to the probe and calls the original; without a probe, or
on another thread, it only calls the original.
"""

import inspect
import sys
import threading
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
from ..replace import replace, replace_in_package
from . import eval_mode, reducer
from .imports import after_import

_installed = False


def install(become_rank: Callable[[], None]) -> None:
    """Install every hook, once. PyTorch has been imported.

    Args:
        become_rank: makes this process a rank if it is to be one and is not yet; called before it makes an optimizer
            or computes gradients without one.
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
    _keep_scriptable(torch.autograd.backward, torch.autograd.grad)
    replace(torch, "save", _saving)
    replace(Optimizer, "__init__", partial(_making_optimizer, become_rank))
    replace(Optimizer, "zero_grad", _zeroing)
    replace(torch.nn.Module, "zero_grad", _zeroing)
    eval_mode.install()
    register_optimizer_step_pre_hook(_before_optimizer)
    register_optimizer_step_post_hook(_after_optimizer)
    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
        replace(owner, "clip_grad_norm_", clipping)
        if hasattr(owner, "clip_grads_with_norm_"):
            replace(owner, "clip_grads_with_norm_", _clipping_with)
    replace(torch.amp.GradScaler, "__init__", _making_scaler)
    replace(torch.amp.GradScaler, "scale", scaling)
    replace(torch.amp.GradScaler, "step", _scaled_step)
    for name in ("torch.distributed.checkpoint.state_dict_saver", "torch.distributed.checkpoint.state_dict_loader"):
        after_import(name, _on_checkpoints)
    after_import("safetensors.torch", _on_checkpoints)


def _keep_scriptable(*functions: Callable[..., Any]) -> None:
    """Let TorchScript, which finds functions by their ids, find the operators of functions that were replaced."""
    try:
        from torch.jit._builtins import _find_builtin, _register_builtin

        for function in functions:
            operator = _find_builtin(inspect.unwrap(function))
            if operator is not None:
                _register_builtin(function, operator)
    except Exception as error:
        log_error("TorchScript does not find replaced functions", error)


def scoped(phase: str) -> Callable[[Any], Callable[..., Any]]:
    """Return a wrapper that sets ``phase`` for the length of the call."""

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
    """Wrap ``torch.save``. Pickling a tensor calls it for its storage (``broadcast_object_list``): no checkpoint."""
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
        training.loading.fetching(self)
        try:
            found = original(self)
        except StopIteration:
            training.loading.exhausted(self)
            training.updates.exhausted()
            raise
        training.loading.fetched(found)
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
    """Wrap ``autograd.grad``: gradients of one loss by parameters, without a further derivative, train the model."""

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
    """Make this process a rank if it trains without an optimizer of PyTorch, which would have done that."""
    if active.probe is not None:
        return None
    become_rank()
    return mine()


def _find_manual_updater(training: Training, losses: list[Any], frame: FrameType) -> None:
    """Report in the rank's hello the model that a script without an optimizer trains, before its first backward."""
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
            training.loading.evaluated(trains=False)  # the evaluation of an earlier model has ended
            training.updates.made_updater(self)
            _report_optimized(training, self, sys._getframe(1))

    return __init__


def _report_optimized(training: Training, optimizer: Any, frame: FrameType) -> None:
    """Report in the rank's hello the model that a bare optimizer trains, until a wrapper or engine reports it."""
    if training.trained.model() is not None or training.state.engine_steps:
        return
    try:
        if training.tracker.step:
            training.optimized.forget()
        facts, found = training.introduction.facts, training.optimized.add(optimizer, frame)
        if facts != facts | found:  # a script may make an optimizer for each of its tasks
            facts.update(found)
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
    """Begin an update; return the arguments with the closure wrapped, so that its work is not the update's."""
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
    """Return the arguments of ``Optimizer.step`` (the optimizer first) with the closure wrapped; None: no closure."""
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
    """Make this thread the training thread before the first update, or once the former training thread has ended.

    Args:
        updates: whether the thread updates; before the first update nothing else shows which thread trains.

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


def clipping(original: Any) -> Callable[..., Any]:
    """Wrap a function that clips gradients and returns their norm: record the norm."""

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
    """Wrap a method that scales a loss, its only argument: record which loss was scaled."""

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
    """Wrap ``GradScaler.__init__``: a subclass may override ``scale``, as FSDP's ``ShardedGradScaler`` does."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        replace(type(self), "scale", scaling)

    return __init__


def _scaled_step(original: Any) -> Callable[..., Any]:
    """Wrap ``GradScaler.step``: with infinite gradients it does not call the optimizer, which is a skipped step."""

    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        training = mine()
        before = training.updaters.updates if training is not None else 0
        found = original(self, optimizer, *args, **kwargs)
        if training is not None and not training.state.engine_steps and training.updaters.updates == before:
            training.updates.skipped_update(optimizer, getattr(self, "_scale", None))
        return found

    return step


def _on_checkpoints(module: ModuleType) -> None:
    """Hook saving and loading of distributed checkpoints and safetensors; of ``async_save`` only the call itself."""
    for name in ("save", "async_save", "load", "save_file", "save_model"):
        replace_in_package(module, name, scoped("checkpoint"), (module.__name__.rpartition(".")[0],))
