"""Computes the loss of a step, as the script optimises it, from the losses that it backpropagated.

A step's gradient is the sum of the gradients of all its backward passes. If the script normalises its losses itself,
they add up: it divides each by the number of micro-batches (``loss / n``, ``loss * (1 / n)``, ``loss /= n``) or by the
step's number of tokens. Otherwise the step's loss is the mean over its micro-batches. Several losses of one micro-batch
add up in both cases. A loop that multiplies each loss by its micro-batch's number of label tokens divides the gradients
by the step's number of them later, as torchtune's recipes do: its loss is the mean over label tokens.

The training thread only reads the first nodes of a loss's autograd graph; ``step_loss`` decides on the publisher's
thread. Reading takes 10 to 25 microseconds, so it is skipped if the result is known: an engine or a Trainer divides, or
the steps so far had one loss each (``LossNotes``).
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..device import device_values
from ..phases.marks import Notes
from ..phases.rounds import LIBRARIES, call_site
from .batch import count_labels

_DEPTH = 6
"""Number of graph nodes read, starting at the loss."""
_CONSTANTS = ("DivBackward0", "MulBackward0")
_SUMS = ("SumBackward0", "SumBackward1")
_SAME_VALUE = ("ToCopyBackward0", "SqueezeBackward0", "ViewBackward0", "CloneBackward0")
_PythonFunction: Any = torch.autograd.function.BackwardCFunction
_TOLERANCE = 1e-3
_SAME = 1e-5
"""Relative difference of a loss and the sum of the losses that it was added up from, in single precision."""
ALONE_STEPS = 20
"""After this many steps with one loss each that is no multiple, the graph of a step's first loss is not read."""


class LossNote(NamedTuple):
    """One loss that a backward started from. Values may still be on the device (see ``values``)."""

    value: Any
    kind: tuple[str, ...] = ()
    """The first operations of its graph. Losses of the same kind are the same loss of different micro-batches."""
    factors: tuple[Any, ...] | None = ()
    """Constants by which the script multiplied it, the last one first; a divisor is negative. None: the graph was not
    read, and ``kind`` has only the first operation."""
    elements: int = 0
    """Number of elements summed before those factors were applied; 0: no sum, or unknown."""
    owner: Any = None
    """The engine whose backward it was; None: a plain ``backward()``."""
    site: Any = None
    """Where the backward was called, and its place among the losses of that call; None: not looked up."""
    is_opaque: bool = False
    """Its graph does not show its computation: a leaf, or the result of an autograd function written in Python."""


_new: Any = tuple.__new__
"""Makes a ``LossNote`` without its Python-level constructor."""


def note_loss(
    loss: Any, owner: Any = None, original: Any = None, read_graph: bool = True, site: Any = None
) -> LossNote:
    """Note a loss as its backward begins.

    Args:
        loss: what the backward starts from.
        owner: the engine whose backward it is.
        original: the unscaled loss, if a loss scaler computed ``loss`` from it.
        read_graph: whether to read the first nodes of the graph, or only the name of the first.
        site: where the backward was called.
    """
    if original is not None:
        loss = original
    node = getattr(loss, "grad_fn", None)
    is_opaque = node is None or isinstance(node, _PythonFunction)
    if read_graph:
        return LossNote(device_values.fetch(loss), *_graph(node), owner, site, is_opaque)
    return _new(LossNote, (device_values.fetch(loss), (type(node).__name__,), None, 0, owner, site, is_opaque))


class LossNotes:
    """Notes the losses of the training thread, and decides which graphs are read."""

    __slots__ = ("_alone", "_several")

    def __init__(self) -> None:
        self._alone = 0
        """Number of steps so far with one loss."""
        self._several = False
        """Whether a step has had several losses."""

    def note(self, notes: Notes, loss: Any, owner: Any, original: Any, is_divided: bool, place: int = 0) -> None:
        """Add a loss to the notes of the current step.

        Args:
            notes: notes of the step.
            loss: what the backward starts from.
            owner: the engine whose backward it is.
            original: the unscaled loss, if a loss scaler computed ``loss`` from it.
            is_divided: whether an engine or a Trainer divides the losses of a step.
            place: which one of the losses of one call of ``backward``.
        """
        if notes.losses:
            self._several = True
            read_graph = not is_divided
        else:
            read_graph = not is_divided and (self._several or self._alone < ALONE_STEPS)
        site = (call_site(sys._getframe(1), LIBRARIES), place) if read_graph else None
        noted = note_loss(loss, owner, original, read_graph, site)
        if not notes.losses and not any(map(_is_multiple, noted.factors or ())):
            self._alone += 1
        notes.losses.append(noted)

    def note_gradients(self, notes: Notes, loss: Any) -> None:
        """Add a loss whose gradients the script takes itself to the notes of the current step."""
        site = call_site(sys._getframe(1), LIBRARIES), 0
        notes.gradient_losses.append(note_loss(loss, site=site))


