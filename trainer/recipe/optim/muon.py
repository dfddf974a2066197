"""Muon for the hidden matrices of a model, AdamW for the rest.

DeepSpeed's Muon (https://kellerjordan.github.io/posts/muon/) works at every ZeRO stage: at stages 1 to 3 DeepSpeed
orthogonalizes whole gradients before partitioning them. ``torch.optim.Muon`` does not: it would receive flat
partitions.
"""

from typing import Any

import torch

from ..config.schema import Optimizer


def make(model: Any, settings: Optimizer, on_gpu: bool) -> torch.optim.Optimizer:
    """Return the optimizer of a model's trainable parameters.

    ``on_gpu``: compile; on CPU ranks that would take minutes.
    """
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    if not on_gpu:
        torch.compiler.set_stance("force_eager")  # DeepSpeed's functions are decorated with torch.compile
    hidden, matrices, rest = split(model)
    for parameter in hidden:
        parameter.use_muon = True  # read by DeepSpeed's ZeRO optimizers
    adam = {"use_muon": False, "lr": settings.lr, "betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": settings.weight_decay, **adam},
        {"params": rest, "weight_decay": 0.0, **adam},
        {
            "params": hidden,
            "use_muon": True,
            "lr": settings.muon_lr,
            "momentum": settings.muon_momentum,
            "weight_decay": settings.weight_decay,
            "ns_method": "standard",
        },
    ]
    return MuonWithAuxAdam(
        [group for group in groups if group["params"]],
        adam_optimizer=torch.optim.AdamW,
        adam_optimizer_kwargs={"fused": on_gpu, "foreach": False if not on_gpu else None},
    )


def split(model: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the trainable parameters: hidden matrices, other matrices, and those that are no matrix."""
    ends = {id(layer.weight) for layer in model.modules() if isinstance(layer, torch.nn.Embedding)}
    output = model.get_output_embeddings()
    if output is not None:
        ends.add(id(output.weight))
    hidden: list[Any] = []
    matrices: list[Any] = []
    rest: list[Any] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            # Under ZeRO-3 a parameter's own shape is empty; ds_shape is the full one.
            dimensions = len(getattr(parameter, "ds_shape", parameter.shape))
            is_hidden = dimensions == 2 and id(parameter) not in ends
            (hidden if is_hidden else matrices if dimensions >= 2 else rest).append(parameter)
    return hidden, matrices, rest
