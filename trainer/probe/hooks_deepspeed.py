"""Hooks into DeepSpeed's engine: every way to drive it (plain loop, accelerate, Trainer, pipeline) comes through these.

The methods are replaced on the class, so engines of subclasses and engines made earlier are covered too.
"""

import weakref
from collections.abc import Callable
from typing import Any

from . import about, active
from .active import mine
from .hooks_torch import become_rank, replace, scoped
from .tracker import DRIVEN

_installed = False


def install() -> None:
    """Install every hook, once. DeepSpeed has been imported."""
    global _installed
    if _installed:
        return
    _installed = True
    from deepspeed.runtime.engine import DeepSpeedEngine

    engine: Any = DeepSpeedEngine
    replace(engine, "__init__", _making)
    replace(engine, "forward", _forward)
    replace(engine, "backward", _backward)
    if hasattr(engine, "scale"):
        replace(engine, "scale", _scale)
    replace(engine, "_take_model_step", _take_model_step)
    replace(engine, "step", _step)
    for name in ("save_checkpoint", "load_checkpoint", "save_16bit_model", "save_fp16_model"):
        if hasattr(engine, name):
            replace(engine, name, scoped("checkpoint"))


def attach(engine: Any) -> None:
    """Make an engine the one whose updates are this rank's steps, and say what it is."""
    probe = active.probe
    if probe is None or not probe.enabled:
        return
    try:
        probe.adopt_thread()
        probe.engine_steps, probe.forward_by, probe.tracker.light = True, "engine", DRIVEN
        probe.tracker.step = max(probe.tracker.step, int(getattr(engine, "global_steps", 0)))
        probe.about.facts.update(_describe(engine, probe.about.facts))
        probe.engine, probe.model = weakref.ref(engine), weakref.ref(engine.module)
        probe.look_at_device()
        probe.say_hello()
    except Exception as error:
        probe.disable(error)


def _describe(engine: Any, known: dict[str, Any]) -> dict[str, Any]:
    precision = "fp32"
    if engine.bfloat16_enabled():
        precision = "bf16"
    elif engine.fp16_enabled():
        precision = "fp16"
    return {
        "framework": "transformers" if known.get("framework") == "transformers" else "deepspeed",
        "deepspeed_config": about.plain(engine.config) if isinstance(engine.config, dict) else None,
        "zero_stage": int(engine.zero_optimization_stage()),
        "micro_batch": int(engine.train_micro_batch_size_per_gpu()),
        "grad_accumulation": int(engine.gradient_accumulation_steps()),
        "precision": precision,
        **about.describe_model(engine.module),
    }


def _making(original: Any) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        become_rank()
        probe = active.probe
        before = probe is not None and probe.engine_steps
        if probe is not None:
            # Some optimizers step on zero gradients while they are made (bf16, stage 0): no step of the training.
            probe.engine_steps = True
        try:
            original(self, *args, **kwargs)
        finally:
            if probe is not None:
                probe.engine_steps = before
        if getattr(self, "optimizer", None) is not None:
            attach(self)

    return __init__


def _forward(original: Any) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe = mine()
        if probe is not None:
            probe.forwarding(self.module.training, args, kwargs)
        try:
            return original(self, *args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            _saw(error)
            raise

    return forward


def _backward(original: Any) -> Callable[..., Any]:
    def backward(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        probe = mine()
        if probe is None:
            return original(self, loss, *args, **kwargs)
        scaled = not (args[1] if len(args) > 1 else kwargs.get("scale_wrt_gas", True))
        outermost = probe.going_backward(loss, scaled)
        try:
            return original(self, loss, *args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            _saw(error)
            raise
        finally:
            if outermost:
                probe.went_backward()

    return backward


def _scale(original: Any) -> Callable[..., Any]:
    def scale(self: Any, loss: Any) -> Any:
        scaled = original(self, loss)
        probe = mine()
        if probe is not None and scaled is not loss:
            probe.note_scaling(scaled, loss)
        return scaled

    return scale


def _step(original: Any) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe = mine()
        if probe is None or probe.in_update:
            return original(self, *args, **kwargs)
        _begin_update(probe, self, only_at_boundary=True)
        before = self.global_steps
        try:
            found = original(self, *args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            _saw(error)
            raise
        if self.global_steps != before:
            _end_update(probe, self)
        elif probe.in_update:
            probe.not_updated()
        return found

    return step


def _take_model_step(original: Any) -> Callable[..., Any]:
    """The update proper; a pipeline engine makes it without ``step``."""

    def take_model_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe = mine()
        if probe is None or probe.in_update:
            return original(self, *args, **kwargs)
        _begin_update(probe, self)
        found = original(self, *args, **kwargs)
        _end_update(probe, self)
        return found

    return take_model_step


def _is_boundary(engine: Any) -> bool:
    """Whether ``engine.step()`` will update now (where the caller owns the boundary, every ``step`` does)."""
    managed = getattr(engine, "managed_gradient_accumulation", None)
    return bool(engine.is_gradient_accumulation_boundary()) or (managed is not None and not managed())


def _begin_update(probe: Any, engine: Any, only_at_boundary: bool = False) -> None:
    try:
        if only_at_boundary and not _is_boundary(engine):
            return
        rates = engine.get_lr()
        probe.updating(rates[0] if rates else None)
    except Exception as error:
        probe.disable(error)


def _end_update(probe: Any, engine: Any) -> None:
    try:
        optimizer = engine.optimizer
        probe.updated(
            number=int(engine.global_steps),
            grad_norm=getattr(engine, "_global_grad_norm", None),  # get_global_grad_norm may be a collective call
            loss_scale=getattr(optimizer, "cur_scale", None) if engine.fp16_enabled() else None,
            overflow=bool(getattr(optimizer, "overflow", False)),
        )
    except Exception as error:
        probe.disable(error)


def _saw(error: BaseException) -> None:
    probe = active.probe
    if probe is not None:
        probe.saw_error(error)