def _graph(node: Any) -> tuple[tuple[str, ...], tuple[Any, ...], int]:
    kind: list[str] = []
    factors: list[Any] = []
    elements = 0
    on_top = True
    while node is not None and len(kind) < _DEPTH:
        name = type(node).__name__
        kind.append(name)
        if on_top and name in _CONSTANTS:
            factor = _constant(node)
            if factor is None:
                on_top = False
            else:
                factors.append(
                    device_values.fetch(factor) if name == "MulBackward0" else _Divisor(device_values.fetch(factor))
                )
        elif on_top and name not in _SAME_VALUE:
            on_top = False
            elements = _summed(node, name) if factors else 0
        following = node.next_functions
        node = following[0][0] if following else None
    return tuple(kind), tuple(factors), elements


class _Divisor(NamedTuple):
    value: Any


def _is_multiple(factor: Any) -> bool:
    """Return whether a factor may be a number of tokens: above one, or computed on the device."""
    if isinstance(factor, _Divisor):
        return False
    return not isinstance(factor, int | float) or factor > 1


def _constant(node: Any) -> Any:
    """Return the other operand if it is a single number without a gradient; None otherwise."""
    following = node.next_functions
    if len(following) > 1 and following[1][0] is not None:
        return None
    try:
        other = node._saved_other
    except RuntimeError:  # changed in place since, or freed
        return None
    return other if other is not None and other.numel() == 1 else None


def _summed(node: Any, name: str) -> int:
    """Return the number of elements that a reduction by sum covered; 0 for other operations."""
    try:
        if name in _SUMS:
            size = 1
            for length in node._saved_self_sym_sizes:
                size *= int(length)
            return size
        if name.startswith("NllLoss") and node._saved_reduction == 2:
            return int(node._saved_target.numel())
    except (AttributeError, RuntimeError):
        pass
    return 0


def step_loss(notes: Notes) -> float | None:
    """Return a step's loss; None if it had none that could be read. The device must have finished the step.

    A loss, or a micro-batch, may go backward in parts: the micro-steps of ``notes`` are corrected.
    """
    reported, whole, found = _read_all(notes.reported), _read_all(notes.trainer_losses), read_losses(notes)
    if notes.trainer_losses:
        notes.micro_steps = len(notes.trainer_losses)
    if notes.accumulation > 1:  # a pipeline's stage goes backward once for each of its outputs
        notes.micro_steps = min(notes.micro_steps, notes.accumulation)
    if notes.reported_loss is not None:
        return notes.reported_loss
    if reported:
        return sum(reported) / len(reported)
    return sum(whole) if whole else combine(found, notes)


def read_losses(notes: Notes) -> list[LossNote]:
    """Return the losses with plain numbers: divisors as factors, 0 for an unknown factor. Call it once.

    The losses of a micro-batch's chunks are joined; its backwards count as one micro-step of ``notes``.
    """
    found: list[LossNote] = []
    for loss in notes.losses:
        value = device_values.read(loss.value)
        factors = None if loss.factors is None else tuple(map(_read_factor, loss.factors))
        if value is not None:
            found.append(loss._replace(value=value * notes.added_ranks, factors=factors))
    joined = _join_chunks(found)
    notes.micro_steps -= len(found) - len(joined)
    return joined


def _join_chunks(losses: Sequence[LossNote]) -> list[LossNote]:
    """Merge the losses of chunks with the loss after them, if it equals their sum or mean.

    Chunks of a sequence go backward through the output head alone, and an autograd function passes their gradients on
    to the rest of the model (torchtitan's chunked loss). Or a loss goes backward in parts to cached embeddings, and a
    hook of the whole one computes the gradients of the model (sentence-transformers).
    """
    found: list[LossNote] = []
    begin = 0
    """The first loss in ``found`` since the last joined one."""
    for loss in losses:
        first = len(found)
        while first > begin and found[first - 1].kind[:1] == found[-1].kind[:1]:
            first -= 1
        chunks, total = found[first:], sum(chunk.value for chunk in found[first:])
        is_whole = loss.is_opaque and chunks and chunks[0].kind[:1] != loss.kind[:1]
        if is_whole and any(math.isclose(total / count, loss.value, rel_tol=_SAME) for count in (1, len(chunks))):
            elements = [chunk.elements for chunk in chunks]
            whole = chunks[0]._replace(value=loss.value, elements=sum(elements) if all(elements) else 0)
            found[first:] = [whole._replace(owner=loss.owner, site=loss.site)]
            begin = len(found)
        else:
            found.append(loss)
    return found


