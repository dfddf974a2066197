"""Samples the loss of a batch with a fingerprint of its inputs: equal inputs must give equal losses on all ranks.

After the updates at which parameters are compared (``replicas.due``), the first micro-step of the next step is
recorded. Its inputs are the dataloader's batch and the arguments of the models' forwards until the backward. The
fingerprint is a CRC-32 of tensors on the host, and two sums in double precision over the first ``MOST`` elements of
tensors on a GPU. The kernels are enqueued and their results read later, without waiting. On all other steps
``BatchLosses.current`` is None. Nothing is recorded if ranks may legitimately differ: a random number was drawn between
the first forward and the backward, the model has an active dropout, no forward was seen, or a CUDA graph is captured.
"""

import random
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from time import perf_counter_ns, time
from typing import Any, NamedTuple

import numpy
import torch

from ....protocol.messages.health import BatchLoss
from .. import guard
from ..device import cuda_graphs, device_values, pinned
from ..device.device import Device
from ..device.events import has_passed
from ..phases.tracker import Tracker
from ..rank.context import RankContext
from ..rank.trained import Trained
from .replicas import due

MOST = 1 << 14
"""Elements of one tensor on a GPU that are summed; the copy in double precision uses 128 KiB, twice."""
MOST_BYTES = 1 << 19
"""Bytes read at each end of a tensor on the host."""
MOST_TENSORS = 32
PRECISION = 1e-3
HALF_PRECISION = 1e-2
"""Relative difference of two losses above which rounding and kernel choice do not explain it (TF32 has 10 bits)."""
_DEEPEST = 4
_KEPT = 8


class _Enqueued(NamedTuple):
    step: int
    crc: int
    sums: Any
    loss: Any
    precision: float
    event: Any
    cost_us: int


