"""The ranks that share each sequence, and their exchange.

To DeepSpeed's engine and ZeRO every rank is a data-parallel one. A rank's loss is the sum over its own slice, so the
gradients of all ranks add up to those of the whole batch, as they do without slices.
"""

from typing import Any

import torch
import torch.distributed as dist


class SequenceGroup:
    """Consecutive ranks that hold slices of the same rows."""

    def __init__(self, size: int = 1, rank: int = 0, group: Any = None) -> None:
        """Wrap a process group.

        With a ``size`` of 1 rows are whole, and nothing is exchanged. ``rank`` is this rank's number in the group, and
        of its slice.
        """
        self.size = size
        self.rank = rank
        self._group = group

    def exchange(self, tensor: torch.Tensor, divide: int, join: int) -> torch.Tensor:
        """Send each rank its part of a tensor, and return the parts received (Ulysses, arXiv 2309.14509).

        The gradient is exchanged in the other direction.

        ``tensor`` has the same shape in all ranks. Dimension ``divide`` is divided among them; along ``join`` the
        received parts are concatenated in the order of the ranks.
        """
        result: torch.Tensor = _Exchange.apply(self, tensor, divide, join)
        return result

    def _all_to_all(self, tensor: torch.Tensor, divide: int, join: int) -> torch.Tensor:
        parts = tensor.unflatten(divide, (self.size, -1)).movedim(divide, 0).contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self._group)
        return received.movedim(0, join).flatten(join, join + 1)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, tensor: torch.Tensor, divide: int, join: int) -> torch.Tensor:
        ctx.group, ctx.divide, ctx.join = group, divide, join
        return group._all_to_all(tensor, divide, join)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return None, ctx.group._all_to_all(grad_outputs[0], ctx.join, ctx.divide), None, None
