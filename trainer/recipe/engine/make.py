"""Makes DeepSpeed's engine of a run, and the model inside it."""

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

    ``without_weights``: for a dry run, see ``load.make``.
    """
    settings = deepspeed_config(config, world.size, world.on_gpu)
    model = load.make(config, settings, tokens, world, without_weights)
    # From here on each rank draws different dropout.
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
    """Make ZeRO-3 record the order of modules in the next pass; the last one had no backward.

    It records the order in one pass, gathers by it in later ones, and caches permanently which parameters to release
    (``partitioned_param_coordinator.py``, ``__params_to_release``). With the order of a forward alone it keeps nothing
    for the backward, regardless of ``stage3_max_reuse_distance``.
    """
    offload = getattr(engine.optimizer, "parameter_offload", None)
    if offload is not None and not offload.get_param_coordinator().is_invalid_trace():
        offload.get_param_coordinator()._invalidate_trace()


def _learn_order_with_backward(engine: Any) -> None:
    """Keep ZeRO-3 from recording the order of modules in a forward without gradients, as in checks of the model."""
    offload = getattr(engine.optimizer, "parameter_offload", None)
    if offload is None:
        return

    def after(*_: Any) -> None:
        if not torch.is_grad_enabled() and offload.get_param_coordinator().is_record_trace():
            forget_module_order(engine)

    engine.module.register_forward_hook(after)
