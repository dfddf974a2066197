"""The decoder layers of a model, and the training's wrapper around each forward.

The forward of a layer object is replaced, not the layer: parameter names and the hooks by which ZeRO-3 gathers
parameters do not change. Evaluation and generation run the layer's own forward.
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
    """Forward of one decoder layer: in training with gradients it recomputes and offloads, else it is the plain one."""

    def __init__(self, layer: torch.nn.Module, recompute: Recompute | None, offload: HostOffload | None) -> None:
        self._layer = layer
        self._recompute = recompute
        self._offload = offload
        own: Any = type(layer).forward
        # transformers 5.23 wraps it with its own gradient checkpointing.
        self._plain: Callable[..., Any] = getattr(own, "__wrapped__", own)
        self.in_training = self._plain
        """Called by training with the layer and its arguments: the plain forward, or its compiled form."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return what the layer's own forward returns."""
        layer = self._layer
        if not (layer.training and torch.is_grad_enabled()):
            return self._plain(layer, *inputs, **named)
        offloading: AbstractContextManager[Any] = nullcontext()
        if self._offload is not None:
            # A recomputed layer saves only its inputs here.
            offloading = self._offload.hooks(all_sizes=self._recompute is not None)
        with offloading:
            if self._recompute is None:
                return self.in_training(layer, *inputs, **named)
            return self._recompute(lambda *tensors: self.in_training(layer, *tensors, **named), *inputs)


def set_up(inner: Any, config: Config) -> None:
    """Set up the configured gradient checkpointing, activation offload and compilation of the decoder layers."""
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
            # DeepSpeed reduces a layer's gradients once its input's gradient is known, so its input must have one.
            inner.enable_input_require_grads()
    if model.gradient_checkpointing != "none" and hasattr(inner.base_model, "gradient_checkpointing"):
        # transformers and the memory report read this flag.
        inner.base_model.gradient_checkpointing = True


def decoder_layers(inner: Any) -> list[Any]:
    """Return the repeated layers of a transformers model, in order; empty if none are found."""
    return [
        layer
        for block in inner.modules()
        if isinstance(block, torch.nn.ModuleList)
        for layer in block
        if isinstance(layer, GradientCheckpointingLayer)
    ]
