"""Hooks into DeepSpeed's engine. Every way to drive it (plain loop, accelerate, Trainer, pipeline) calls these methods.

The methods are replaced on the class, so engines of subclasses and engines made earlier are covered too.
"""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from .. import active
from ..active import mine, switched_on
from ..loop.training import Training
from ..phases.forwards import updates_parameters
from ..phases.tracker import DRIVEN
from ..rank.batch_share import of_engine
from ..rank.hello import plain
from ..rank.model import dtype_name
from ..replace import replace
from .torch import scaling, scoped
from .trained_model import register_model

_installed = False


def install(become_rank: Callable[[], None]) -> None:
    """Install every hook, once. DeepSpeed has been imported.

    Args:
        become_rank: makes this process a rank if it is to be one and is not yet; called before an engine is made.
    """
    global _installed
    if _installed:
        return
    _installed = True
    from deepspeed.runtime.engine import DeepSpeedEngine

    engine: Any = DeepSpeedEngine
    replace(engine, "__init__", partial(_making, become_rank))
    replace(engine, "forward", _forward)
    replace(engine, "backward", _backward)
    if hasattr(engine, "scale"):
        replace(engine, "scale", scaling)
    replace(engine, "_take_model_step", _take_model_step)
    replace(engine, "step", _step)
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    replace(GatheredParameters, "__enter__", _gathering)
    for name in ("save_checkpoint", "load_checkpoint", "save_16bit_model", "save_fp16_model"):
        if hasattr(engine, name):
            replace(engine, name, scoped("checkpoint"))


def attach(engine: Any) -> None:
    """Make an engine the one whose updates are this rank's steps, and report it."""
    training = switched_on()
    if training is None:
        return
    state, tracker, trained, facts = training.state, training.tracker, training.trained, training.introduction.facts
    try:
        training.guard.adopt_thread()
        state.engine_steps, state.forward_by, tracker.light = True, "engine", DRIVEN
        tracker.step = max(tracker.step, int(getattr(engine, "global_steps", 0)))
        facts.update(_describe(engine, facts))
        facts["pipeline_stage"] = getattr(engine, "stage_id", None)
        training.updates.made_updater(engine, list(_optimizers_of(engine)))
        trained.engine = weakref.ref(engine)
        trained.partitions = _partitions(engine, facts["zero_stage"], training.rank.world_size)
        trained.tensor_parallel = of_engine(engine)
        register_model(training, engine.module)
        training.phases.check_device()
        training.outbox.send_hello()
    except Exception as error:
        training.guard.disable(error)


def _partitions(engine: Any, zero_stage: int, world_size: int) -> int:
    """Return the number of ranks over which ZeRO partitions the optimizer's state."""
    if not zero_stage:
        return 1
    ranks = getattr(engine, "dp_world_size", None)
    return ranks if isinstance(ranks, int) and ranks > 0 else world_size


def _optimizers_of(engine: Any) -> Iterator[Any]:
    """Return the engine's optimizer and those that it wraps."""
    for name in ("optimizer", "basic_optimizer", "client_optimizer"):
        optimizer = getattr(engine, name, None)
        for _ in range(4):
            if optimizer is None or callable(optimizer):
                break
            yield optimizer
            optimizer = getattr(optimizer, "optimizer", None)


def _describe(engine: Any, known: dict[str, Any]) -> dict[str, Any]:
    precision = "fp32"
    if engine.bfloat16_enabled():
        precision = "bf16"
    elif engine.fp16_enabled():
        precision = "fp16"
    elif getattr(engine, "torch_autocast_enabled", bool)():
        precision = dtype_name(engine.torch_autocast_dtype()) or precision
    return {
        "framework": "transformers" if known.get("framework") == "transformers" else "deepspeed",
        "deepspeed_config": plain(engine.config) if isinstance(engine.config, dict) else None,
        "zero_stage": int(engine.zero_optimization_stage()),
        "micro_batch": int(engine.train_micro_batch_size_per_gpu()),
        "grad_accumulation": int(engine.gradient_accumulation_steps()),
        "precision": precision,
    }


