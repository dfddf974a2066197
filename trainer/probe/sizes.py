"""How large the model is that a rank computes with: what a transient's size is held against."""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .probe import Probe


class ModelSizes(NamedTuple):
    """Figures of the model; 0 where they are not known."""

    parameter_bytes: int = 0
    """One copy of the parameters as the model computes with them (ZeRO-3: gathered)."""
    trainable: int = 0
    """How many numbers this rank's optimizer updates (its partition under ZeRO)."""
    vocabulary: int = 0
    """How many tokens the model knows."""


def model_sizes(probe: "Probe") -> ModelSizes:
    """Measure the rank's model from its parameters' shapes; reads no tensor's values."""
    model: Any = probe.model()
    parameters = list(model.parameters()) if model is not None else _of_optimizer(probe.primary)
    sizes = [int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in parameters]
    pairs = list(zip(sizes, parameters, strict=True))
    trainable = sum(size for size, parameter in pairs if parameter.requires_grad)
    world = _partitions(probe)
    return ModelSizes(
        sum(size * parameter.element_size() for size, parameter in pairs),
        math.ceil(trainable / world),
        _vocabulary(model),
    )


def _of_optimizer(optimizer: Any) -> list[Any]:
    groups = getattr(optimizer, "param_groups", None) or []
    return [parameter for group in groups for parameter in group["params"]]


def _partitions(probe: "Probe") -> int:
    """Over how many ranks ZeRO spreads what the optimizer updates."""
    if not probe.about.facts.get("zero_stage"):
        return 1
    engine: Any = probe.engine()
    world = getattr(engine, "dp_world_size", None)
    return world if isinstance(world, int) and world > 0 else probe.about.world_size


def _vocabulary(model: Any) -> int:
    config = getattr(model, "config", None)
    for holder in (config, getattr(config, "text_config", None)):
        size = getattr(holder, "vocab_size", None)
        if isinstance(size, int):
            return size
    return 0
