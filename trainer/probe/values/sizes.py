"""Sizes of a rank's model, with which the size of a transient is compared."""

import math
from typing import Any, NamedTuple

from ..rank.model import number_of_elements
from ..rank.trained import Trained


class ModelSizes(NamedTuple):
    """Figures of the model; 0: unknown."""

    parameter_bytes: int = 0
    """One copy of the parameters as the model computes with them (ZeRO-3: gathered)."""
    trainable: int = 0
    """Number of elements that this rank's optimizer updates (its partition under ZeRO)."""
    vocabulary: int = 0
    """Number of entries of the model's vocabulary."""


def model_sizes(trained: Trained) -> ModelSizes:
    """Return the sizes of a rank's model from its parameters' shapes, without reading tensor values."""
    model: Any = trained.model()
    parameters = list(model.parameters()) if model is not None else _of_optimizer(trained.primary())
    sizes = [number_of_elements(parameter) for parameter in parameters]
    pairs = list(zip(sizes, parameters, strict=True))
    trainable = sum(size for size, parameter in pairs if parameter.requires_grad)
    return ModelSizes(
        sum(size * parameter.dtype.itemsize for size, parameter in pairs),
        math.ceil(trainable / trained.partitions),
        _vocabulary(model),
    )


def _of_optimizer(optimizer: Any) -> list[Any]:
    groups = getattr(optimizer, "param_groups", None) or []
    return [parameter for group in groups for parameter in group["params"]]


def _vocabulary(model: Any) -> int:
    config = getattr(model, "config", None)
    for holder in (config, getattr(config, "text_config", None)):
        size = getattr(holder, "vocab_size", None)
        if isinstance(size, int):
            return size
    return 0
