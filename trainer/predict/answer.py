"""Makes the answer of a prediction from the results of the ranks' dry runs."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ...protocol.analysis.allocator.settings import Settings
from ...protocol.analysis.estimates.memory import Figure, Piece, beside_pytorch, checkpoint_bytes, pieces
from ...protocol.analysis.estimates.ranking import Largest
from ...protocol.analysis.estimates.time import StepTime, epoch_cost, step_time
from ...protocol.analysis.words import describe_curve
from ...protocol.errors import ConfigError
from ...protocol.host.machine import FIT_TABLE, Gpu, causal_pairs, find_gpu, mfu
from ...protocol.text import duration, gib, sanitize
from ..recipe import support
from . import explain, ranks
from .jobs import Prepared
from .result import Point, Prediction, Rank, RiskyStep

if TYPE_CHECKING:
    from .dry import DryRun

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
    """Run the ranks that can differ, or ``only`` some, and return the prediction.

    ``capacity_bytes`` limits PyTorch's reserved memory on one GPU; prices are in any currency. Raises ``ConfigError``
    if a dry run was refused.
    """
    found = ranks.run(job.make, only or job.different, job.lengths, capacity_bytes)
    return _answer(job, found, capacity_bytes, price_per_gpu_hour)


class Both(NamedTuple):
    """A prediction, and what else its dry runs yield."""

    found: Prediction
    other: Prediction | None  # With other settings of the allocator, if they were given
    runs: dict[int, ranks.RankRun]  # The dry runs by rank

    @property
    def after(self) -> dict[str, list[ranks.RankRun]]:
        """Results of the calls after the first rank's dry run, without refused ones."""
        return self.runs[min(self.runs)].after


def predict_both(
    job: Prepared,
    other: Settings | None,
    capacity_bytes: int | None,
    price_per_gpu_hour: float | None,
    after: ranks.Calls | None = None,
) -> Both:
    """Return the prediction, and that of the same dry runs with ``other`` settings of the allocator, if given.

    ``after``: calls to make in the first rank's process after its dry run, such as those of changes. Raises
    ``ConfigError`` if a dry run was refused.
    """
    found = ranks.run(job.make, job.different, job.lengths, capacity_bytes, other=other, after=after)
    first = _answer(job, found, capacity_bytes, price_per_gpu_hour)
    if other is None:
        return Both(first, None, found)
    others = {
        rank: msgspec.structs.replace(one, outcomes=[each.other for each in one.outcomes if each.other])
        for rank, one in found.items()
    }
    return Both(first, _answer(job, others, capacity_bytes, price_per_gpu_hour), found)


def predict_each(
    of: Sequence[Prepared],
    capacity_bytes: int,
    price_per_gpu_hour: float | None,
    rank: int,
    tell: Callable[[int], None],
) -> list[Prediction | ConfigError]:
    """Return the predictions of jobs of the same lengths, from one rank of each: the nearest to ``rank`` that differs.

    Several run at a time. ``tell`` is called with a job's number when it begins; a refused job has its error.
    """
    chosen = [ranks.nearest(job.different, rank) for job in of]
    refused: dict[int, ConfigError] = {}

    def make(number: int) -> "DryRun":
        return of[number].make(chosen[number])

    found = ranks.run(make, range(len(of)), of[0].lengths, capacity_bytes, refused=refused, began=tell) if of else {}
    return [
        refused[number]
        if number in refused
        else _answer(job, {chosen[number]: found[number]}, capacity_bytes, price_per_gpu_hour)
        for number, job in enumerate(of)
    ]


def of_one_rank(job: Prepared, run: ranks.RankRun, capacity_bytes: int, price_per_gpu_hour: float | None) -> Both:
    """Return the prediction of a job whose ranks are all like the first, which was run."""
    return Both(_answer(job, {0: run}, capacity_bytes, price_per_gpu_hour), None, {0: run})