def combine(losses: Sequence[LossNote], notes: Notes) -> float | None:
    """Return the loss of one step (or of one of its optimizers) from those of its backward passes.

    Args:
        losses: the losses, as returned by ``read_losses``.
        notes: notes of the step.
    """
    if not losses:
        return None
    total = sum(loss.value for loss in losses)
    labels = _label_factors(losses, notes)
    if labels:
        return total / labels
    if len(losses) == 1 or notes.sum_losses:
        return total
    batches = micro_batches(_kinds(losses), notes, [loss.site for loss in losses])
    if notes.accumulation:
        return total / batches  # the engine divides, regardless of the script
    # A loss whose graph was not read counts as divided like the others of its step.
    known = [(loss.factors, loss.elements) for loss in losses if loss.factors is not None]
    factors, elements = [one for one, _ in known], [count for _, count in known]
    if batches < 2 or is_normalised(factors, elements, batches, notes.divisors):
        return total
    return total / batches


def _label_factors(losses: Sequence[LossNote], notes: Notes) -> int:
    """Return the step's number of label tokens if each loss was last multiplied by that of its micro-batch, else 0."""
    factors = [loss.factors for loss in losses if loss.factors]
    if len(factors) != len(losses) or len(notes.labels) != len(losses):
        return 0
    counts = list(map(count_labels, notes.labels))
    are_equal = all(_is_times(count, *each) for each, count in zip(factors, counts, strict=True))
    return sum(counts) if are_equal and max(counts) > 1 else 0


def _is_times(count: int, last: float, *before: float) -> bool:
    """Return whether a loss was multiplied by its number of label tokens, and not divided by that of a step before."""
    return _has((last,), count) and not any(0 < factor * count < 1 - _TOLERANCE for factor in before)


def _kinds(losses: Sequence[LossNote]) -> list[tuple[str, ...]]:
    """Return each loss's kind; a loss whose graph was not read gets the first kind with the same first operation."""
    read = [loss.kind for loss in losses if loss.factors is not None]
    return [
        loss.kind if loss.factors is not None else next((kind for kind in read if kind[:1] == loss.kind), loss.kind)
        for loss in losses
    ]


def micro_batches(kinds: Sequence[tuple[str, ...]], notes: Notes, sites: Sequence[Any] = ()) -> int:
    """Return the number of micro-batches that the losses of these kinds, backpropagated at ``sites``, cover."""
    if notes.accumulation:
        return min(notes.accumulation, len(kinds))
    alike = max(Counter(kinds).values())
    fetched = max(notes.fetches.values(), default=0)
    if fetched:
        alike = min(alike, fetched)
    lines = Counter(sites) if sites and None not in sites else Counter()
    if len(lines) == 1 and fetched == len(kinds):
        return fetched  # one loss of each, whose first operations may differ (the place of cached features)
    # Lines that are each passed equally often: several losses of each micro-batch. One line for all but the last
    # micro-batch, and another for that one, is how DDP's ``no_sync`` is used.
    times = set(lines.values())
    return min(alike, *times) if len(times) == 1 else alike


def is_normalised(
    factors: Sequence[tuple[float, ...]], elements: Sequence[int], batches: int, divisors: set[int]
) -> bool:
    """Return whether the script divided its losses so that they add up to the step's.

    Args:
        factors: for each loss, the constants it was multiplied by.
        elements: for each loss, the number of elements summed before that; 0: unknown.
        batches: number of micro-batches of the step.
        divisors: numbers of micro-batches by which earlier steps divided; a new one is added.
    """
    if not factors or not all(factors):
        return False
    # Equal factors only: if each micro-batch is normalised by its own tokens, the factors differ.
    shared = [factor for factor in factors[0] if all(_has(others, factor) for others in factors)]
    for share in (1 / factor for factor in shared if factor > 0):
        if abs(share - batches) <= _TOLERANCE * batches:
            divisors.add(batches)
            return True
        # The last step of an epoch has fewer micro-batches than the script divides by.
        if any(abs(share - known) <= _TOLERANCE * known for known in divisors if known > batches):
            return True
        # Larger than the elements of any micro-batch: the number of tokens of the whole step.
        if all(elements) and share > max(elements):
            return True
    return False


def _has(factors: tuple[float, ...], factor: float) -> bool:
    return any(abs(other - factor) <= 1e-6 * abs(factor) for other in factors)


def _read_factor(factor: Any) -> float:
    if isinstance(factor, _Divisor):
        value = device_values.read(factor.value)
        return 1 / value if value else 0.0
    return device_values.read(factor) or 0.0


def _read_all(fetched: Sequence[Any]) -> list[float]:
    return [value for value in map(device_values.read, fetched) if value is not None]


def without_device(losses: Sequence[LossNote], is_here: Callable[[Any], bool]) -> list[LossNote]:
    """Return the losses whose numbers are no longer on the device."""
    return [
        loss
        for loss in losses
        if is_here(loss.value)
        and all(is_here(factor.value if isinstance(factor, _Divisor) else factor) for factor in loss.factors or ())
    ]
