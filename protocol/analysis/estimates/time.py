"""Estimates a step's time from its operations: each takes the longer of its arithmetic and its memory traffic.

The shares of the data sheet's rates reached in practice determine the error. A step also cannot be faster than the host
can launch its operations. Host times are fitted to steps of 0.5B to 1.2B models under ZeRO 0 to 3 on H200s
(``bench/data/h200_peaks.jsonl``), whose hosts differed by a factor of two.

Also the cost of an epoch, and the comparison of a live run's peaks with the predicted ones.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal

import msgspec

from ...host.machine import Gpu
from ...messages.memory import PredictedPhase, PredictedPoint, Prediction
from ...messages.throughput import Precision
from .memory import Figure

_ERRORS = {"host": 0.5, "communication": 0.5, "offload": 0.5}
"""Expected error, by the step's bound; 0.2 for other bounds."""
ARITHMETIC = 0.7
"""Share of the arithmetic rate: large bf16 products with cuBLAS on Hopper reach 65 to 80 %."""
ATTENTION = 0.4
"""The same of FlashAttention 2 on Hopper, forward and backward together."""
MEMORY = 0.85
"""Share of the memory rate."""
BUSY = 0.85
"""Share of a device-bound step in which the device runs a kernel; it waits at the step's ends and around collectives.
Fitted to steps of 0.5B to 8B models on H200s (``bench/RESULTS.md``)."""
_LINK = 0.75
"""Share of the link: NCCL's bus bandwidth for messages of 64 MiB and more."""
CALL_SECONDS = 11e-6
"""Host time per dispatched operation in eager PyTorch, including the Python code of modules and engine."""
_FETCH_SECONDS = 250e-6
"""Host time of ZeRO-3's hooks per gather and release of a module's parameters."""
_COLLECTIVE_HOST_SECONDS = 60e-6
"""Host time of a collective in DeepSpeed."""
_COLLECTIVE_SECONDS = 25e-6
"""Latency of a collective on the device."""
_TRANSFER = 0.8
"""Share of the bandwidth to the host, with page-locked memory."""
_HOST_MEMORY_GBS = 22.0
"""GB/s read and written by DeepSpeed's CPUAdam of one rank: 20 to 28 for 0.5B, 1B and 2B parameters per rank."""
_NETWORK_GBS = 50.0
"""GB/s per GPU to other hosts, in one direction: 400 Gbit/s."""
FLOOR_BYTES = 8 << 20
"""Differences of peaks below this are ignored: workspaces of libraries, rounding."""
_MAIN_SHARE = 0.2
"""Minimum share of a difference for a part to be named."""
_MOST_PARTS = 2

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "reduce", "broadcast", "all_to_all"]


class Operation(msgspec.Struct, frozen=True):
    """An operation on the device, ``count`` times."""

    flops: float = 0.0
    bytes_moved: float = 0.0
    """Bytes read from and written to the device's memory."""
    precision: Precision = "bf16"
    count: int = 1
    attention: bool = False
    """Whether it is a fused attention kernel, which reaches a lower arithmetic rate than a matrix product."""


class Communication(msgspec.Struct, frozen=True):
    """A collective, ``count`` times."""

    kind: Collective
    size_bytes: float
    """Size of the whole tensor, as on each rank after a gather or before a scatter."""
    ranks: int
    overlapped: bool = False
    """Whether it overlaps computation, and counts only as far as it takes longer."""
    count: int = 1


class Work(msgspec.Struct, frozen=True):
    """Operations and transfers of one rank's step."""

    operations: list[Operation]
    """Kernels."""
    communications: list[Communication]
    calls: int = 0
    """Number of operations dispatched by the host, including those without a kernel (views, empty tensors)."""
    transfer_bytes: int = 0
    """Bytes copied between host and device."""
    host_bytes: int = 0
    """Bytes read and written in the host's memory by an optimizer on the CPU."""
    fetches: int = 0
    """Number of gathers of a module's parameters by ZeRO-3, whose hooks run on the host even if nothing is sent."""


def combined(parts: Sequence[tuple[Work, float | Fraction]]) -> Work:
    """Return the sum of works, each with all its counts and sizes multiplied by a factor, which may be negative."""
    values: dict[str, Any] = {}
    for name in Work.__struct_fields__:
        weighted: list[tuple[Any, float | Fraction]] = [(getattr(work, name), factor) for work, factor in parts]
        if not isinstance(weighted[0][0], list):
            values[name] = _number(sum(size * factor for size, factor in weighted))
            continue
        counts: Counter[Any] = Counter()
        for every, factor in weighted:
            for one in every:
                counts[msgspec.structs.replace(one, count=1)] += one.count * factor
        values[name] = [msgspec.structs.replace(one, count=_number(count)) for one, count in counts.items() if count]
    return Work(**values)


