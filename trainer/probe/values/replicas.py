"""Checksums of replicated parameters, to check that data-parallel ranks still hold equal ones.

After some updates (``due``) a few kernels are enqueued on the current stream, two for each of at most ``PER_CHECK``
parameters: a sum and a norm in double precision. Nothing waits: the results are copied to pinned memory and read once
the stream has passed them. Which parameters are checked depends only on the step, so all ranks check the same ones;
``parameters / PER_CHECK`` checks cover all of them.

Memory: results are 512 bytes each in the allocator's small pool, and each reduction makes a copy of at most 512 KiB.
All of it is allocated and freed between two steps, where no peak is; reserved memory may grow once by a small segment
of 2 MiB. If the training thread's cost exceeds ``MOST_SHARE`` of the time of ``EVERY`` steps, fewer parameters are
summed; the step's ``probe_us`` includes the cost.

Parameters that are not replicated are never touched: ZeRO-3, FSDP and tensor-parallel shards, pipeline stages, experts.
"""

import weakref
from collections import deque
from collections.abc import Callable
from time import perf_counter_ns, time
from typing import Any, NamedTuple

import torch

from ....protocol.messages.health import Checksum, ParameterSum
from .. import guard
from ..device import cuda_graphs, pinned
from ..device.events import has_passed
from ..phases.pace import Pace
from ..phases.tracker import Tracker
from ..rank.context import RankContext
from ..rank.trained import Trained

PER_CHECK = 16
EARLY_STEPS = 50
EARLY_EVERY = 10
EVERY = 50
MOST = 1 << 16
"""Elements of one parameter summed per check; for a larger parameter, each check sums the next part. PyTorch makes a
double-precision copy of the reduced elements (``make_reduction`` in ReduceOpsUtils.h): 512 KiB."""
MOST_SHARE = 0.003
RENEW_CHECKS = 20
_KEPT = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_wrapped: list[Callable[[], Any]] = []
"""Weak references to all DistributedDataParallel modules."""


class _Enqueued(NamedTuple):
    step: int
    names: list[str]
    values: Any
    event: Any
    cost_us: int


def note_parallel(module: Any) -> None:
    """Register a new DistributedDataParallel module."""
    _wrapped[:] = [known for known in _wrapped if known() is not None]
    _wrapped.append(weakref.ref(module))


def _trains_locally() -> bool:
    """Return whether ranks differ by intention: local SGD averages parameters now and then, and no gradients."""
    for known in _wrapped:
        module = known()
        if module is None:
            continue
        hooks = [getattr(hook, "__name__", "") for hook, _ in getattr(module, "_comm_hooks", ())]
        if not getattr(module, "require_backward_grad_sync", True) or "post_localSGD_hook" in hooks:
            return True
    return False


def due(step: int) -> bool:
    """Return whether checksums are computed after this update; the same on every rank."""
    return step % EARLY_EVERY == 0 and (step <= EARLY_STEPS or step % EVERY == 0)


def turn(step: int) -> int:
    """Return the number of the check after this update, from 0."""
    early = EARLY_STEPS // EARLY_EVERY
    return step // EARLY_EVERY - 1 if step <= EARLY_STEPS else early + step // EVERY - EARLY_STEPS // EVERY - 1


