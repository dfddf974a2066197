"""Numbers that are still on the device: fetched without ever making the training thread wait.

A device tensor is copied into pinned host memory on the current stream, asynchronously and with no allocation on the
device (so the script's peaks stay what they are); the publisher reads it once the step's last event has passed.
"""

from typing import Any

import numpy


def fetch(value: Any) -> Any:
    """Begin to fetch a scalar: returns a float, a pinned tensor to be read later, or None for what is no scalar.

    Args:
        value: a Python number, or a tensor of one element on any device.
    """
    if value is None or isinstance(value, int | float):
        return value
    tensor: Any = value.detach() if hasattr(value, "detach") else None
    if tensor is None or tensor.numel() != 1:
        return None
    if tensor.device.type == "cpu":
        return float(tensor)
    return _to_pinned(tensor)


def fetch_count(mask: Any) -> Any:
    """Begin to count a mask's non-zero elements: an int for a mask on the CPU, else the mask on its way to the host."""
    if mask.device.type == "cpu":
        return int(numpy.count_nonzero(mask.detach().numpy()))  # a tenth of what a torch operator costs
    return _to_pinned(mask.detach())


def read(value: Any) -> float | None:
    """Read what ``fetch`` returned; the copy must have finished. None for nothing, or for what cannot be read."""
    if value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def read_count(value: Any) -> int:
    """Read what ``fetch_count`` returned; the copy must have finished."""
    return value if isinstance(value, int) else int(value.count_nonzero())


def _to_pinned(tensor: Any) -> Any:
    import torch

    if torch.cuda.is_current_stream_capturing():
        return None  # a copy recorded into a CUDA graph would be replayed for ever
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host
