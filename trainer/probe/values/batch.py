"""Reads a batch: its shape, samples, and tokens with and without padding."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

import numpy
import torch

from ..device import device_values
from ..phases.marks import Notes

_IDS = ("input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values")
_OF_TOKENS = ("input_ids", "inputs_embeds")
_SEQUENCES = (list, tuple)
_NO_MAPPINGS = (torch.Tensor, list, tuple)
_NOTHING: tuple[Any, Any, bool] = (None, None, False)


_IGNORED = -100
"""The label of positions that a loss leaves out (``ignore_index`` of PyTorch's cross entropy)."""


class OnHost(NamedTuple):
    """What is counted of a batch, in the host's memory; None: it has none there."""

    mask: Any
    labels: Any


def on_host(found: Any) -> OnHost:
    """Return what is counted of a dataloader's batch before it goes to the device."""
    _, mask, _ = _find(found)
    labels = _labels(found, False)
    return OnHost(
        mask if mask is not None and not mask.is_cuda else None,
        labels if labels is not None and not labels.is_cuda else None,
    )


def note(
    notes: Notes,
    found: Any,
    is_forward: bool,
    later: bool = False,
    fetched: OnHost | None = None,
    shifted: bool = False,
) -> None:
    """Add one micro-batch to a step's notes.

    Args:
        notes: notes of the step.
        found: a dataloader's batch, or ``(args, kwargs)`` of a forward.
        is_forward: whether ``found`` is a forward's.
        later: defer the counting of a mask to the publisher.
        fetched: the batch that the dataloader returned for this forward, if known: a mask of the same shape in it
            is the forward's before it went to the device, and need not be fetched from there.
        shifted: the model receives unshifted labels and ignores the first label of each sequence, as causal models do.
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
    labels = _labels(found, is_forward)
    if labels is not None and labels.is_cuda:
        before = fetched.labels if fetched is not None else None
        labels = before if before is not None and before.shape == labels.shape else None
    if labels is not None:
        labels = labels.detach()
        labels = labels[..., 1:] if shifted and labels.dim() > 1 else labels
        notes.labels.append(labels if later else count_labels(labels))
    if not is_tokens:
        return
    padded = math.prod(shape[:2])
    notes.padded_tokens += padded
    if mask is not None and list(mask.shape) == shape[:2]:
        if mask.is_cuda and fetched is not None:
            before = fetched.mask
            if before is not None and before.shape == mask.shape:
                mask = before
        counted = device_values.fetch_count(mask, later)
        notes.tokens.append(padded if counted is None else counted)
    else:
        notes.tokens.append(padded)  # no mask, or not a padding mask: every position counts


def count_labels(labels: Any) -> int:
    """Return the number of labels that a loss averages over; ``labels`` may already be that number."""
    return labels if isinstance(labels, int) else int(numpy.count_nonzero(labels.numpy() != _IGNORED))


def _labels(found: Any, is_forward: bool) -> Any:
    """Return the integer labels in a batch or in ``(args, kwargs)`` of a forward; None if there are none."""
    for holder in (found[1], *found[0]) if is_forward else (found,):
        if _is_mapping(holder):
            labels: Any = holder.get("labels")
            if _is_tensor(labels) and not labels.is_floating_point():
                return labels
    return None


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
    """Return (ids or first tensor, mask or None, whether the tensor holds tokens)."""
    if isinstance(value, torch.Tensor):
        return value, None, _are_ids(value)
    if isinstance(value, _SEQUENCES):
        items: Any = value
    elif _is_mapping(value):
        for key in _IDS:
            ids: Any = value.get(key)
            if _is_tensor(ids):
                mask = value.get("attention_mask")
                return ids, mask if _is_tensor(mask) else None, key in _OF_TOKENS
        items = value.values()
    else:
        return _NOTHING
    for item in items:
        if _is_tensor(item):
            return item, None, _are_ids(item)
    return _NOTHING


def _is_mapping(value: Any) -> TypeGuard[Mapping[str, Any]]:
    # isinstance with an abstract class is several times slower.
    return isinstance(value, dict) or (not isinstance(value, _NO_MAPPINGS) and isinstance(value, Mapping))


def _is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def _are_ids(tensor: Any) -> bool:
    """Return whether a tensor looks like token ids: integers, shape [batch, sequence]."""
    return tensor.dim() == 2 and not tensor.is_floating_point()
