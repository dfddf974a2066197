"""Hooks into plain PyTorch: dataloaders, backward, DDP's reducer, optimizers, loss scalers, clipping, checkpoints.

Each replaces a public function or method with one that reports to the probe and calls the original; without a probe, or
on another thread, it only calls the original.
"""

import inspect
import sys
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter_ns
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .. import active
from ..active import mine, switched_on
from ..events import Code, TorchEvents
from ..guard import logged, replace, replace_in_package
from .imports import after_import

Wrapper = Callable[[Any], Callable[..., Any]]  # Takes a function, returns the one that replaces it

_evaluated: weakref.ref[Module] | None = None


def around(scope: Callable[..., AbstractContextManager[Any]]) -> Wrapper:
    """Return a wrapper that makes the call inside ``with scope(events, *args, **kwargs)``."""

    def make(original: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            events = mine()
            if events is None:
                return original(*args, **kwargs)
            with scope(events, *args, **kwargs):
                return original(*args, **kwargs)

        return call

    return make


def before(report: Callable[..., object], receiver: Callable[[], TorchEvents | None] = mine) -> Wrapper:
    """Return a wrapper that calls ``report(events, *args, **kwargs)`` before the call."""

    def make(original: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            events = receiver()
            if events is not None:
                report(events, *args, **kwargs)
            return original(*args, **kwargs)

        return call

    return make


def after(report: Callable[..., object], receiver: Callable[[], TorchEvents | None] = mine) -> Wrapper:
    """Return a wrapper that calls ``report(events, result, *args, **kwargs)`` after the call."""

    def make(original: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            events = receiver()
            if events is not None:
                report(events, found, *args, **kwargs)
            return found

        return call

    return make


def scoped(phase: str) -> Wrapper:
    """Return a wrapper that sets ``phase`` for the length of the call."""
    return around(lambda events, /, *_, **__: events.phase(phase))


def _note_scaling(events: TorchEvents, scaled: Any, _scaler: Any, *args: Any, **kwargs: Any) -> None:
    loss = args[0] if args else next(iter(kwargs.values()))
    if scaled is not loss:
        events.scaled(scaled, loss)


def _note_norm(events: TorchEvents, norm: Any, /, *args: Any, **kwargs: Any) -> None:
    events.clipped(norm, args[1] if len(args) > 1 else kwargs.get("max_norm"))


clipping = after(_note_norm)  # Wraps a function that clips gradients and returns their norm: records the norm
scaling = after(_note_scaling)  # Wraps a method that scales a loss, its only argument: records which loss was scaled


def evaluating(original: Any) -> Callable[..., Any]:
    """Wrap ``eval``, that of ``Module`` or of a class that overrides it: until ``train`` the script evaluates."""

    def call(self: Module) -> Module:
        global _evaluated
        model = original(self)
        events = mine()
        if events is not None and events.evaluating(self):
            _evaluated = weakref.ref(self)
            replace(Module, "train", _training_again)
        return model

    return call


def _training_again(original: Any) -> Callable[..., Any]:
    """Wrap ``train`` until its next call: it recurses into all modules, and many loops call it at each step."""

    def train(self: Module, mode: bool = True) -> Module:
        if mode and _evaluated is not None and self is _evaluated():
            if Module.train is train:
                Module.train = original
            events = mine()
            if events is not None:
                events.evaluated()
        return original(self, mode)

    return train


class _Backward:
    """The backward under way, to measure waits inside DDP's reducer, which calls NCCL and gloo from C++.

    A hook on the loss queues a callback of the autograd engine. Callbacks run in the order in which they were queued,
    once the whole graph has been computed. The reducer queues its own callback, which waits for its buckets, when its
    last bucket is ready. So the first callback runs when this rank has computed its gradients. The time from then to
    the end of ``backward`` is waiting: of the host on gloo, of the stream under NCCL (between two events). Neither the
    gradients nor the overlap of computation and communication change.
    """

    __slots__ = ("computed_ns", "counted_ns", "event", "events")

    def __init__(self, events: TorchEvents) -> None:
        self.events = events
        self.computed_ns = self.counted_ns = 0
        """When this rank had computed its gradients (0: not yet), and the waiting counted until then."""
        self.event: Any = None

    def begun(self, _gradient: Any) -> None:
        """Queue ``computed`` ahead of the reducer's callbacks; autograd calls this first in a backward."""
        try:
            engine: Any = torch.autograd.Variable
            engine._execution_engine.queue_callback(self.computed)
        except Exception as error:
            self.events.guard.disable(error)

    def computed(self) -> None:
        """Note that all gradients of this rank are computed; on CUDA a thread of the autograd engine calls this."""
        try:
            self.event = self.events.wait_begins()
            self.counted_ns = active.counts.host_ns
            self.computed_ns = perf_counter_ns()
        except Exception as error:
            self.events.guard.disable(error)

    def over(self) -> None:
        """Count the time since ``computed`` as waiting; collectives called meanwhile are not counted twice."""
        if not self.computed_ns:
            return
        counts = active.counts
        counts.host_ns = max(counts.host_ns, self.counted_ns + perf_counter_ns() - self.computed_ns)
        self.events.waited(self.event)


_watching = False
_running: _Backward | None = None


def install_reducer() -> None:
    """Install the hooks; call it before another hook replaces ``torch.autograd.backward``."""
    parallel: Any = torch.nn.parallel.DistributedDataParallel
    replace(torch.autograd, "backward", _timed_backward, below=True)
    replace(parallel, "__init__", _making, below=True)
    if hasattr(parallel, "_sync_buffers"):  # the forward waits where DDP broadcasts buffers
        replace(parallel, "_sync_buffers", around(_synchronising), below=True)


def _making(original: Any) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        time_reducer()

    return __init__


def time_reducer() -> None:
    """Measure the waits inside DDP's reducer from now on: a module of DDP exists."""
    global _watching
    _watching = True


def _timed_backward(original: Any) -> Callable[..., Any]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        global _running
        if not _watching:
            return original(tensors, *args, **kwargs)
        events = mine() if _running is None else None
        handle = None
        if events is not None:
            start = perf_counter_ns()
            _running = _Backward(events)
            handle = _hook(_running, tensors)
            events.cost(perf_counter_ns() - start)
        if handle is None:
            _running = None if events is not None else _running
            return original(tensors, *args, **kwargs)
        running = _running
        try:
            return original(tensors, *args, **kwargs)
        finally:
            _running = None
            handle.remove()
            if running is not None:
                running.over()

    return backward


@contextmanager
def _synchronising(events: TorchEvents, *_: Any, **__: Any) -> Generator[None]:
    counts = active.counts
    event, counted, start = events.wait_begins(), counts.host_ns, perf_counter_ns()
    try:
        yield
    finally:
        counts.host_ns = max(counts.host_ns, counted + perf_counter_ns() - start)
        events.waited(event)


def _hook(running: _Backward, tensors: Any) -> Any:
    """Register ``running.begun`` on the loss and return the handle; None if that is not possible."""
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(compiled, "compiled_autograd_enabled", False):
        return None  # it would trace the hook
    try:
        loss = tensors[0] if isinstance(tensors, list | tuple) else tensors
        return loss.register_hook(running.begun) if loss.grad_fn is not None else None
    except Exception:  # not a tensor, or one without hooks: the backward itself raises the error
        return None


_installed = False


def install(_module: ModuleType) -> None:
    """Install every hook, once. PyTorch has been imported."""
    global _installed
    if _installed:
        return
    _installed = True
    install_reducer()
    replace(_BaseDataLoaderIter, "__next__", _fetching)
    replace(torch.autograd, "backward", _backward)
    _keep_scriptable(torch.autograd.backward)
    replace(torch, "save", _saving)
    replace(Optimizer, "__init__", _making_optimizer)
    for owner in (Optimizer, Module):
        replace(owner, "zero_grad", _zeroing)
    replace(Module, "eval", evaluating)
    register_optimizer_step_pre_hook(_before_optimizer)
    register_optimizer_step_post_hook(_after_optimizer)
    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
        replace(owner, "clip_grad_norm_", clipping)
        if hasattr(owner, "clip_grads_with_norm_"):
            replace(owner, "clip_grads_with_norm_", before(_clipping_with))
    replace(torch.amp.GradScaler, "__init__", _making_scaler)
    replace(torch.amp.GradScaler, "scale", scaling)
    replace(torch.amp.GradScaler, "step", around(_scaler_step))
    await_forward()
    after_import("torch._dynamo.eval_frame", lambda module: replace(module.OptimizeContext, "__init__", _compiling))
    after_import("torch.export", lambda module: replace(module, "export", _compiling))
    for name in ("torch.distributed.checkpoint.state_dict_saver", "torch.distributed.checkpoint.state_dict_loader"):
        after_import(name, _on_checkpoints)
    after_import("safetensors.torch", _on_checkpoints)


_forward_awaited: Any = None
_compiles = False


def await_forward() -> None:
    """Report the next forward of a module that may train: without a loader, nothing else shows where it begins."""
    global _forward_awaited
    if _forward_awaited is not None or _compiles:
        return

    def called(module: Module, _args: Any) -> None:
        if not torch.is_grad_enabled() or all(not each.requires_grad for each in module.parameters()):
            return
        await_no_forward()
        if module.training:
            active.become_rank()
        events = mine()
        if events is not None:
            events.first_forward(module)

    _forward_awaited = register_module_forward_pre_hook(called)


def _compiling(original: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        global _compiles
        _compiles = True  # compiled code would trace a hook on all modules
        await_no_forward()
        return original(*args, **kwargs)

    return call


def await_no_forward() -> None:
    """Remove the hook: a forward was seen, or an optimizer, whose loop shows them."""
    global _forward_awaited
    handle, _forward_awaited = _forward_awaited, None
    if handle is not None:
        handle.remove()


@logged("TorchScript does not find replaced functions")
def _keep_scriptable(function: Callable[..., Any]) -> None:
    """Let TorchScript, which finds functions by their ids, find the operator of a function that was replaced."""
    from torch.jit._builtins import _find_builtin, _register_builtin

    operator = _find_builtin(inspect.unwrap(function))
    if operator is not None:
        _register_builtin(function, operator)


def _saving(original: Any) -> Callable[..., Any]:
    """Wrap ``torch.save``. Pickling a tensor calls it for its storage (``broadcast_object_list``): no checkpoint."""
    checkpoint = scoped("checkpoint")(original)

    def save(*args: Any, **kwargs: Any) -> Any:
        pickled = sys._getframe(1).f_globals.get("__name__") == "torch.storage"
        return (original if pickled else checkpoint)(*args, **kwargs)

    return save


_FORWARD, _FORWARD_ENDS, _FETCHING, _FETCHED, _BACKWARD, _BACKWARD_ENDS, _STEPPING, _STEPPED, _ZEROING = map(
    int,
    (
        *(Code.FORWARD, Code.FORWARD_ENDS),
        *(Code.FETCHING, Code.FETCHED, Code.BACKWARD, Code.BACKWARD_ENDS),
        *(Code.STEPPING, Code.STEPPED, Code.ZEROING),
    ),
)
"""Events that go to ``TorchEvents.follows`` first: between two of them the training fills all caches, and each further
function that an event calls takes one to three microseconds."""


def _fetching(original: Any) -> Callable[..., Any]:
    def __next__(self: Any) -> Any:  # noqa: N807
        events = active.events
        if events is None:
            return original(self)
        if not events.follows(_FETCHING, self):
            events = mine()
            if events is None:
                return original(self)
            events.fetching(self)
        try:
            found = original(self)
        except StopIteration:
            events.exhausted(self)
            raise
        if not events.follows(_FETCHED, None, found):
            events.fetched(found)
        return found

    return __next__


def forwarding(framework: str = "", *, always: bool = False) -> Wrapper:
    """Return a wrapper of a model's forward, reported as ``Events.forward`` has it."""

    def make(original: Any) -> Callable[..., Any]:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            events = active.events
            if events is not None and events.follows(_FORWARD, self, (args, kwargs, framework, always)):
                try:
                    found = original(self, *args, **kwargs)
                except BaseException as error:
                    events.forward_failed(error)
                    raise
                if not events.follows(_FORWARD_ENDS):
                    events.forward_ends()
                return found
            events = mine()
            if events is None:
                return original(self, *args, **kwargs)
            with events.forward(self, args, kwargs, framework, always=always):
                return original(self, *args, **kwargs)

        return forward

    return make


def _zeroing(original: Any) -> Callable[..., Any]:
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        events = active.events
        if events is not None and not events.follows(_ZEROING, self):
            events = mine()
            if events is not None:
                events.zeroing(self)
        return original(self, *args, **kwargs)

    return zero_grad


def _backward(original: Any) -> Callable[..., Any]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        events = active.events
        if type(tensors) is Tensor and events is not None and events.follows(_BACKWARD, None, ((tensors,), False)):
            try:
                found = original(tensors, *args, **kwargs)
            except BaseException as error:
                events.backward_failed(error)
                raise
            if not events.follows(_BACKWARD_ENDS):
                events.backward_ends()
            return found
        active.become_rank()
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
        await_no_forward()
        active.become_rank()
        original(self, *args, **kwargs)
        events, own = active.events, mine()
        if events is not None:
            events.made_optimizer(self, sys._getframe(1) if own is not None else None)

    return __init__


def _before_optimizer(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Begin an update; return the arguments with the closure wrapped: its work is not the update's."""
    events = active.events
    if events is None or not events.follows(_STEPPING, optimizer):
        events = mine() or _adopted()
        if events is None or not events.stepping(optimizer):
            return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return None
    wrapped = around(lambda events, /, *_, **__: events.closure())(closure)
    return ((args[0], wrapped, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": wrapped})


def _adopted(*, updates: bool = True) -> TorchEvents | None:
    """Make this thread the training thread if the former one has ended; return the receiver of its reports."""
    events = switched_on()
    return events if events is not None and events.adopt(updates=updates) else None


def _after_optimizer(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    events = active.events
    if events is None or events.follows(_STEPPED, optimizer):
        return
    events = mine()
    if events is not None:
        events.stepped(optimizer)


def _clipping_with(events: TorchEvents, parameters: Any, max_norm: Any, total_norm: Any, *_: Any, **__: Any) -> None:
    events.clipped(total_norm, max_norm)


def _making_scaler(original: Any) -> Callable[..., Any]:
    """Wrap ``GradScaler.__init__``: a subclass may override ``scale``, as FSDP's ``ShardedGradScaler`` does."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        replace(type(self), "scale", scaling)

    return __init__


def _scaler_step(events: TorchEvents, scaler: Any, optimizer: Any, *_: Any, **__: Any) -> AbstractContextManager[Any]:
    """Report ``GradScaler.step``: with infinite gradients it does not call the optimizer, which is a skipped step."""

    def scaled() -> bool:
        states = getattr(scaler, "_per_optimizer_states", {}).values()
        return scaler.is_enabled() and all(each["stage"].name == "READY" for each in states)

    return events.scaler_step(optimizer, getattr(scaler, "_scale", None), scaled)


def _on_checkpoints(module: ModuleType) -> None:
    """Hook saving and loading of distributed checkpoints and safetensors; of ``async_save`` only the call itself."""
    for name in ("save", "async_save", "load", "save_file", "save_model"):
        replace_in_package(module, name, scoped("checkpoint"), (module.__name__.rpartition(".")[0],))
