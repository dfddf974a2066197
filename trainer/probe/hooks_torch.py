"""Hooks into plain PyTorch: dataloaders, backward, optimizers, checkpoints, DDP and FSDP forwards.

Each replaces a public function or method with one that tells the probe and calls the original; without a probe, or on
another thread, it only calls the original.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import active
from .about import describe_model
from .active import mine
from .imports import after_import
from .roles import RANK_PID_ENV

_installed = False


def install() -> None:
    """Install every hook, once. PyTorch has been imported."""
    global _installed
    if _installed:
        return
    _installed = True
    import torch
    from torch.optim import Optimizer
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    replace(_BaseDataLoaderIter, "__next__", _fetching)
    replace(torch.autograd, "backward", _backward)
    replace(torch, "save", scoped("checkpoint"))
    replace(Optimizer, "__init__", _making_optimizer)
    register_optimizer_step_pre_hook(_before_optimizer)
    register_optimizer_step_post_hook(_after_optimizer)
    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
        replace(owner, "clip_grad_norm_", _clipping)
    replace(torch.amp.GradScaler, "scale", _scaling)
    replace(torch.amp.GradScaler, "step", _scaled_step)
    replace(torch.nn.parallel.DistributedDataParallel, "forward", _parallel_forward("ddp"))
    after_import("torch.distributed.fsdp.fully_sharded_data_parallel", _on_fsdp)
    after_import("torch.distributed.fsdp._fully_shard._fully_shard", _on_fully_shard)


def replace(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Replace ``owner.name`` by ``make(original)``, keeping its name and signature."""
    original = getattr(owner, name)
    if hasattr(original, "_ftmon"):
        return
    wrapped = functools.wraps(original)(make(original))
    wrapped._ftmon = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def scoped(phase: str) -> Callable[[Any], Callable[..., Any]]:
    """Make a wrapper that is in ``phase`` for the length of the call."""

    def make(original: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            probe = mine()
            before = probe.open_scope(phase) if probe is not None else None
            try:
                return original(*args, **kwargs)
            finally:
                if probe is not None and before is not None:
                    probe.close_scope(before)

        return call

    return make


def _fetching(original: Any) -> Callable[..., Any]:
    def __next__(self: Any) -> Any:  # noqa: N807
        probe = mine()
        if probe is None:
            return original(self)
        probe.fetching(self)
        found = original(self)
        probe.fetched(found)
        return found

    return __next__


def _backward(original: Any) -> Callable[..., Any]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        probe = mine()
        if probe is None:
            return original(tensors, *args, **kwargs)
        loss = tensors[0] if isinstance(tensors, list | tuple) and len(tensors) == 1 else tensors
        # With DeepSpeed 0.18's loss.backward() the engine scales gradients by itself: the losses are unscaled.
        outermost = probe.going_backward(loss, False if probe.engine_steps and not probe.sum_losses else None)
        try:
            return original(tensors, *args, **kwargs)
        finally:
            if outermost:
                probe.went_backward()

    return backward


def _making_optimizer(original: Any) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        become_rank()
        original(self, *args, **kwargs)

    return __init__


def become_rank() -> None:
    """A process that builds an optimizer trains: where it is not yet known to be a rank, it is one from now on."""
    if active.probe is not None or active.forked:
        return
    import os

    if os.environ.get(RANK_PID_ENV) or not os.environ.get("FTMON_RUN"):
        return
    from .about import About
    from .begin import begin_rank
    from .redirect import redirect_output

    os.environ[RANK_PID_ENV] = str(os.getpid())
    redirect_output(About.of_this_process().rank)
    begin_rank()


def _before_optimizer(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    probe = mine()
    if probe is None:
        if active.probe is None or probe_is_elsewhere():
            return
        probe = active.probe
    if probe.in_update:
        return
    if probe.primary is None:
        probe.primary = optimizer
    groups = optimizer.param_groups
    lr = groups[0].get("lr") if groups and optimizer is probe.primary else None
    probe.updating(lr)
    probe.updater = optimizer


def probe_is_elsewhere() -> bool:
    """Tell whether training is known to happen on another thread; before the first update, the updating one wins."""
    probe = active.probe
    if probe is None or not probe.enabled or probe.tracker.step or probe.engine_steps:
        return True
    probe.adopt_thread()
    return False


def _after_optimizer(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    probe = mine()
    if probe is None or probe.updater is not optimizer:
        return
    if optimizer is probe.primary and not probe.engine_steps:
        probe.updated()
    else:
        probe.not_updated()


def _clipping(original: Any) -> Callable[..., Any]:
    def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        probe = mine()
        if probe is not None and not probe.engine_steps:
            probe.report(grad_norm=norm)
        return norm

    return clip_grad_norm_


def _scaling(original: Any) -> Callable[..., Any]:
    def scale(self: Any, outputs: Any) -> Any:
        scaled = original(self, outputs)
        probe = mine()
        if probe is not None and scaled is not outputs:
            probe.note_scaling(scaled, outputs)
        return scaled

    return scale


def _scaled_step(original: Any) -> Callable[..., Any]:
    """A loss scaler that finds infinite gradients leaves the optimizer alone: a step all the same, and skipped."""

    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        probe = mine()
        before = probe.tracker.step if probe is not None else 0
        found = original(self, optimizer, *args, **kwargs)
        if probe is not None and not probe.engine_steps and probe.tracker.step == before:
            probe.skipped_update(optimizer)
        return found

    return step


def _parallel_forward(framework: str) -> Callable[[Any], Callable[..., Any]]:
    def make(original: Any) -> Callable[..., Any]:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            probe = mine()
            if probe is not None and probe.forward_by in ("", "parallel"):
                if not probe.forward_by:
                    probe.expect_forward("parallel")
                    tell_framework(framework, self)
                probe.forwarding(self.training, args, kwargs)
            return original(self, *args, **kwargs)

        return forward

    return make


def tell_framework(framework: str, model: Any = None) -> None:
    """Say in the rank's hello what is being watched, unless something more telling is known already."""
    probe = active.probe
    if probe is None or not probe.enabled or probe.about.facts["framework"] not in ("pytorch", framework):
        return
    try:
        probe.about.facts["framework"] = framework
        if model is not None:
            model = getattr(model, "module", model)
            probe.about.facts.update(describe_model(model))
            probe.model = weakref.ref(model)
        probe.say_hello()
    except Exception as error:
        probe.disable(error)


def _on_fsdp(module: ModuleType) -> None:
    fsdp: Any = module
    replace(fsdp.FullyShardedDataParallel, "forward", _root_forward)
    replace(fsdp.FullyShardedDataParallel, "clip_grad_norm_", _clipping)


def _root_forward(original: Any) -> Callable[..., Any]:
    """FSDP wraps modules inside modules; only the outermost one's forward is the model's."""
    outer = _parallel_forward("fsdp")(original)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe = mine()
        inside = probe is not None and probe.tracker.phase in ("forward", "backward", "eval") and probe.forward_by
        return (original if inside else outer)(self, *args, **kwargs)

    return forward


def _on_fully_shard(_module: ModuleType) -> None:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")

    def make(original: Any) -> Callable[..., Any]:
        def fully_shard(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            tell_framework("fsdp", found)
            return found

        return fully_shard

    if fsdp is not None and hasattr(fsdp, "fully_shard"):
        replace(fsdp, "fully_shard", make)
