"""Numbers that are still on the device: fetched without ever making the training thread wait.

A device tensor is copied into pinned host memory on the current stream, asynchronously and with no allocation on the
device (so the script's peaks stay what they are); the publisher reads it once the step's last event has passed.
"""

from typing import Any

import numpy

from . import pinned

_NUMBERS = (int, float)


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
    return pinned.fetch(tensor) if tensor.is_cuda else float(tensor)


def fetch_count(mask: Any) -> Any:
    """Begin to count a mask's non-zero elements: an int for a mask on the CPU, else the mask on its way to the host."""
    if mask.is_cuda:
        return pinned.fetch(mask.detach())
    return int(numpy.count_nonzero(mask.detach().numpy()))  # a tenth of what a torch operator costs


def read(value: Any) -> float | None:
    """Read what ``fetch`` returned; the copy must have finished. None for nothing, or for what cannot be read."""
    if not isinstance(value, pinned.Fetched):
        return None if value is None else float(value)
    try:
        return float(value.tensor())
    except (TypeError, ValueError, RuntimeError):
        return None
    finally:
        pinned.give_back(value)


def read_count(value: Any) -> int:
    """Read what ``fetch_count`` returned; the copy must have finished."""
    if isinstance(value, int):
        return value
    count = int(numpy.count_nonzero(value.tensor().numpy()))
    pinned.give_back(value)
    return count