def _making(become_rank: Callable[[], None], original: Any) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        become_rank()
        training = active.training
        state = training.state if training is not None else None
        before = state is not None and state.engine_steps
        if state is not None:
            # Some optimizers step on zero gradients while they are made (bf16, stage 0): no step of the training.
            state.engine_steps = state.making_engine = True
        try:
            original(self, *args, **kwargs)
        finally:
            if state is not None:
                state.engine_steps = before
                state.making_engine = False
        if updates_parameters(self):
            attach(self)

    return __init__


def _forward(original: Any) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        training = mine()
        outermost = training is not None and not (training.state.in_forward or training.state.in_backward)
        if training is not None and outermost:
            training.micro_steps.forwarding(self, args, kwargs)
            training.state.in_forward = True
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            if isinstance(error, RuntimeError | MemoryError):
                _saw(error)
            if training is not None and outermost:
                training.micro_steps.failed_forward()
            raise
        finally:
            if training is not None and outermost:
                training.state.in_forward = False

    return forward


def _backward(original: Any) -> Callable[..., Any]:
    def backward(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        training = mine()
        if training is None:
            return original(self, loss, *args, **kwargs)
        scaled = not (args[1] if len(args) > 1 else kwargs.get("scale_wrt_gas", True))
        outermost = training.micro_steps.going_backward((loss,), scaled, id(self))
        try:
            found = original(self, loss, *args, **kwargs)
        except BaseException as error:
            if isinstance(error, RuntimeError | MemoryError):
                _saw(error)
            if outermost:
                training.micro_steps.failed_backward()
            raise
        if outermost:
            training.micro_steps.went_backward()
        return found

    return backward


def _step(original: Any) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        training = mine()
        if training is None or training.state.in_update:
            return original(self, *args, **kwargs)
        _begin_update(training, self, only_at_boundary=True)
        before = self.global_steps
        try:
            found = original(self, *args, **kwargs)
        except BaseException as error:
            _saw(error)
            training.updates.abandon_update()
            raise
        if self.global_steps != before:
            _end_update(training, self)
        elif training.state.in_update:
            training.updates.not_updated()
        return found

    return step


def _take_model_step(original: Any) -> Callable[..., Any]:
    """Wrap ``_take_model_step``, the update itself: a pipeline engine calls it without ``step``."""

    def take_model_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        training = mine()
        if training is None or training.state.in_update:
            return original(self, *args, **kwargs)
        _begin_update(training, self)
        try:
            found = original(self, *args, **kwargs)
        except BaseException:
            training.updates.abandon_update()
            raise
        _end_update(training, self)
        return found

    return take_model_step


def _gathering(original: Any) -> Callable[..., Any]:
    def __enter__(self: Any) -> Any:  # noqa: N807
        training = mine()
        if training is not None:
            training.tracker.counts.gathers += 1
        return original(self)

    return __enter__


def _is_boundary(engine: Any) -> bool:
    """Return whether ``engine.step()`` will update now (where the caller owns the boundary, every ``step`` does)."""
    managed = getattr(engine, "managed_gradient_accumulation", None)
    return bool(engine.is_gradient_accumulation_boundary()) or (managed is not None and not managed())


def _begin_update(training: Training, engine: Any, only_at_boundary: bool = False) -> None:
    try:
        if only_at_boundary and not _is_boundary(engine):
            return
        rates = engine.get_lr()
        training.updates.updating(rates[0] if rates else None, engine)
    except Exception as error:
        training.guard.disable(error)


def _end_update(training: Training, engine: Any) -> None:
    try:
        optimizer = engine.optimizer
        training.tracker.notes.accumulation = int(engine.gradient_accumulation_steps())
        training.updates.updated(
            number=int(engine.global_steps),
            grad_norm=getattr(engine, "_global_grad_norm", None),  # get_global_grad_norm may be a collective call
            loss_scale=getattr(optimizer, "cur_scale", None) if engine.fp16_enabled() else None,
            overflow=bool(getattr(optimizer, "overflow", False)),
        )
    except Exception as error:
        training.guard.disable(error)


def _saw(error: BaseException) -> None:
    training = active.training
    if training is not None:
        training.saw_error(error)