def _answer(
    job: Prepared, found: dict[int, ranks.RankRun], capacity_bytes: int | None, price_per_gpu_hour: float | None
) -> Prediction:
    first = found[min(found)]
    notes = [*job.notes, *first.notes]
    if 1 < len(found) < job.ranks:
        notes.append(f"{len(found)} of {job.ranks} ranks were run; the others have the figures of the nearest")
    points: list[Point] = []
    for index, length in enumerate(job.lengths):
        outcomes = {rank: one.outcomes[index] for rank, one in found.items()}
        points.append(with_run(_point(job, length, outcomes, first, capacity_bytes), job, price_per_gpu_hour))
    return Prediction(
        model=job.model,
        parameters=first.parameters,
        ranks=job.ranks,
        points=points,
        pieces=curve({point.sequence_length: point for point in points}),
        beside_pytorch=beside(job, job.gpu),
        notes=notes,
        capacity_bytes=capacity_bytes,
        gpu=job.gpu.name,
        trainable=first.trainable,
        positions=first.positions,
        checkpoint_bytes=_checkpoint_bytes(job, first),
        price_per_gpu_hour=price_per_gpu_hour,
        expected_errors=EXPECTED_ERRORS,
        sequence_parallel_size=job.sequence_parallel_size,
        made=first.made,
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


def beside(job: Prepared, gpu: Gpu) -> Figure:
    """Return the bytes used on a kind of GPU outside PyTorch's reserved memory: the CUDA context and NCCL's buffers."""
    hosts = -(-job.ranks // _GPUS_OF_A_HOST)
    return beside_pytorch(min(job.ranks, _GPUS_OF_A_HOST), hosts, job.offload, gpu.name)


def _point(
    job: Prepared, length: int, outcomes: dict[int, ranks.Outcome], first: ranks.RankRun, capacity: int | None
) -> Point:
    beside_bytes = round(beside(job, job.gpu).value)
    every = [
        msgspec.structs.replace(rank, nvml_bytes=rank.reserved_peak_bytes + beside_bytes)
        for rank in ranks.every({rank: one.rank for rank, one in outcomes.items()}, job.ranks)
    ]
    failing = [one for one in outcomes.values() if one.fails_in]
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
        fails_in=failing[0].fails_in if failing else "",
        tight=bool(failing) and all(one.tight for one in failing),
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
    without = (
        msgspec.structs.replace(one.work, operations=[each for each in one.work.operations if not each.attention])
        for one in outcomes
    )
    least = max(step_time(one, job.gpu, hosts=hosts).total.value for one in without)
    total = slowest.total
    basis = f"{total.basis}; each packed row is one document, and attention takes {1 - least / total.value:.0%} of it"
    total = Figure(total.value, max(total.error, 1 - least / total.value), basis)
    return msgspec.structs.replace(slowest, total=total, lowest_seconds=min(slowest.lowest_seconds, least))


def with_run(point: Point, job: Prepared, price: float | None) -> Point:
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


_PHASES = ("init", "forward", "backward", "optimizer")
_GIB = 1 << 30
_PARTS = {"optimizer_states": "optimizer states", "master_copies": "master weights"}
_MOST_ROWS = 4
_MOST_LENGTHS = 5
_LEAST_NAME = 16  # Minimum width of a table's first column
_LEAST_SHARE = 0.005  # Minimum share of a peak for a part of its own; smaller parts are shown together
_BASIS = """\
allocated: a dry run of DeepSpeed's engine on fake tensors; reserved: its trace through a model of PyTorch's allocator.
NVML: reserved, and the CUDA context and NCCL's buffers as measured. Highest of a steady step.
Method and errors: docs/predict.md.
"""


def render(prediction: Prediction, width: int | None = None) -> str:
    """Return tables of the points: peaks of each phase, what the highest consists of, time, and whether it fits.

    ``width``: of the terminal in cells; None: there is none.

    Names and keys of somebody else's configuration are in it, so each line is made safe for a terminal.
    """
    head = (
        f"{prediction.model}: {prediction.parameters:,} parameters, {prediction.trainable:,} trained; "
        f"{prediction.ranks} x {prediction.gpu}, micro-batch {prediction.points[0].micro_batch:,}; GiB a rank\n"
    )
    names = ["tokens", "rank", *_PHASES, "reserved", "NVML", "host"]
    if prediction.capacity_bytes is not None:
        names.append("fits")
    rows: list[list[str]] = []
    for point in prediction.points:
        for alike in _alike(point.ranks):
            rank = alike[0]
            row = [f"{point.sequence_length:,}", _numbers(alike)]
            for name in _PHASES:
                highest = "*" if name == rank.peak_phase else " "
                row.append(f"{_gib(rank.phases[name].allocated_peak_bytes)}{highest}")
            row += [_gib(rank.reserved_peak_bytes), _gib(rank.nvml_bytes), _gib(rank.host_bytes)]
            if point.fits is not None:
                row.append("yes" if point.fits else "tight" if point.tight else f"no: {point.fails_in}")
            rows.append(row)
    between = " (on average; between two lengths another phase may lead)" if len(prediction.points) == 2 else ""
    curve = f"{describe_curve(prediction.pieces)}{between}\n" if prediction.pieces else ""
    parts = [head, _table(names, rows), "* the phase with the highest allocated memory\n", curve]
    parts += map(_composition, prediction.points)
    parts += (part(prediction) for part in (_estimator, _explained))
    parts += (_show_time(point, prediction) for point in prediction.points)
    parts += (_fits(point, prediction) for point in prediction.points)
    parts.append(f"one checkpoint takes {gib(prediction.checkpoint_bytes)} on disk\n")
    parts += (_data(prediction), _largest(prediction), _what_if(prediction, width), _errors(prediction))
    parts += (f"note: {note}\n" for note in prediction.notes)
    return "\n".join(sanitize(line, 4 * len(line)) for line in "".join([*parts, _BASIS]).split("\n"))


def _table(names: list[str], rows: list[list[str]], left: tuple[int, ...] = (), width: int | None = None) -> str:
    """Return aligned columns; those in ``left`` are left-aligned, the others right-aligned.

    Where they do not fit the ``width``, the first column is wrapped; the last has lines of its own below each row.
    """
    table = [names, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(names))]
    narrow = width is not None and sum(widths) + 2 * len(names) - 2 > width
    if narrow and width is not None:
        widths[0] = min(widths[0], max(_LEAST_NAME, width - sum(widths[1:-1]) - 2 * len(names) + 4))
    text = ""
    for row in table:
        first, *more = textwrap.wrap(row[0], widths[0], break_on_hyphens=False)
        cells = [first, *row[1 : -1 if narrow else None]]
        pairs = enumerate(zip(cells, widths, strict=not narrow))
        line = "  ".join(cell.ljust(size) if column in left else cell.rjust(size) for column, (cell, size) in pairs)
        last = textwrap.wrap(row[-1], (width or 0) - 4, break_long_words=False) if narrow else []
        text += "".join(f"{each.rstrip()}\n" for each in [line, *more, *(f"    {each}" for each in last)])
    return text


def _composition(point: Point) -> str:
    rank, phase = explain.highest(point)
    if not phase:
        return ""
    parts = rank.phases[phase].parts
    least = _LEAST_SHARE * sum(parts.values())
    words = [f"{_PARTS.get(part, part)} {_gib(size)}" for part, size in parts.items() if size >= least]
    rest = sum(size for size in parts.values() if size < least)
    return (
        f"{point.sequence_length:,} tokens, {phase} of rank {rank.rank}: {' + '.join(words)}"
        f"{f' + rest {_gib(rest)}' if rest >= _GIB / 200 else ''}\n"
    )


_LEFT_OUT = ("states", "activations", "logits", "buckets", "gathered", "temporaries", "fragmentation")


def _estimator(prediction: Prediction) -> str:
    """Return DeepSpeed's estimate beside the predicted memory, with the parts that it leaves out."""
    found = prediction.made and prediction.made.estimate
    if not found:
        return ""
    name, deepspeed = found.function, prediction.versions.get("deepspeed", "")
    head = f"DeepSpeed's estimate: {found.formula} = {gib(found.bytes)}, of states and gradients at any length\n"
    rows = [["at tokens", *_LEFT_OUT[:-2], "temporaries, other", "fragmentation", "= reserved", "estimate off by"]]
    for point in _spread(prediction.points):
        sizes = explain.left_out(point, prediction)
        if sizes is not None:
            rank, _ = explain.highest(point)
            row = [f"{point.sequence_length:,}", *(gib(sizes[part]) if sizes[part] else "0" for part in _LEFT_OUT)]
            rows.append([*row, gib(rank.reserved_peak_bytes), gib(found.bytes - rank.reserved_peak_bytes)])
    names, *lines = map(list, zip(*rows, strict=True))
    where = f"{meets}\n" if (meets := explain.meets(prediction)) else ""
    return (
        f"{head}({name}, DeepSpeed {deepspeed}); it leaves out all but the states:\n"
        f"{_table(names, lines, left=(0,))}{where}"
    )


def _spread(points: Sequence[Point]) -> list[Point]:
    """Return the points, of many some of the whole range: as many as a table of 80 columns has room for."""
    most = min(len(points), _MOST_LENGTHS)
    return [points[index * (len(points) - 1) // max(1, most - 1)] for index in range(most)]


def _explained(prediction: Prediction) -> str:
    """Return each part as a sum made by hand, beside the predicted and the measured figure."""
    if not prediction.explained:
        return ""
    measured = any(part.measured_bytes is not None for part in prediction.explained)
    rows: list[list[str]] = []
    for part in prediction.explained:
        size = part.measured_bytes
        figures = [gib(part.predicted_bytes), *([] if not measured else ["-"] if size is None else [gib(size)])]
        rows.append([_PARTS.get(part.name, part.name), *figures, f"{part.formula} = {gib(part.bytes)}"])
    length = max(point.sequence_length for point in prediction.points)
    names = ["part", "predicted", *(["measured"] if measured else []), f"by hand, at {length:,} tokens"]
    fused = any(one.name == "logits" and one.predicted_bytes < 0.75 * one.bytes for one in prediction.explained)
    note = "logits by hand are those of a loss that is not fused\n" if fused else ""
    return _table(names, rows, left=(0, len(names) - 1)) + note


def _show_time(point: Point, prediction: Prediction) -> str:
    if point.time is None or point.step_seconds is None or point.tokens_per_second is None:
        return f"{point.sequence_length:,} tokens: no time, because no rates are known of {prediction.gpu}\n"
    share = "" if point.mfu is None else f", MFU {point.mfu:.1%}"
    paid = point.price_per_million_tokens
    price = "" if paid is None else f", {paid:.4g} a million tokens at {prediction.price_per_gpu_hour:g} a GPU hour"
    run = f"; the run {duration(point.run_seconds)}" if point.run_seconds else ""
    if run and point.run_price is not None:
        run += f", {point.run_price:,.2f}"
    return (
        f"{point.sequence_length:,} tokens: {point.step_seconds * 1e3:,.0f} ms a step "
        f"({point.time.lowest_seconds * 1e3:,.0f} to {point.time.highest_seconds * 1e3:,.0f}; "
        f"bound by {point.time.bound_by}), "
        f"{point.tokens_per_second:,.0f} tokens/s{share}{price}{run}\n"
    )


def _fits(point: Point, prediction: Prediction) -> str:
    capacity, gpu = prediction.capacity_bytes, find_gpu(prediction.gpu)
    tokens, needed = f"{point.sequence_length:,} tokens", _gib(point.needed_bytes)
    needs = f"{tokens} need {needed} GiB for PyTorch: "
    if point.tight and capacity is not None:
        needs = (
            f"{tokens} are tight: {_gib(capacity)} GiB or less happen to suffice, but some sizes up to {needed} GiB do "
            f"not, because segments are divided differently\n{needs}"
        )
    if not point.fits_on:
        return f"{needs}more than any GPU of the table has\n"
    larger = len(point.fits_on) - 3
    more = f" and {larger} larger GPU{'s' if larger > 1 else ''}" if larger > 0 else ""
    freed = ""
    if point.fits is not False and gpu and gpu.title in point.fits_on and point.nvml_bytes > gpu.memory_bytes:
        freed = (
            f"reserved and NVML are those of a GPU with room: {gpu.title} has {gpu.memory_gib:.2f} GiB, on which "
            "PyTorch frees cached blocks instead\n"
        )
    return f"{needs}fits {', '.join(point.fits_on[:3])}{more}\n{freed}"


def _data(prediction: Prediction) -> str:
    risk = prediction.data
    if risk is None:
        return ""
    epoch = ""
    if risk.epoch_seconds:
        price = "" if risk.epoch_price is None else f", costs {risk.epoch_price:,.2f}"
        epoch = f"an epoch: {risk.steps:,} steps, {duration(risk.epoch_seconds)}{price}\n"
    if not risk.failing:
        return f"{epoch}data: all {risk.steps:,} steps of an epoch fit; the longest is {_risky(risk.longest)}\n"
    largest = "no length that occurs fits"
    if risk.largest_length is not None:
        largest = f"of the lengths that occur, {risk.largest_length:,} tokens is the largest that fits"
    failing = "".join(f"  does not fit at {_risky(step)}\n" for step in risk.failing)
    return f"{epoch}data: {risk.failing_steps:,} of {risk.steps:,} steps of an epoch do not fit; {largest}\n{failing}"


def _risky(step: RiskyStep) -> str:
    named = list(zip(step.rows, step.places, strict=True))[:_MOST_ROWS]
    rows = "; ".join(f"row {row:,} ({place})" for row, place in named)
    more = f" and {len(step.rows) - _MOST_ROWS} more" if len(step.rows) > _MOST_ROWS else ""
    return f"step {step.step:,}, rank {step.rank}: {step.length:,} tokens, {rows}{more}"


def _largest(prediction: Prediction) -> str:
    if not prediction.largest:
        return ""
    longest = max(prediction.points, key=lambda point: point.sequence_length)
    axes = [f"tokens at batch {longest.micro_batch:,}", f"batch at {longest.sequence_length:,} tokens"]
    names = ["largest that fits", "GiB for PyTorch", *axes]
    end = " (the model's)" if prediction.positions else ""
    rows: list[list[str]] = []
    for one in prediction.largest:
        found = [_value(one.sequence_length, end), _value(one.micro_batch)]
        rows.append([one.gpu or "the capacity", _gib(one.capacity_bytes), *found])
    curve = describe_curve(prediction.batch_pieces, "row") if prediction.batch_pieces else ""
    return _table(names, rows, left=(0,)) + (f"over the micro-batch: {curve}\n" if curve else "")


def _value(found: Largest, highest: str = "") -> str:
    if found.value is None:
        return "none"
    return f"{found.value:,}" if found.above is not None else f"{found.value:,}{highest or ' or more'}"


def _what_if(prediction: Prediction, width: int | None) -> str:
    """Return the table of changes, or a note on how to request it; fitted figures have a tilde."""
    if not prediction.what_if:
        if any(point.fits is False for point in prediction.points):
            return "it does not fit: --what-if predicts which changes would, and what they cost\n"
        return ""
    costs = ["1M tokens"] if prediction.price_per_gpu_hour is not None else []
    names = ["what if", "fits", "needs", "host", "ms a step", "GPU time", *costs, "set"]
    rows: list[list[str]] = []
    for one in prediction.what_if:
        if one.refused:
            rows.append([one.name, *["-"] * (len(names) - 2), one.refused])
            continue
        paid = one.price_per_million_tokens
        cost = [] if not costs else ["-"] if paid is None else [f"{paid:.4g}"]
        about = "~" if one.fitted else ""
        times = [f"{about}{one.step_seconds * 1e3:,.0f}", f"x {one.slower:.2f}"] if one.step_seconds else ["-", "-"]
        memory = [f"{about}{_gib(one.needed_bytes)}", f"{about}{_gib(one.host_bytes)}"]
        rows.append([one.name, "yes" if one.fits else "no", *memory, *times, *cost, one.change])
    length = max(point.sequence_length for point in prediction.points)
    head = (
        f"changes at {length:,} tokens, the fastest that fits first; memory in GiB, GPU time that of a sample, each "
        "from a dry run of its own\n"
    )
    if any(one.fitted for one in prediction.what_if):
        head += (
            "~ instead fitted to the parts of the run as it is, or to a few layers; with the change set, its "
            "prediction is from dry runs again\n"
        )
    return head + _table(names, rows, (0, len(names) - 1), width)


def _errors(prediction: Prediction) -> str:
    errors = prediction.expected_errors
    beside = prediction.beside_pytorch
    words = [f"{name.removesuffix('_peak_bytes')} {one.error:.0%}" for name, one in errors.items() if "peak" in name]
    if beside:
        words.append(f"NVML's {_gib(round(beside.value))} GiB beside PyTorch {beside.error:.0%} ({beside.basis})")
    return f"expected errors: {', '.join(words)}\n" if words else ""


def _alike(ranks: list[Rank]) -> list[list[Rank]]:
    """Return the ranks in groups with equal rows."""
    groups: dict[tuple[str, ...], list[Rank]] = {}
    for rank in ranks:
        sizes = [rank.phases[name].allocated_peak_bytes for name in _PHASES]
        key = tuple(_gib(size) for size in (*sizes, rank.reserved_peak_bytes, rank.host_bytes))
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def _numbers(ranks: list[Rank]) -> str:
    """Return ranks as text: 0-3,7."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank.rank == runs[-1][-1] + 1:
            runs[-1].append(rank.rank)
        else:
            runs.append([rank.rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}"