def _number(value: float | Fraction) -> float:
    return int(value) if value == int(value) else float(value)


class StepTime(msgspec.Struct, frozen=True):
    """Seconds of a step by activity; ``total`` has the error of the sum."""

    compute_seconds: float
    """Time of the kernels, and of the device's waits between them."""
    communication_seconds: float
    """Time of the collectives that do not overlap computation."""
    host_seconds: float
    """Time that the host needs to launch the operations."""
    offload_seconds: float
    """Time of copies between host and device, and of the optimizer on the CPU; they do not overlap the rest."""
    total: Figure
    bound_by: Literal["arithmetic", "memory", "communication", "host", "offload"]


def step_time(work: Work, gpu: Gpu, hosts: int = 1) -> StepTime:
    """Return the time of a step.

    Raises:
        ValueError: the table has no rates for this GPU.
    """
    arithmetic = memory = 0.0
    for one in work.operations:
        share = ATTENTION if one.attention else ARITHMETIC
        flops_seconds = one.flops / (_rate(gpu, one.precision) * share) if one.flops else 0.0
        bytes_seconds = one.bytes_moved / (gpu.memory_gbs * 1e9 * MEMORY)
        if flops_seconds >= bytes_seconds:
            arithmetic += flops_seconds * one.count
        else:
            memory += bytes_seconds * one.count
    link = min(gpu.link_gbs, _NETWORK_GBS) if hosts > 1 else gpu.link_gbs
    host = work.calls * CALL_SECONDS + work.fetches * _FETCH_SECONDS
    exposed = beside = 0.0
    for one in work.communications:
        host += one.count * _COLLECTIVE_HOST_SECONDS
        seconds = collective_seconds(one.kind, one.size_bytes, one.ranks, link) * one.count
        if one.overlapped:
            beside += seconds
        else:
            exposed += seconds
    compute = (arithmetic + memory) / BUSY
    communication = exposed + max(0.0, beside - compute)
    offload = work.transfer_bytes / (gpu.host_gbs * 1e9 * _TRANSFER)
    offload += work.host_bytes / (_HOST_MEMORY_GBS * 1e9)
    total = max(compute + communication, host) + offload
    parts = {"arithmetic": arithmetic, "memory": memory, "communication": communication, "offload": offload}
    bound = "host" if host > compute + communication + offload else max(parts, key=lambda name: parts[name])
    error = _ERRORS.get(bound, 0.2)
    basis = (
        f"roofline at {ARITHMETIC:.0%} of the arithmetic and {MEMORY:.0%} of the memory rate of the data sheet in "
        f"{BUSY:.0%} of a step, {CALL_SECONDS * 1e6:.0f} us of host time an operation; "
        f"bound by {bound}"
    )
    return StepTime(compute, communication, host, offload, Figure(total, error, basis), bound)  # type: ignore[arg-type]


