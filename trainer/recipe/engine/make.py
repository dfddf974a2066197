"""DeepSpeed's engine of a run, and the model inside it."""

from typing import Any

import deepspeed
import torch

from ..config.schema import Config
from ..model import load
from ..optim import optimizer
from . import gradient_norm
from .distributed import World
from .ds_config import deepspeed_config


def make_engine(
    config: Config, world: World, tokens: Any, total_steps: int, without_weights: load.Quantize | None = None
) -> tuple[Any, Any]:
    """Return DeepSpeed's engine and the model inside it. All ranks call this.

    Args:
        config: the settled configuration.
        world: the ranks.
        tokens: the tokenizer.
        total_steps: that the learning rate's schedule spans.
        without_weights: for a dry run, which makes a model of the shape of ``model.name``: how it holds weights in 4
            bits.

    Raises:
        ConfigError: the model or the optimizer cannot be made.
    """
    settings = deepspeed_config(config, world.size, world.on_gpu)
    model = load.make(config, settings, tokens, world, without_weights)
    # From here on each rank draws its own dropout.
    torch.manual_seed(config.training.seed + 1 + world.rank)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer.make(model, config, world, world.log),
        lr_scheduler=optimizer.scheduler(config, total_steps),
        config=settings,
    )
    gradient_norm.let_norm_decide(engine.optimizer)
    gradient_norm.compute_together(engine.optimizer)
    _learn_order_with_backward(engine)
    return engine, model


def forget_module_order(engine: Any) -> None:
    """Let ZeRO-3 learn the order of modules from the next pass: the one before had no backward.

    It learns the order from one pass, gathers by it in later ones, and caches for good what it then decides to release
    (``partitioned_param_coordinator.py``, ``__params_to_release``). By the order of a forward alone it keeps nothing
    for the backward, whatever ``stage3_max_reuse_distance`` is.
    """
    offload = getattr(engine.optimizer, "parameter_offload", None)
    if offload is not None and not offload.get_param_coordinator().is_invalid_trace():
        offload.get_param_coordinator()._invalidate_trace()


def _learn_order_with_backward(engine: Any) -> None:
    """Let ZeRO-3 not learn the order of modules from a forward without gradients, as checks of the model make."""
    offload = getattr(engine.optimizer, "parameter_offload", None)
    if offload is None:
        return

    def after(*_: Any) -> None:
        if not torch.is_grad_enabled() and offload.get_param_coordinator().is_record_trace():
            forget_module_order(engine)

    engine.module.register_forward_hook(after)
