"""Makes the answer of a prediction from the results of the ranks' dry runs."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version

import msgspec

from ...protocol.analysis.estimates.beside_pytorch import beside_pytorch
from ...protocol.analysis.estimates.cost import epoch_cost
from ...protocol.analysis.estimates.curve import Piece, pieces
from ...protocol.analysis.estimates.figure import Figure
from ...protocol.analysis.estimates.host_and_disk import checkpoint_bytes
from ...protocol.analysis.estimates.roofline import Operation, StepTime, Work, step_time
from ...protocol.host.gpus import FIT_TABLE, Gpu
from ...protocol.messages.throughput import causal_pairs, mfu
from ..recipe.optim import support
from . import ranks
from .jobs import Prepared
from .result import Point, Prediction

_GPUS_OF_A_HOST = 8
_H200S = "peaks of DeepSpeed steps on H200s (bench/RESULTS.md); other kinds of GPU were not measured"
EXPECTED_ERRORS = {
    "allocated_peak_bytes": Figure(0, 0.02, f"{_H200S}; the update of PyTorch's foreach AdamW was 6 % higher there"),
    "reserved_peak_bytes": Figure(0, 0.06, _H200S),
    "host_bytes": Figure(0, 0.05, "tensors of the dry run; the processes themselves, some 2 GiB a rank, come on top"),
    "checkpoint_bytes": Figure(0, 0.02, "weights, master copies and optimizer states; of muon's states the most"),
}
"""Expected errors; those of ``nvml_bytes`` and ``step_seconds`` are in ``beside_pytorch`` and ``time``."""


def predict(
    job: Prepared,
    capacity_bytes: int | None = None,
    price_per_gpu_hour: float | None = None,
    only: Sequence[int] | None = None,
) -> Prediction:
    """Run the ranks that can differ, and return the prediction.

    Args:
        job: the job.
        capacity_bytes: limit of PyTorch's reserved memory on one GPU; None: no limit.
        price_per_gpu_hour: price, in any currency.
        only: the ranks to run; None: all that can differ.

    Raises:
        ConfigError: a dry run was refused.
    """
    found = ranks.run(job.make, only or ranks.differing(job.stage, job.ranks), job.lengths, capacity_bytes)
    first = found[min(found)]
    notes = [*job.notes, *first.notes]
    if 1 < len(found) < job.ranks:
        notes.append(f"{len(found)} of {job.ranks} ranks were run; the others have the figures of the nearest")
    points = [
        _point(job, length, {rank: one.outcomes[index] for rank, one in found.items()}, first, capacity_bytes)
        for index, length in enumerate(job.lengths)
    ]
    points = [_with_run(point, job, price_per_gpu_hour) for point in points]
    return Prediction(
        model=job.model,
        parameters=first.parameters,
        ranks=job.ranks,
        points=points,
        pieces=curve({point.sequence_length: point for point in points}),
        beside_pytorch=beside(job, job.gpu),
        notes=notes,
        capacity_bytes=capacity_bytes,
        gpu=name_of(job.gpu),
        trainable=first.trainable,
        positions=first.positions,
        checkpoint_bytes=_checkpoint_bytes(job, first),
        price_per_gpu_hour=price_per_gpu_hour,
        expected_errors=EXPECTED_ERRORS,
        sequence_parallel_size=job.sequence_parallel_size,
        versions={name: version(name) for name in ("torch", "deepspeed", "transformers")},
    )


def _checkpoint_bytes(job: Prepared, run: ranks.RankRun) -> int:
    """Return the size of a checkpoint; with adapters of ftmon's own trainer it has only their weights."""
    config = job.config
    if config is None:
        return checkpoint_bytes(run.parameters, run.trainable, kept=0)
    return checkpoint_bytes(
        run.trainable if config.lora.rank else run.parameters,
        run.trainable,
        kept=0,
        weight_bytes=4 if config.training.precision == "fp32" else 2,
        state_bytes=support.state_bytes(config),
    )


def capacity_of(job: Prepared) -> int:
    """Return the memory available to PyTorch on the job's GPU: without the CUDA context and NCCL's buffers."""
    return job.gpu.memory_bytes - round(beside(job, job.gpu).value)


def name_of(gpu: Gpu) -> str:
    """Return the display name of a kind of GPU."""
    return gpu.name


