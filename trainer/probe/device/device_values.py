"""Fetches numbers from the device without ever blocking the training thread.

A device tensor is copied into pinned host memory on the current stream, asynchronously and with no allocation on the
device (so the script's peaks stay what they are); the publisher reads it once the step's last event has passed.
"""

from typing import Any

import numpy
import torch

from . import pinned

_NUMBERS = (int, float)


def fetch(value: Any) -> Any:
    """Begin to fetch a scalar; return a float, a pinned tensor to be read later, or None if it is no scalar.

    Args:
        value: a Python number, or a tensor of one element on any device. A DTensor that is not the same on all ranks
            is no scalar: the probe enters no collective.
    """
    if value is None or isinstance(value, _NUMBERS):
        return value
    if not hasattr(value, "data_ptr"):
        return None
    if (local := getattr(value, "_local_tensor", None)) is not None:
        if not all(placement.is_replicate() for placement in value.placements):
            return None
        value = local
    if value.numel() != 1:
        return None
    return pinned.fetch_scalar(value) if value.is_cuda else float(value.item())


def fetch_count(mask: Any, later: bool = False) -> Any:
    """Begin to count a mask's non-zero elements.

    Args:
        mask: of any shape, on any device; of a DTensor, this rank's part is counted.
        later: defer the counting of a mask on the CPU to ``read_count``: there the host's memory is not measured.

    Returns:
        The count, or the argument of ``read_count``; None if the mask cannot be read.
    """
    mask = getattr(mask, "_local_tensor", mask)
    if mask.is_cuda:
        return pinned.fetch(mask)
    return mask.detach() if later else _count(mask)


def read(value: Any) -> float | None:
    """Read a result of ``fetch``; the copy must have finished. None for None, or if it cannot be read."""
    if not isinstance(value, pinned.Fetched):
        return None if value is None else float(value)
    try:
        return float(value.tensor())
    except (TypeError, ValueError, RuntimeError):
        return None


def read_count(value: Any) -> int:
    """Read a result of ``fetch_count``; the copy must have finished."""
    if isinstance(value, int):
        return value
    if not isinstance(value, pinned.Fetched):
        return _count(value)
    return _count(value.tensor())


def _count(mask: Any) -> int:
    mask = mask.detach()
    try:
        return int(numpy.count_nonzero(mask.numpy()))  # a tenth of the cost of a torch operator
    except TypeError:  # numpy has no bfloat16
        return int(torch.count_nonzero(mask))
