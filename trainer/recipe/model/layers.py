"""The decoder layers of a model, and what training does around the forward of each.

The forward of a layer object is replaced, not the layer: parameter names and the hooks on modules, by which ZeRO-3
gathers parameters, stay as they are. Evaluation and generation run the layer's own forward.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from ....protocol.errors import ConfigError
from ..config.schema import Config
from .compiling import compile_layers
from .offload import HostOffload
from .recompute import MODES, Recompute


class LayerForward:
    """Forward of one decoder layer: with gradients in training it recomputes and offloads, else it is the plain one."""

    def __init__(self, layer: torch.nn.Module, recompute: Recompute | None, offload: HostOffload | None) -> None:
        self._layer = layer
        self._recompute = recompute
        self._offload = offload
        own: Any = type(layer).forward
        # transformers 5.23 wraps it with gradient checkpointing of its own.
        self._plain: Callable[..., Any] = getattr(own, "__wrapped__", own)
        self.in_training = self._plain
        """The function that training calls with the layer and its arguments: the plain forward, or it compiled."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return what the layer's own forward returns."""
        layer = self._layer
        if not (layer.training and torch.is_grad_enabled()):
            return self._plain(layer, *inputs, **named)
        offloading: AbstractContextManager[Any] = nullcontext()
        if self._offload is not None:
            # Of a recomputed layer the inputs alone are saved here.
            offloading = self._offload.hooks(all_sizes=self._recompute is not None)
        with offloading:
            if self._recompute is None:
                return self.in_training(layer, *inputs, **named)
            return self._recompute(lambda *tensors: self.in_training(layer, *tensors, **named), *inputs)


def set_up(inner: Any, config: Config) -> None:
    """Put gradient checkpointing, activation offload and compilation, as configured, around the decoder layers.

    Args:
        inner: transformers' model, without adapters.
        config: the settled configuration.

    Raises:
        ConfigError: the model has no decoder layers that transformers could recompute.
    """
    model = config.model
    settings = ("gradient_checkpointing", "activation_offload", "compile")
    asked = [name for name in settings if getattr(model, name) not in ("none", "off")]
    if not asked:
        return
    layers = decoder_layers(inner)
    if not layers:
        raise ConfigError(f"model.{asked[0]}: {inner.config.model_type} has no decoder layers that transformers marks")
    offload = HostOffload(inner, model.offload_bytes) if model.activation_offload != "none" else None
    inputs_alone = model.activation_offload == "inputs"
    for number, layer in enumerate(layers):
        recompute = MODES.get(model.gradient_checkpointing) if number % model.checkpoint_every == 0 else None
        own = None if inputs_alone and recompute is None else offload
        layer.forward = LayerForward(layer, recompute, own)
    if model.compile == "layers":
        compile_layers(layers, config.zero.stage == 3, model.activation_memory_budget)
        if config.zero.stage == 3 and config.lora.rank:
            # DeepSpeed reduces a layer's gradients once that of its input is known, of which there must be one.
            inner.enable_input_require_grads()
    if model.gradient_checkpointing != "none" and hasattr(inner.base_model, "gradient_checkpointing"):
        # By this flag transformers and the memory report know.
        inner.base_model.gradient_checkpointing = True


def decoder_layers(inner: Any) -> list[Any]:
    """Return the repeated layers of a transformers model, in their order; empty where there are none it knows."""
    return [
        layer
        for block in inner.modules()
        if isinstance(block, torch.nn.ModuleList)
        for layer in block
        if isinstance(layer, GradientCheckpointingLayer)
    ]
