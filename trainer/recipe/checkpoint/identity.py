"""Identity of a checkpoint's model: its parameters, and the frozen weights under adapters."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from ..config.schema import Config
from ..distributed import World
from .manifest import Base

_PIECE = 1 << 24
"""Elements summed at once: 128 MiB as 64-bit integers."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def shapes(model: Any) -> dict[str, list[int]]:
    """Return the full shape of every parameter by name, partitioned or not."""
    return {name: list(getattr(one, "ds_shape", one.shape)) for name, one in model.named_parameters()}


def trained(model: Any) -> list[str]:
    """List the names of the parameters that are trained."""
    return [name for name, one in model.named_parameters() if one.requires_grad]


def base_of(model: Any, config: Config, world: World) -> Base | None:
    """Return the identity of the frozen weights under adapters; None if all weights are trained. All ranks call this.

    Contents are summed as integers, whose sum does not depend on the order: partitions of ZeRO-3 add up to the sum of
    an unpartitioned parameter.
    """
    frozen = [(name, one) for name, one in model.named_parameters() if not one.requires_grad]
    if not config.lora.rank or not frozen:
        return None
    partitioned = hasattr(frozen[0][1], "ds_tensor")
    sums = torch.stack([_sum(one, world.rank).cpu() for _, one in frozen])
    if partitioned:
        dist.all_reduce(sums, group=world.host_group)
    digest = hashlib.sha256()
    for (name, one), total in zip(frozen, sums.tolist(), strict=True):
        shape = list(getattr(one, "ds_shape", one.shape))
        digest.update(f"{name} {shape} {one.dtype} {total}\n".encode())
    return Base(config.model.name, digest.hexdigest()[:32])


def _sum(parameter: Any, rank: int) -> torch.Tensor:
    """Return the sum of a parameter's (or of this rank's part of it) elements, read as integers."""
    tensor: torch.Tensor = parameter.detach()
    if hasattr(parameter, "ds_tensor"):
        part: torch.Tensor = parameter.ds_tensor.detach().flatten()
        # The padding of the last partition is uninitialized.
        valid = max(0, min(part.numel(), int(parameter.ds_numel) - rank * part.numel()))
        tensor = part[:valid]
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64)
    whole = tensor.contiguous().view(_INTEGERS[tensor.element_size()]).flatten()
    # Summing integers first converts all of them to 8 bytes.
    return torch.stack([piece.sum(dtype=torch.int64) for piece in whole.split(_PIECE)]).sum()
