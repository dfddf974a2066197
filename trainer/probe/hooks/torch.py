"""Hooks into plain PyTorch: dataloaders, backward, optimizers, loss scalers, clipping, checkpoints.

Each replaces a public function or method with one that reports to the probe and calls the original; without a probe, or
on another thread, it only calls the original.
"""

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from .. import active
from ..active import mine, switched_on
from ..events import TorchEvents
from ..guard import log_error
from ..replace import replace, replace_in_package
from . import eval_mode, reducer
from .imports import after_import

_installed = False


def install(_module: ModuleType) -> None:
    """Install every hook, once. PyTorch has been imported."""
    global _installed
    if _installed:
        return
    _installed = True
    import torch
    from torch.optim import Optimizer
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    reducer.install(torch)
    replace(_BaseDataLoaderIter, "__next__", _fetching)
    replace(torch.autograd, "backward", _backward)
    _keep_scriptable(torch.autograd.backward)
    replace(torch, "save", _saving)
    replace(Optimizer, "__init__", _making_optimizer)
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


def _keep_scriptable(function: Callable[..., Any]) -> None:
    """Let TorchScript, which finds functions by their ids, find the operator of a function that was replaced."""
    try:
        from torch.jit._builtins import _find_builtin, _register_builtin

        operator = _find_builtin(inspect.unwrap(function))
        if operator is not None:
            _register_builtin(function, operator)
    except Exception as error:
        log_error("TorchScript does not find replaced functions", error)


def scoped(phase: str) -> Callable[[Any], Callable[..., Any]]:
    """Return a wrapper that sets ``phase`` for the length of the call."""

    def make(original: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            events = mine()
            if events is None:
                return original(*args, **kwargs)
            with events.phase(phase):
                return original(*args, **kwargs)

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
        events = mine()
        if events is None:
            return original(self)
        events.fetching(self)
        try:
            found = original(self)
        except StopIteration:
            events.exhausted(self)
            raise
        events.fetched(found)
        return found

    return __next__


def _backward(original: Any) -> Callable[..., Any]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        events = mine() or _adopted(updates=False)
        if events is None or events.in_backward:
            return original(tensors, *args, **kwargs)
        given = tensors if isinstance(tensors, list | tuple) else (tensors,)
        losses = [one for one in given if isinstance(one, Tensor)]  # a graph's edge is a tuple, too
        with events.backward(losses):
            return original(tensors, *args, **kwargs)

    return backward


def _making_optimizer(original: Any) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        active.become_rank()
        original(self, *args, **kwargs)
        events, own = active.events, mine()
        if events is not None:
            events.made_optimizer(self, sys._getframe(1) if own is not None else None)

    return __init__


def _zeroing(original: Any) -> Callable[..., Any]:
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        events = mine()
        if events is not None:
            events.zeroing(self)
        return original(self, *args, **kwargs)

    return zero_grad


def _before_optimizer(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Begin an update; return the arguments with the closure wrapped, so that its work is not the update's."""
    events = mine() or _adopted()
    return _with_closure(args, kwargs) if events is not None and events.stepping(optimizer) else None


def _with_closure(args: Any, kwargs: Any) -> Any:
    """Return the arguments of ``Optimizer.step`` (the optimizer first) with the closure wrapped; None: no closure."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return None
    wrapped = _closure(closure)
    return ((args[0], wrapped, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": wrapped})


def _closure(original: Any) -> Callable[..., Any]:
    def closure(*args: Any, **kwargs: Any) -> Any:
        events = mine()
        if events is None:
            return original(*args, **kwargs)
        with events.closure():
            return original(*args, **kwargs)

    return closure


def _adopted(*, updates: bool = True) -> TorchEvents | None:
    """Make this thread the training thread if the former one has ended; return the receiver of its reports."""
    events = switched_on()
    return events if events is not None and events.adopt(updates=updates) else None


def _after_optimizer(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    events = mine()
    if events is not None:
        events.stepped(optimizer)


def clipping(original: Any) -> Callable[..., Any]:
    """Wrap a function that clips gradients and returns their norm: record the norm."""

    def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        events = mine()
        if events is not None:
            events.clipped(norm)
        return norm

    return clip_grad_norm_


def _clipping_with(original: Any) -> Callable[..., Any]:
    def clip_grads_with_norm_(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        events = mine()
        if events is not None:
            events.clipped(total_norm)
        return original(parameters, max_norm, total_norm, *args, **kwargs)

    return clip_grads_with_norm_


def scaling(original: Any) -> Callable[..., Any]:
    """Wrap a method that scales a loss, its only argument: record which loss was scaled."""

    def scale(self: Any, *args: Any, **kwargs: Any) -> Any:
        scaled = original(self, *args, **kwargs)
        events = mine()
        if events is not None:
            loss = args[0] if args else next(iter(kwargs.values()))
            if scaled is not loss:
                events.scaled(scaled, loss)
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
        events = mine()
        if events is None:
            return original(self, optimizer, *args, **kwargs)
        with events.scaler_step(optimizer, getattr(self, "_scale", None)):
            return original(self, optimizer, *args, **kwargs)

    return step


def _on_checkpoints(module: ModuleType) -> None:
    """Hook saving and loading of distributed checkpoints and safetensors; of ``async_save`` only the call itself."""
    for name in ("save", "async_save", "load", "save_file", "save_model"):
        replace_in_package(module, name, scoped("checkpoint"), (module.__name__.rpartition(".")[0],))
