"""Estimates a step's time from its operations: each takes the time of its arithmetic or of its memory traffic.

The shares of the data sheet's rates reached in practice determine the error. A step also cannot be faster than the host
can launch its operations. The constants are fitted to profiles and steps of 0.5B to 4B models on an H200, one rank
(``bench/gpu/step_times.py``, rows that are not held out), and to steps of several ranks in ``bench/RESULTS.md``.

Also the cost of an epoch, and the comparison of a live run's peaks with the predicted ones.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal

import msgspec

from ...host.machine import Gpu, Precision
from ...messages.memory import PredictedPhase, PredictedPoint, Prediction
from .memory import Figure

_ERRORS = {"communication": 0.3, "offload": 0.5}
"""Expected error, by the step's bound; 0.1 for other bounds, and beside ``_HOST_SPREAD``."""
_ERROR = 0.1
ARITHMETIC = 0.76  # share of the arithmetic rate that matrix products reach inside
_PRODUCT_MEMORY = 0.3
"""Share of the time of a product's memory traffic, at the data sheet's rate, that its arithmetic does not hide."""
_NARROW_ATTENTION, _ATTENTION = 0.43, 0.58
"""Share of the arithmetic rate of FlashAttention 2 on Hopper, forward and backward: heads of up to 64, and wider ones.
The blocks that its kernels compute in vain are among the FLOPs (``trainer/predict/record.py``)."""
MEMORY: dict[str, float] = {"fused": 0.85, "eager": 0.7, "update": 0.55}  # share of the memory rate, by kind of kernel
_KERNEL_SECONDS = 2e-6  # device time of the smallest kernel, which large ones take in addition: start and end
BUSY = 0.98  # share of a device-bound step in which the device runs a kernel
_STEP_SECONDS = 2e-3  # time per step in which the device waits for the host, around the optimizer
_LINK = 0.4  # share of the link that NCCL reaches; with the next one fitted to steps on two H200s and four H100s
_EXPOSED = 0.7
"""Share of the collectives beside computation that takes time nevertheless: they wait for each other's ranks, and take
processors and memory traffic from the kernels beside them."""
CALL_SECONDS = 13e-6  # host time per operation dispatched in eager PyTorch, with the Python code of modules and engine
_LAUNCH_SECONDS = 8e-6  # host time per kernel of compiled code
_GRAPH_SECONDS = 400e-6  # host time of a call of compiled code: Dynamo's guards and autograd's function
_FETCH_SECONDS = 210e-6  # host time of ZeRO-3's hooks per gather and release of a module's parameters
_HOST_SPREAD = 0.9, 1.6
"""Times of a fast and of a slow, shared host relative to these: 0.97 to 1.49 in steps that the host limited
(``bench/data/step_times_h200.jsonl``), 1.7 times between two of the same host."""
_COLLECTIVE_HOST_SECONDS = 60e-6  # host time of a collective in DeepSpeed
_COLLECTIVE_SECONDS = 25e-6  # latency of a collective on the device
_NARROW = 64
_TRANSFER = 0.8  # share of the bandwidth to the host, with page-locked memory
_HOST_MEMORY_GBS = 22.0
"""GB/s read and written by DeepSpeed's CPUAdam of one rank: 20 to 28 for 0.5B, 1B and 2B parameters per rank."""
_NETWORK_GBS = 50.0  # GB/s per GPU to other hosts, in one direction: 400 Gbit/s
FLOOR_BYTES = 8 << 20  # differences of peaks below this are ignored: workspaces of libraries, rounding
_MAIN_SHARE = 0.2  # minimum share of a difference for a part to be named
_MOST_PARTS = 2

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "reduce", "broadcast", "all_to_all"]


class Operation(msgspec.Struct, frozen=True):
    """An operation on the device, ``count`` times."""

    flops: float = 0.0
    bytes_moved: float = 0.0  # bytes read from and written to the device's memory
    precision: Precision = "bf16"
    count: int = 1
    attention: int = 0
    """Width of a head of a fused attention kernel, which reaches a lower arithmetic rate than a matrix product; 0: it
    is none."""
    memory: Literal["fused", "eager", "update"] = "eager"
    """Kind of kernel without arithmetic: of compiled code, one operation of PyTorch, an optimizer's update."""


class Communication(msgspec.Struct, frozen=True):
    """A collective, ``count`` times."""

    kind: Collective
    size_bytes: float  # size of the whole tensor, as on each rank after a gather or before a scatter
    ranks: int
    overlapped: bool = False  # whether it overlaps computation, and counts only as far as it takes longer
    count: int = 1


