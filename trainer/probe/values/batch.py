"""Reads a batch: its shape, samples, and tokens with and without padding."""

import math
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import numpy
import torch

from ..device import cuda
from ..phases.tracker import Notes
from ..rank.model import Trained, number_of_elements, parameters_of

_IDS = ("input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values")
_OF_TOKENS = ("input_ids", "inputs_embeds")
_SEQUENCES = (list, tuple)
_NO_MAPPINGS = (torch.Tensor, list, tuple)
IGNORED = -100  # The label of positions that a loss leaves out (``ignore_index`` of PyTorch's cross entropy)


class OnHost(NamedTuple):
    """What is counted of a batch, in the host's memory; None: it has none there."""

    mask: Any
    labels: Any
    ids: Any


class Seen(NamedTuple):
    """The tensors of one micro-batch by which silent faults are found; each may be None, or on the device."""

    ids: Any
    mask: Any
    labels: Any
    of_loss: Any = None  # The labels in the loss, where both are known: the loop may have changed those of the batch


class _Found(NamedTuple):
    ids: Any = None
    mask: Any = None
    is_tokens: bool = False


_NOTHING = _Found()


def on_host(found: Any) -> OnHost:
    """Return what is counted of a dataloader's batch before it goes to the device."""
    ids, mask, _ = _find(found)
    mask, labels, ids = (
        tensor if is_dense(tensor) and not tensor.is_cuda else None for tensor in (mask, _labels(found, False), ids)
    )
    return OnHost(mask, labels, ids)


def _seen(ids: Any, mask: Any, labels: Any, fetched: OnHost | None) -> Seen:
    """Return what is examined of a micro-batch: of tensors on the device, the ones that the dataloader returned."""

    def on_host(own: Any, before: Any) -> Any:
        if not is_dense(own):
            return None
        found = before if own.is_cuda and before is not None and before.shape == own.shape else own
        return found.detach() if found.requires_grad else found

    before = fetched or OnHost(None, None, None)
    return Seen(on_host(ids, before.ids), on_host(mask, before.mask), on_host(labels, before.labels))


def note(
    notes: Notes,
    found: Any,
    is_forward: bool,
    later: bool = False,
    fetched: OnHost | None = None,
    shifted: bool = False,
) -> None:
    """Add one micro-batch to a step's notes: a dataloader's batch, or ``(args, kwargs)`` of a forward.

    ``later``: defer the counting of a mask to the publisher. ``fetched`` is the batch that the dataloader returned for
    this forward, if known: a mask of the same shape in it is the forward's before it went to the device, and need not
    be fetched from there. ``shifted``: the model receives unshifted labels and ignores the first label of each
    sequence, as causal models do.
    """
    ids, mask, is_tokens = _find_in_call(*found) if is_forward else _find(found)
    shape = [] if ids is None or ids.is_nested else list(ids.shape)  # a nested tensor's rows differ in length
    notes.samples += int(ids.size(0)) if ids is not None and ids.dim() else 0
    if not shape:
        return
    if not notes.shape or math.prod(shape) >= math.prod(notes.shape):
        notes.shape = shape
    labels = _labels(found, is_forward)
    notes.seen.append(_seen(ids, mask, labels, fetched))
    if labels is not None and labels.is_cuda:
        before = fetched.labels if fetched is not None else None
        labels = before if before is not None and before.shape == labels.shape else None
    if labels is not None:
        labels = labels.detach() if labels.requires_grad else labels
        labels = labels[..., 1:] if shifted and labels.dim() > 1 else labels
        notes.labels.append(labels if later else count_labels(labels))
    if not is_tokens:
        return
    padded = math.prod(shape[:2])
    notes.padded_tokens += padded
    if mask is not None and list(mask.shape) == shape[:2]:
        before = fetched.mask if fetched is not None and mask.is_cuda else None
        if before is not None and before.shape == mask.shape:
            mask = before
        counted = cuda.fetch_count(mask, later)
        notes.tokens.append(padded if counted is None else counted)
    else:
        notes.tokens.append(padded)  # no mask, or not a padding mask: every position counts


def snapshot(found: Any) -> Any:
    """Return a batch as it is now, to be noted later; None: at once, as it is on a device or of an unknown kind."""
    kind = type(found)
    if kind is not dict:
        found = getattr(found, "data", None) if kind.__name__ == "BatchEncoding" else found
        kind = type(found)
    if kind is dict:
        kept: Any = found.copy()
        values = kept.values()
    elif kind is tuple or kind is list:
        kept = values = tuple(found)
    elif isinstance(found, torch.Tensor):
        kept, values = found, (found,)
    else:
        return None
    for value in values:
        if type(value) is not torch.Tensor or value.is_cuda:
            return None
    return kept


def count_labels(labels: Any) -> int:
    """Return the number of labels that a loss averages over; ``labels`` may already be that number."""
    return labels if isinstance(labels, int) else int(numpy.count_nonzero(labels.numpy() != IGNORED))


def _labels(found: Any, is_forward: bool) -> Any:
    for holder in (found[1], *found[0]) if is_forward else (found,):
        if _is_mapping(holder):
            labels: Any = holder.get("labels")
            if is_dense(labels) and not labels.is_floating_point():
                return labels
    return None


def _find_in_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Found:
    found = _find(kwargs) if kwargs else _NOTHING
    for argument in args:
        if found.ids is not None:
            break
        if not isinstance(argument, _SEQUENCES):
            found = _find(argument)
    if found.mask is None and found.is_tokens:
        mask = kwargs.get("attention_mask")
        return found._replace(mask=mask if isinstance(mask, torch.Tensor) else None)
    return found