class Replicas:
    """Computes checksums on the training thread, and makes messages of them on the publisher's.

    Args:
        rank: this rank.
        tracker: the phase machine.
        trained: engine, model and optimizer that the rank trains.
        pace: usual time of a step.
    """

    def __init__(self, rank: RankContext, tracker: Tracker, trained: Trained, pace: Pace) -> None:
        self._rank = rank
        self._tracker = tracker
        self._trained = trained
        self._pace = pace
        self._enqueued: deque[_Enqueued] = deque(maxlen=_KEPT)
        self._parameters: list[tuple[str, Callable[[], Any]]] = []
        self._renewed = -RENEW_CHECKS
        self._per_check = PER_CHECK
        self._off = False

    def compute(self, step: int) -> None:
        """Enqueue the checksums of this update, if due; an error only disables checksums."""
        if self._off or self._rank.world_size < 2 or not due(step):
            return
        if cuda_graphs.under_way or self._tracker.watchers or len(self._enqueued) == _KEPT or _trains_locally():
            return
        start = perf_counter_ns()
        try:
            number = turn(step)
            if number - self._renewed >= RENEW_CHECKS or not self._parameters:
                self._renewed = number
                self._parameters = _replicated(self._trained, self._rank.world_size)
            if self._parameters:
                self._enqueue(step, number, start)
        except Exception as error:
            self._off = True
            guard.log_error("checksums of parameters are given up", error)
        self._tracker.cost_ns += perf_counter_ns() - start

    def ready(self) -> list[Checksum]:
        """Return the checksums that the device has copied; for the publisher thread."""
        found: list[Checksum] = []
        while self._enqueued:
            try:
                if not has_passed(self._enqueued[0].event):
                    break
                enqueued = self._enqueued.popleft()
                found.append(self._message(enqueued))
            except (RuntimeError, IndexError):
                self._enqueued.clear()
        return found

    def _message(self, enqueued: _Enqueued) -> Checksum:
        fetched = isinstance(enqueued.values, pinned.Fetched)
        values = (enqueued.values.tensor() if fetched else enqueued.values).tolist()
        events = self._rank.device.events
        if events is not None:
            events.recycle(enqueued.event)
        count = len(enqueued.names)
        sums = [ParameterSum(name, values[at], values[count + at]) for at, name in enumerate(enqueued.names)]
        return Checksum(self._rank.rank, enqueued.step, time(), sums, enqueued.cost_us)

    def _enqueue(self, step: int, number: int, start: int) -> None:
        names: list[str] = []
        totals: list[Any] = []
        norms: list[Any] = []
        device: Any = None
        count = len(self._parameters)
        first = number * PER_CHECK % count
        with torch.no_grad():
            for place in range(min(self._per_check, count)):
                name, find = self._parameters[(first + place) % count]
                tensor = find()
                if tensor is None or (device is not None and tensor.device != device):
                    continue
                part, name = _part(tensor.detach(), name, number)
                if part is None:
                    continue
                device = tensor.device
                names.append(name)
                totals.append(part.sum(dtype=torch.float64))
                norms.append(torch.linalg.vector_norm(part, dtype=torch.float64))
            if not names:
                return
            values = torch.stack(totals + norms)
        kept = pinned.fetch(values) if values.is_cuda else values
        event = self._rank.device.mark_event() if values.is_cuda else None
        if kept is None:
            return
        spent = perf_counter_ns() - start
        self._enqueued.append(_Enqueued(step, names, kept, event, spent // 1000))
        pace = self._pace.usual
        if number > 1 and pace and spent > MOST_SHARE * EVERY * pace * 1e9:
            self._per_check = max(1, self._per_check // 2)


def _part(tensor: Any, name: str, number: int) -> tuple[Any, str]:
    """Return the part of a parameter summed at this check, and its name; (None, name) if it cannot be cut."""
    size = tensor.numel()
    if size <= MOST:
        return tensor, name
    if not tensor.is_contiguous():
        return None, name
    parts = -(-size // MOST)
    low = number % parts * MOST
    high = min(size, low + MOST)
    return tensor.view(-1)[low:high], f"{name}[{low}:{high}]"


def _replicated(trained: Trained, world_size: int) -> list[tuple[str, Callable[[], Any]]]:
    """List the parameters replicated on every rank; empty if there are none, or if unknown."""
    modules: list[tuple[str, Any, Any]] = []
    engine = trained.engine()
    if engine is not None:
        modules = [("", engine.module, ())] if _is_data_parallel(engine) else []
    else:
        wrapped = [one for known in _wrapped if (one := known()) is not None]
        for place, one in enumerate(wrapped):
            if one.process_group.size() == world_size:
                prefix = f"{place}." if len(wrapped) > 1 else ""
                modules.append((prefix, one.module, getattr(one, "parameters_to_ignore", ())))
    return [
        (f"{prefix}{name}"[:200], weakref.ref(parameter))
        for prefix, module, ignored in modules
        for name, parameter in module.named_parameters()
        if name not in ignored and _is_whole(parameter)
    ]


def _is_data_parallel(engine: Any) -> bool:
    return (
        int(engine.zero_optimization_stage()) < 3
        and getattr(engine, "mpu", None) is None
        and not getattr(engine, "pipeline_parallelism", False)
        and int(getattr(engine, "dp_world_size", 0)) > 1
        and int(engine.dp_world_size) == int(getattr(engine, "world_size", 0) or engine.dp_world_size)
    )


def _is_whole(parameter: Any) -> bool:
    return (
        parameter.dtype in _DTYPES
        and parameter.numel() > 0
        and not hasattr(parameter, "ds_id")  # ZeRO-3
        and not hasattr(parameter, "_local_tensor")  # DTensor: FSDP2, tensor parallelism
        and not hasattr(parameter, "_fsdp_flattened")
        and getattr(parameter, "allreduce", True)  # DeepSpeed's experts
        and not getattr(parameter, "tensor_model_parallel", False)  # Megatron
        and not parameter.is_meta
    )