class Comparison:
    """One micro-step under way, on the training thread."""

    def __init__(self, rank: RankContext, trained: Trained, step: int) -> None:
        self._device = rank.device
        self._trained = trained
        self._step = step
        self._crc = 0
        self._sums: list[Any] = []
        self._tensors = 0
        self._randomness: Any = None
        self._is_half = False
        self._cost_ns = 0

    def add(self, found: Any, is_forward: bool) -> None:
        """Add a dataloader's batch, or the arguments of a forward."""
        begun = perf_counter_ns()
        if is_forward:
            self._is_half = self._is_half or torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu")
            if self._randomness is None:
                self._randomness = _randomness(self._trained.model(), self._device)
        for tensor in _tensors(found, _DEEPEST):
            self._tensors += 1
            if self._tensors <= MOST_TENSORS:
                self._note(tensor)
        self._cost_ns += perf_counter_ns() - begun

    def end(self, loss: Any) -> _Enqueued | None:
        """Return the message to send; None if other ranks' losses may legitimately differ from this one."""
        begun = perf_counter_ns()
        drawn = self._randomness is None or self._randomness != _randomness(self._trained.model(), self._device)
        if drawn or not self._tensors or cuda_graphs.under_way:
            return None
        fetched = device_values.fetch(loss)
        sums: Any = None
        if self._sums:
            with torch.no_grad():
                sums = pinned.fetch(torch.stack(self._sums))
        if fetched is None or (self._sums and sums is None):
            return None
        is_half = self._is_half or _is_half(self._trained.model())
        precision = HALF_PRECISION if is_half else PRECISION
        event = self._device.mark_event()
        self._cost_ns += perf_counter_ns() - begun
        return _Enqueued(self._step, self._crc, sums, fetched, precision, event, self._cost_ns // 1000)

    def _note(self, tensor: Any) -> None:
        self._crc = zlib.crc32(f"{tuple(tensor.shape)}{tensor.dtype}".encode(), self._crc)
        if tensor.numel() == 0:
            return
        if tensor.is_cuda:
            with torch.no_grad():
                part = first_elements(tensor.detach(), MOST).double()
                self._sums += [part.sum(), part.dot(torch.arange(1, len(part) + 1, device=part.device).double())]
            return
        part = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        for piece in (part[:MOST_BYTES], part[MOST_BYTES:][-MOST_BYTES:]):
            self._crc = zlib.crc32(piece.numpy().tobytes(), self._crc)


class BatchLosses:
    """Begins comparisons on the training thread, and makes messages of them on the publisher's.

    Args:
        rank: this rank.
        tracker: the phase machine.
        trained: engine, model and optimizer that the rank trains.
    """

    def __init__(self, rank: RankContext, tracker: Tracker, trained: Trained) -> None:
        self._rank = rank
        self._tracker = tracker
        self._trained = trained
        self.current: Comparison | None = None
        """Collects the inputs and the loss of the current micro-step; None on most steps."""
        self._enqueued: deque[_Enqueued] = deque(maxlen=_KEPT)
        self._off = False

    def arm(self, step: int, is_comparable: bool) -> None:
        """Record the first micro-step after this update, if one is due.

        Args:
            step: the number of the update.
            is_comparable: whether hooks see the start of forwards, and each step has one update.
        """
        if self._off or self._rank.world_size < 2 or not due(step) or not is_comparable:
            return
        if not self._tracker.watchers and len(self._enqueued) < _KEPT:
            self.current = Comparison(self._rank, self._trained, step + 1)

    def add(self, found: Any, is_forward: bool) -> None:
        """Add inputs to the current comparison; an error only disables comparisons."""
        try:
            if self.current is not None:
                self.current.add(found, is_forward)
        except Exception as error:
            self._give_up(error)

    def end(self, loss: Any) -> None:
        """End the current comparison with the loss that a backward starts from."""
        comparison, self.current = self.current, None
        try:
            enqueued = comparison.end(loss) if comparison is not None else None
            if enqueued is not None:
                self._enqueued.append(enqueued)
                self._tracker.cost_ns += enqueued.cost_us * 1000
        except Exception as error:
            self._give_up(error)

    def ready(self) -> list[BatchLoss]:
        """Return the comparisons whose values the device has copied; for the publisher thread."""
        found: list[BatchLoss] = []
        while self._enqueued:
            try:
                if not has_passed(self._enqueued[0].event):
                    break
                found += self._messages(self._enqueued.popleft())
            except (RuntimeError, IndexError):
                self._enqueued.clear()
        return found

    def _messages(self, enqueued: _Enqueued) -> list[BatchLoss]:
        inputs = f"{enqueued.crc:08x}"
        if enqueued.sums is not None:
            inputs += "".join(f" {value:.12g}" for value in enqueued.sums.tensor().tolist())
            inputs = f"{zlib.crc32(inputs.encode()):08x}{enqueued.crc:08x}"
        if self._rank.device.events is not None:
            self._rank.device.events.recycle(enqueued.event)
        loss = device_values.read(enqueued.loss)
        if loss is None:
            return []
        return [BatchLoss(self._rank.rank, enqueued.step, time(), inputs, loss, enqueued.precision, enqueued.cost_us)]

    def _give_up(self, error: Exception) -> None:
        self._off, self.current = True, None
        guard.log_error("comparing losses of equal batches is given up", error)


def first_elements(tensor: Any, most: int) -> Any:
    """Return a tensor's first ``most`` elements as a vector, copying at most twice as many, whatever the layout."""
    while tensor.dim() > 1 and tensor.numel() > most:
        rows = -(-most * tensor.size(0) // tensor.numel())
        if rows > 1:
            tensor = tensor[:rows]
            break
        tensor = tensor[0]
    return tensor.reshape(-1)[:most]


def _tensors(found: Any, depth: int) -> Iterator[Any]:
    if isinstance(found, torch.Tensor):
        if found.layout == torch.strided and not found.is_nested and type(found) in (torch.Tensor, torch.nn.Parameter):
            yield found
        return
    if depth == 0:
        return
    if isinstance(found, Mapping):
        items: Any = found.values()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    elif isinstance(found, list | tuple):
        items = found  # pyright: ignore[reportUnknownVariableType]
    else:
        return
    for item in items:
        yield from _tensors(item, depth - 1)


def _randomness(model: Any, device: Device) -> Any:
    """Return a value that changes when a random number is drawn; a unique value if that cannot be determined."""
    if _has_dropout(model):
        return float("nan")
    keys: Any = numpy.random.get_state()
    found: list[Any] = [
        zlib.crc32(torch.default_generator.get_state().numpy().tobytes()),
        hash(random.getstate()),
        zlib.crc32(keys[1]),
        keys[2],
    ]
    if device.events is not None:
        generator: Any = torch.cuda.default_generators[device.memory.device_index]
        found.append(generator.get_offset())
    return found


def _has_dropout(model: Any) -> bool:
    """Return whether a dropout is active: some libraries draw from their own generators and restore them."""
    return model is not None and any(
        "Dropout" in type(module).__name__ and module.training and getattr(module, "p", 0) for module in model.modules()
    )


def _is_half(model: Any) -> bool:
    parameter = next(iter(model.parameters()), None) if model is not None else None
    return parameter is not None and parameter.dtype in (torch.bfloat16, torch.float16)