class Work(msgspec.Struct, frozen=True):
    """Operations and transfers of one rank's step."""

    operations: list[Operation]  # kernels
    communications: list[Communication]
    calls: int = 0  # operations dispatched by the host, including those without a kernel (views, empty tensors)
    transfer_bytes: int = 0  # bytes copied between host and device
    host_bytes: int = 0  # bytes read and written in the host's memory by an optimizer on the CPU
    fetches: float = 0
    """Number of gathers of a module's parameters by ZeRO-3, whose hooks run on the host even if nothing is sent; each
    parameter counts as a fifth of one in addition."""
    launches: int = 0  # number of kernels that compiled code launches
    graphs: int = 0  # number of calls of compiled code


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

    compute_seconds: float  # time of the kernels, and of the device's waits between them
    communication_seconds: float  # time of the collectives that do not overlap computation
    host_seconds: float  # time that the host needs to launch the operations
    offload_seconds: float
    """Time of copies between host and device, and of the optimizer on the CPU; they do not overlap the rest."""
    total: Figure
    bound_by: Literal["arithmetic", "memory", "communication", "host", "offload"]
    lowest_seconds: float = 0.0  # with a fast host, and the expected error in the other direction too
    highest_seconds: float = 0.0  # with a slow host, which can become the limit


def step_time(work: Work, gpu: Gpu, hosts: int = 1) -> StepTime:
    """Return the time of a step; raise ``ValueError`` if the table has no rates for this GPU."""
    arithmetic = memory = 0.0
    for one in work.operations:
        seconds = _kernel_seconds(one, gpu) * one.count
        if one.flops:
            arithmetic += seconds
        else:
            memory += seconds
    link = min(gpu.link_gbs, _NETWORK_GBS) if hosts > 1 else gpu.link_gbs
    host = _host_seconds(work)
    exposed = beside = 0.0
    for one in work.communications:
        seconds = collective_seconds(one.kind, one.size_bytes, one.ranks, link) * one.count
        if one.overlapped:
            beside += seconds
        else:
            exposed += seconds
    compute = (arithmetic + memory) / BUSY + _STEP_SECONDS
    communication = exposed + max(_EXPOSED * beside, beside - compute)
    offload = work.transfer_bytes / (gpu.host_gbs * 1e9 * _TRANSFER)
    offload += work.host_bytes / (_HOST_MEMORY_GBS * 1e9)
    device = compute + communication
    total = max(device, host) + offload
    parts = {"arithmetic": arithmetic, "memory": memory, "communication": communication, "offload": offload}
    bound = "host" if host > device + offload else max(parts, key=lambda name: parts[name])
    error, (fast, slow) = _ERRORS.get(bound, _ERROR), _HOST_SPREAD
    lowest = (1 - error) * (max(device, fast * host) + offload)
    error = max(error, (slow * host + offload) / total - 1)
    basis = (
        f"products at {ARITHMETIC:.0%} of the arithmetic rate of the data sheet, kernels at {MEMORY['update']:.0%} to "
        f"{MEMORY['fused']:.0%} of the memory rate, {CALL_SECONDS * 1e6:.0f} us of host time an operation; "
        f"bound by {bound}"
    )
    times = compute, communication, host, offload, Figure(total, error, basis)
    return StepTime(*times, bound, lowest, (1 + error) * total)  # type: ignore[arg-type]


def _kernel_seconds(one: Operation, gpu: Gpu) -> float:
    """Return the device time of one kernel."""
    traffic = one.bytes_moved / (gpu.memory_gbs * 1e9)
    if not one.flops:
        return traffic / MEMORY[one.memory] + _KERNEL_SECONDS
    if one.attention:
        share = _NARROW_ATTENTION if one.attention <= _NARROW else _ATTENTION
        return one.flops / (_rate(gpu, one.precision) * share) + _KERNEL_SECONDS
    arithmetic = one.flops / (_rate(gpu, one.precision) * ARITHMETIC) + _PRODUCT_MEMORY * traffic
    return max(arithmetic, traffic / MEMORY["fused"]) + _KERNEL_SECONDS


def _host_seconds(work: Work) -> float:
    """Return the time in which a host launches a step."""
    collectives = sum(one.count for one in work.communications)
    return (
        work.calls * CALL_SECONDS
        + work.launches * _LAUNCH_SECONDS
        + work.graphs * _GRAPH_SECONDS
        + work.fetches * _FETCH_SECONDS
        + collectives * _COLLECTIVE_HOST_SECONDS
    )


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
    price: float  # in the currency of the price of a GPU hour
    price_per_million_tokens: float | None


def epoch_cost(
    step_seconds: float, samples: int, samples_per_step: int, gpus: int, price_per_gpu_hour: float, tokens: int = 0
) -> EpochCost:
    """Return time and price of one pass over a data set.

    ``samples``: rows of the data set, or packed rows. ``tokens``: for the price per million tokens; 0: unknown. Raises
    ``ValueError`` for a step without samples.
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
    allowed_bytes: float  # allowed difference: the expected error
    parts: tuple[tuple[str, int], ...] = ()
    """The parts with most of the difference, measured minus predicted, if it exceeds the allowed one and a step was
    analysed.
    """
    parts_step: int = 0  # the step of `parts`, if it is not that of the peak

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
    """Return the prediction for a phase with batches of a given size; None if there is none.

    ``rank``: for one without a prediction the nearest is used. ``elements``: of the largest micro-batch: sequences
    times their length.
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
    """Return a phase's peak with its prediction (None: there is none) and its composition ``parts``."""
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