def beside(job: Prepared, gpu: Gpu) -> Figure:
    """Return the bytes used on a kind of GPU outside PyTorch's reserved memory: the CUDA context and NCCL's buffers."""
    hosts = -(-job.ranks // _GPUS_OF_A_HOST)
    return beside_pytorch(min(job.ranks, _GPUS_OF_A_HOST), hosts, job.offload, name_of(gpu))


def _point(
    job: Prepared, length: int, outcomes: dict[int, ranks.Outcome], first: ranks.RankRun, capacity: int | None
) -> Point:
    beside_bytes = round(beside(job, job.gpu).value)
    every = [
        msgspec.structs.replace(rank, nvml_bytes=rank.reserved_peak_bytes + beside_bytes)
        for rank in ranks.every({rank: one.rank for rank, one in outcomes.items()}, job.ranks)
    ]
    failing = next((one.fails_in for one in outcomes.values() if one.fails_in), "")
    needed = max(rank.needed_bytes for rank in every)
    time = _time(job, list(outcomes.values()))
    seconds = time.total.value if time else 0.0
    rows = job.micro_batch * job.accumulation
    pairs = round(length * job.documents.pairs(length)) if job.documents else causal_pairs([length])
    longest = min(length, job.documents.longest) if job.documents else length
    flops = first.flops.of(rows * length, rows * pairs, longest) if first.flops else 0.0
    flops /= job.sequence_parallel_size
    return Point(
        sequence_length=length,
        micro_batch=job.micro_batch,
        ranks=every,
        host_bytes=sum(rank.host_bytes for rank in every),
        nvml_bytes=max(rank.nvml_bytes for rank in every),
        fits=None if capacity is None else not failing,
        fails_in=failing,
        needed_bytes=needed,
        step_seconds=seconds or None,
        tokens_per_second=rows * length * job.data_ranks / seconds if seconds else None,
        mfu=mfu(flops, seconds, job.gpu.peak_flops("bf16")),
        time=time,
        fits_on=[gpu.title for gpu in FIT_TABLE if needed + beside(job, gpu).value <= gpu.memory_bytes],
    )


def _time(job: Prepared, outcomes: Sequence[ranks.Outcome]) -> StepTime | None:
    """Return the time of the slowest rank's step; None if the table has no rates of the GPU.

    For packed rows with unknown documents, the error covers documents so short that attention takes no time.
    """
    hosts = -(-job.ranks // _GPUS_OF_A_HOST)
    try:
        times = [step_time(one.work, job.gpu, hosts=hosts) for one in outcomes]
    except ValueError:
        return None
    slowest = max(times, key=lambda time: time.total.value)
    if job.config is None or not job.config.data.packing or job.documents is not None:
        return slowest
    without = (msgspec.structs.replace(one.work, operations=_no_attention(one.work)) for one in outcomes)
    least = max(step_time(one, job.gpu, hosts=hosts).total.value for one in without)
    total = slowest.total
    basis = f"{total.basis}; each packed row is one document, and attention takes {1 - least / total.value:.0%} of it"
    total = Figure(total.value, max(total.error, 1 - least / total.value), basis)
    return msgspec.structs.replace(slowest, total=total)


def _no_attention(work: Work) -> list[Operation]:
    return [one for one in work.operations if not one.attention]


def _with_run(point: Point, job: Prepared, price: float | None) -> Point:
    """Add time and cost of tokens and of the whole run."""
    if not point.step_seconds:
        return point
    a_step = job.micro_batch * job.accumulation * job.data_ranks
    tokens = a_step * point.sequence_length
    one = epoch_cost(point.step_seconds, a_step, a_step, job.ranks, price or 0.0, tokens)
    return msgspec.structs.replace(
        point,
        price_per_million_tokens=None if price is None else one.price_per_million_tokens,
        run_seconds=job.steps * one.seconds or None,
        run_price=job.steps * one.price or None,
    )


def curve(points: Mapping[int, Point]) -> list[Piece]:
    """Return the highest phase's peak over the points' keys as pieces; empty for fewer than two points."""
    if len(points) < 2:
        return []
    return pieces(
        {
            value: {
                name: max(rank.phases[name].allocated_peak_bytes for rank in point.ranks)
                for name in ("forward", "backward", "optimizer")
            }
            for value, point in points.items()
        }
    )
