"""What a batch is made of: its shape, samples, and tokens with and without the pads."""

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch

from . import values
from .raw import Notes

_IDS = ("input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values")
_OF_TOKENS = ("input_ids", "inputs_embeds")
_NOTHING: tuple[Any, Any, bool] = (None, None, False)


def note(notes: Notes, found: Any, is_forward: bool, later: bool = False, fetched: Any = None) -> None:
    """Add one micro-batch to a step's notes.

    Args:
        notes: the step's.
        found: a dataloader's batch, or ``(args, kwargs)`` of a forward.
        is_forward: which of the two.
        later: leave the counting of a mask to the publisher.
        fetched: the batch that the dataloader gave for this forward, where it is known: a mask of the same shape in it
            is the forward's before it went to the device, and need not be fetched from there.
    """
    ids, mask, is_tokens = _find_in_call(*found) if is_forward else _find(found)
    if ids is None:
        return
    shape = list(ids.shape)
    if not shape:
        return
    if not notes.shape or math.prod(shape) >= math.prod(notes.shape):
        notes.shape = shape
    notes.samples += shape[0]
    if not is_tokens:
        return
    padded = math.prod(shape[:2])
    notes.padded_tokens += padded
    if mask is not None and list(mask.shape) == shape[:2]:
        if mask.is_cuda and fetched is not None:
            _, before, _ = _find(fetched)
            if before is not None and before.shape == mask.shape and not before.is_cuda:
                mask = before
        counted = values.fetch_count(mask, later)
        notes.tokens.append(padded if counted is None else counted)
    else:
        notes.tokens.append(padded)  # no mask, or one that is no list of pads: every position counts


def _find_in_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any, bool]:
    found = _find(kwargs) if kwargs else _NOTHING
    for argument in args:
        if found[0] is not None:
            break
        found = _find(argument)
    if found[1] is None and found[2]:
        mask = kwargs.get("attention_mask")
        return (found[0], mask if _is_tensor(mask) else None, True)
    return found


def _find(value: Any) -> tuple[Any, Any, bool]:
    """Find (ids or first tensor, mask or None, whether it holds tokens)."""
    if _is_tensor(value):
        return value, None, _looks_like_ids(value)
    if isinstance(value, Mapping):
        for key in _IDS:
            ids: Any = value.get(key)
            if _is_tensor(ids):
                mask = value.get("attention_mask")
                return ids, mask if _is_tensor(mask) else None, key in _OF_TOKENS
        items: Any = value.values()
    elif isinstance(value, list | tuple):
        items = value
    else:
        return _NOTHING
    for item in items:
        if _is_tensor(item):
            return item, None, _looks_like_ids(item)
    return _NOTHING


def _is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def _looks_like_ids(tensor: Any) -> bool:
    """Whole numbers in two dimensions, [batch, sequence], are taken for token ids."""
    return tensor.dim() == 2 and not tensor.is_floating_point()