def collective_seconds(kind: Collective, size_bytes: float, ranks: int, link_gbs: float) -> float:
    """Return the time of a collective in seconds, from NCCL's bus bandwidth: an all-reduce sends its data twice."""
    if ranks < 2:
        return 0.0
    share = 1.0 if kind in ("broadcast", "reduce") else (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
    return _COLLECTIVE_SECONDS + size_bytes * share / (link_gbs * 1e9 * _LINK)


def _rate(gpu: Gpu, precision: Precision) -> float:
    """Return FLOP/s; for a type without tensor cores, the rate of fp32."""
    rate = gpu.peak_flops(precision) or gpu.peak_flops("fp32")
    if rate is None:
        raise ValueError(f"no rates are known of {gpu.name}: give another GPU's name for the time")
    return rate


def gpu_cost(seconds: float, gpus: int, price_per_gpu_hour: float) -> float:
    """Return the cost of GPUs for a time: hours x GPUs x price of one GPU for one hour, in the price's currency."""
    return seconds / 3600 * gpus * price_per_gpu_hour


class EpochCost(msgspec.Struct, frozen=True):
    """Time and cost of an epoch."""

    steps: int
    seconds: float
    price: float
    """In the currency of the price of a GPU hour."""
    price_per_million_tokens: float | None


def epoch_cost(
    step_seconds: float, samples: int, samples_per_step: int, gpus: int, price_per_gpu_hour: float, tokens: int = 0
) -> EpochCost:
    """Return time and price of one pass over a data set.

    Args:
        samples: rows of the data set, or packed rows.
        tokens: tokens of the data set, for the price per million tokens; 0: unknown.

    Raises:
        ValueError: a step has no samples.
    """
    if samples_per_step < 1:
        raise ValueError("a step must train on at least one sample: micro-batch x accumulation x ranks")
    steps = -(-samples // samples_per_step)
    seconds = steps * step_seconds
    price = gpu_cost(seconds, gpus, price_per_gpu_hour)
    return EpochCost(steps, seconds, price, price / tokens * 1e6 if tokens > 0 else None)


class Compared(msgspec.Struct, frozen=True):
    """One phase of one rank: the highest peak, and the prediction for a batch of that size."""

    phase: str
    measured_bytes: int
    predicted_bytes: int
    allowed_bytes: float
    """Allowed difference: the expected error."""
    parts: tuple[tuple[str, int], ...] = ()
    """The parts with most of the difference, measured minus predicted, if it exceeds the allowed one and a step was
    analysed.
    """
    parts_step: int = 0
    """The step of ``parts``, if it is not that of the peak."""

    @property
    def by_bytes(self) -> int:
        """Measured minus predicted."""
        return self.measured_bytes - self.predicted_bytes

    @property
    def share(self) -> float:
        """The difference as a share of the prediction."""
        return self.by_bytes / self.predicted_bytes if self.predicted_bytes else 0.0

    @property
    def parted(self) -> bool:
        """Whether they differ by more than the expected error."""
        return abs(self.by_bytes) > self.allowed_bytes


def predicted(prediction: Prediction, rank: int, phase: str, elements: int) -> PredictedPhase | None:
    """Return the prediction for a phase with batches of a given size.

    Args:
        rank: the rank; for a rank without a prediction the nearest one is used.
        elements: elements of the largest micro-batch: sequences times their length.

    Returns:
        None if the phase has no prediction, or none for batches of this size.
    """
    points = _points(prediction.points, rank)
    if not points or prediction.micro_batch < 1 or elements < 1:
        return None
    length = elements / prediction.micro_batch
    for point in points:
        if point.sequence_length == length:
            return _phase(point, phase)
    for below, above in pairwise(points):
        if below.sequence_length < length < above.sequence_length:
            share = (length - below.sequence_length) / (above.sequence_length - below.sequence_length)
            first, second = _phase(below, phase), _phase(above, phase)
            return _between(first, second, share) if first is not None and second is not None else None
    return None


def compared(
    prediction: Prediction,
    rank: int,
    phase: str,
    measured_bytes: int,
    elements: int,
    parts: Mapping[str, int] | None = None,
) -> Compared | None:
    """Return a phase's peak with its prediction; None if there is no prediction.

    Args:
        parts: composition of the peak, if it was analysed.
    """
    found = predicted(prediction, rank, phase, elements)
    if found is None or found.allocated_peak_bytes <= 0:
        return None
    expected = found.allocated_peak_bytes
    result = Compared(phase, measured_bytes, expected, max(FLOOR_BYTES, prediction.error * expected))
    if not result.parted or parts is None:
        return result
    by = result.by_bytes
    by_part = differences(parts, found.parts)
    main = [(name, size) for name, size in by_part.items() if size * by > 0 and abs(size) >= _MAIN_SHARE * abs(by)]
    return msgspec.structs.replace(result, parts=tuple(sorted(main, key=lambda one: -abs(one[1]))[:_MOST_PARTS]))


def differences(measured: Mapping[str, int], expected: Mapping[str, int]) -> dict[str, int]:
    """Return each part's bytes, measured minus predicted."""
    return {name: measured.get(name, 0) - expected.get(name, 0) for name in {**measured, **expected}}


def _points(points: Sequence[PredictedPoint], rank: int) -> list[PredictedPoint]:
    """Return the points of the nearest rank, by length."""
    nearest = min((point.rank for point in points), key=lambda one: (abs(one - rank), one), default=None)
    mine = [point for point in points if point.rank == nearest]
    return sorted(mine, key=lambda point: point.sequence_length)


def _phase(point: PredictedPoint, name: str) -> PredictedPhase | None:
    return next((phase for phase in point.phases if phase.name == name), None)


def _between(first: PredictedPhase, second: PredictedPhase, share: float) -> PredictedPhase:
    def on_line(low: int, high: int) -> int:
        return round(low + (high - low) * share)

    names = {**first.parts, **second.parts}
    return PredictedPhase(
        first.name,
        on_line(first.allocated_peak_bytes, second.allocated_peak_bytes),
        on_line(first.reserved_peak_bytes, second.reserved_peak_bytes),
        {name: on_line(first.parts.get(name, 0), second.parts.get(name, 0)) for name in names},
    )
