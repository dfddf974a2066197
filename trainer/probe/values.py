"""Numbers that are still on the device: fetched without ever making the training thread wait.

A device tensor is copied into pinned host memory on the current stream, asynchronously and with no allocation on the
device (so the script's peaks stay what they are); the publisher reads it once the step's last event has passed.
Pinning is dear, so the host tensors are used again.
"""

from collections import deque
from typing import Any

import numpy

_NUMBERS = (int, float)
_POOLED_SHAPES = 32
_POOLED_EACH = 256

_pool: dict[Any, deque[Any]] = {}
"""Free pinned tensors by (dtype, shape)."""


def fetch(value: Any) -> Any:
    """Begin to fetch a scalar: returns a float, a pinned tensor to be read later, or None for what is no scalar.

    Args:
        value: a Python number, or a tensor of one element on any device.
    """
    if value is None or isinstance(value, _NUMBERS):
        return value
    tensor: Any = value.detach() if hasattr(value, "detach") else None
    if tensor is None or tensor.numel() != 1:
        return None
    return _to_pinned(tensor) if tensor.is_cuda else float(tensor)


def fetch_count(mask: Any) -> Any:
    """Begin to count a mask's non-zero elements: an int for a mask on the CPU, else the mask on its way to the host."""
    if mask.is_cuda:
        return _to_pinned(mask.detach())
    return int(numpy.count_nonzero(mask.detach().numpy()))  # a tenth of what a torch operator costs


def read(value: Any) -> float | None:
    """Read what ``fetch`` returned; the copy must have finished. None for nothing, or for what cannot be read."""
    if value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    finally:
        _give_back(value)


def read_count(value: Any) -> int:
    """Read what ``fetch_count`` returned; the copy must have finished."""
    if isinstance(value, int):
        return value
    count = int(numpy.count_nonzero(value.numpy()))
    _give_back(value)
    return count


def _to_pinned(tensor: Any) -> Any:
    import torch

    core: Any = torch._C
    if core._cuda_isCurrentStreamCapturing():
        return None  # a copy recorded into a CUDA graph would be replayed for ever
    free = _pool.get((tensor.dtype, tensor.shape))
    try:
        host = free.pop() if free is not None else None
    except IndexError:
        host = None
    if host is None:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host


def _give_back(value: Any) -> None:
    if isinstance(value, _NUMBERS):
        return
    key = (value.dtype, value.shape)
    free = _pool.get(key)
    if free is None:
        if len(_pool) >= _POOLED_SHAPES:
            return  # lengths that differ from batch to batch: PyTorch's own cache of pinned memory serves them
        free = _pool.setdefault(key, deque())
    if len(free) < _POOLED_EACH:
        free.append(value)