def _find(value: Any) -> _Found:
    """Return what is read of a batch: its ids, else its first tensor, else what its first mapping has.

    Nothing of lists in lists, which may be samples or the parts of a batch.
    """
    if isinstance(value, torch.Tensor):
        return _Found(value, None, _are_ids(value))
    items: Any = value
    if not isinstance(value, _SEQUENCES):
        fields: Any = value if _is_mapping(value) else getattr(value, "__dict__", {})
        for key in _IDS:
            ids: Any = fields.get(key)
            if isinstance(ids, torch.Tensor):
                mask = fields.get("attention_mask")
                return _Found(ids, mask if is_dense(mask) else None, key in _OF_TOKENS)
        items = fields.values()
    tensor = next((item for item in items if isinstance(item, torch.Tensor)), None)
    if tensor is not None:
        return _Found(tensor, None, _are_ids(tensor))
    # Several mappings of one form may be samples.
    parts = [item for item in items if _is_mapping(item)]
    return _find(parts[0]) if len(parts) == 1 else _NOTHING


def _is_mapping(value: Any) -> TypeGuard[Mapping[str, Any]]:
    # isinstance with an abstract class is several times slower.
    return isinstance(value, dict) or (not isinstance(value, _NO_MAPPINGS) and isinstance(value, Mapping))


def is_dense(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether the probe can read a tensor's values: sparse ones, and other devices' and views, it leaves out."""
    return (
        isinstance(value, torch.Tensor)
        and (value.is_cpu or value.is_cuda)
        and value.layout is torch.strided
        and not (value.is_nested or value.is_conj() or value.is_neg())
    )


def _are_ids(tensor: Any) -> bool:
    """Return whether a tensor looks like token ids: integers, shape [batch, sequence]."""
    return tensor.dim() == 2 and not tensor.is_floating_point()


_MOST = 256


class _Queue:
    __slots__ = ("ahead", "batches")

    def __init__(self) -> None:
        self.batches: deque[OnHost] = deque(maxlen=_MOST)
        self.ahead: int | None = None  # Batches fetched ahead of a step; None: no step has ended yet


class FetchedBatches:
    """Batches delivered by dataloaders, until their forward begins; for the training thread alone.

    Their counted parts are in the host's memory. Some loops fetch batches ahead: accelerate's loader one, a Trainer all
    micro-batches of a step and one more. So forwards use them in the order of their fetches. The first step shows how
    many remain when the first batch of the next step is requested; the script has left out any more than that.
    """

    def __init__(self) -> None:
        self._queue: _Queue | None = None
        self._used: _Queue | None = None  # The queue of the latest forward
        self._notes: Notes | None = None
        self._micro_steps = 0  # Notes of the step of the latest forward, and its micro-steps before that forward
        self._taken: list[OnHost | None] = []  # What the forwards of that step were given
        self._repeated: deque[OnHost | None] | None = None  # During a replay: what its forwards are given again

    def add(self, iterator: Any, notes: Notes, found: Any) -> None:
        """Add a batch of a dataloader's iterator; ``notes``: of the unfinished step."""
        if self._repeated is not None:
            return
        queue: _Queue | None = getattr(iterator, "_ftmon_batches", None)
        if queue is None:
            queue = iterator._ftmon_batches = _Queue()
        self._queue = queue
        # In another pass over the data, whose queue has had no forward, the first batches are all to come.
        if queue is self._used and self._notes is not None and notes is not self._notes:
            self._notes = None
            if queue.ahead is None:
                queue.ahead = len(queue.batches)
            while len(queue.batches) > queue.ahead:
                queue.batches.popleft()
        queue.batches.append(on_host(found))

    def take(self, notes: Notes) -> OnHost | None:
        """Return the batch whose forward begins; None if none was fetched for it, or it had a forward before."""
        is_next = notes is not self._notes
        again = not is_next and notes.micro_steps == self._micro_steps
        self._notes, self._micro_steps = notes, notes.micro_steps
        if self._repeated is not None:
            return self._repeated.popleft() if self._repeated else None
        if is_next:
            self._taken.clear()
        queue = self._used = self._queue
        found = queue.batches.popleft() if not again and queue is not None and queue.batches else None
        self._taken.append(found)
        return found

    @contextmanager
    def repeating(self) -> Generator[None]:
        """For the length of a ``with`` block: fetches are known, and the step's forwards have their batches again."""
        self._repeated = deque(self._taken)
        try:
            yield
        finally:
            self._repeated = None


class ModelSizes(NamedTuple):
    """Figures of the model, with which the size of a transient is compared; 0: unknown."""

    parameter_bytes: int = 0  # One copy of the parameters as the model computes with them (ZeRO-3: gathered)
    trainable: int = 0  # Number of elements that this rank's optimizer updates (its partition under ZeRO)
    vocabulary: int = 0  # Number of entries of the model's vocabulary


def model_sizes(trained: Trained) -> ModelSizes:
    """Return the sizes of a rank's model from its parameters' shapes, without reading tensor values."""
    model: Any = trained.model()
    parameters = list(model.parameters()) if model is not None else parameters_of(trained.primary())
    sizes = [number_of_elements(parameter) for parameter in parameters]
    pairs = list(zip(sizes, parameters, strict=True))
    trainable = sum(size for size, parameter in pairs if parameter.requires_grad)
    return ModelSizes(
        sum(size * parameter.dtype.itemsize for size, parameter in pairs),
        math.ceil(trainable / trained.partitions),
        _vocabulary(model),
    )


def _vocabulary(model: Any) -> int:
    config = getattr(model, "config", None)
    for holder in (config, getattr(config, "text_config", None)):
        size = getattr(holder, "vocab_size", None)
        if isinstance(size, int):
            return size
    return 0
