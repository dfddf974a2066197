"""One table of ftmon's figures: how each is read from a message, its unit, and its names in other systems.

Exporters read this table and nothing else. ``Figure.name`` is the figure's name in Prometheus and OpenMetrics behind
``PREFIX``: letters, digits and underscores, with the base unit (and ``_total`` for a counter) at the end. The names in
Megatron-Core, in W&B and trackio, and in the logs of Hugging Face's Trainer are given where a convention exists there.

**NaN.** Systems treat a figure that is not a number differently, and most hide it. Each figure that can become NaN or
infinite therefore has a companion ``NAME_finite``, 1 or 0, which is always a finite number.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from .messages.control import ExporterState, HubStats, RankState, RunState
from .messages.telemetry import Checkpoint, DeviceSample, Evaluation, Hello, Plan, Step
from .messages.wire import Message

PREFIX = "ftmon_"
Unit = Literal["", "seconds", "bytes", "ratio", "watts", "celsius", "hertz"]
Read = Callable[[Any], float | Mapping[str, float | None] | None]


class Figure(NamedTuple):
    """One figure. Its value is in base units: seconds, bytes, shares of 1."""

    name: str
    help: str  # a sentence without a full stop
    read: Read
    """Gets the message; returns the value, None if it is unknown, or values by what the label ``by`` tells apart."""
    unit: Unit = ""
    kind: Literal["gauge", "total", "events"] = "gauge"
    """``total``: a counter, read as its current value; ``events``: a counter that each message adds to."""
    by: str = ""  # label of the values, if there are several
    tracker: str = ""  # W&B, trackio, TensorBoard and MLflow (`tracker_name`); empty: not a figure for trackers
    ranks: Literal["max", "mean", "sum", "min"] = "max"
    """How one value is made of all ranks' for trackers; ``mean``: weighted by the label tokens."""
    transformers: str = ""  # key in the logs of Hugging Face's Trainer
    megatron: str = ""  # metric of `megatron.core.telemetry`, of which a value is `megatron_scale` times ftmon's
    megatron_scale: float = 1.0
    may_be_nan: bool = False


class Point(NamedTuple):
    """One value of a figure."""

    figure: Figure
    labels: dict[str, str]
    value: float


def _training_rate(step: Step, count: float) -> float | None:
    return count * 1e6 / step.training_us if count and step.training_us else None


def _seconds(micros: int | None) -> float | None:
    return None if micros is None else micros / 1e6


def _peak(step: Step, name: str) -> int | None:
    spans = [getattr(record, name) for record in step.phases]
    return max((span.peak for span in spans if span is not None), default=None)


def _last_allocated(step: Step) -> int | None:
    last = max(step.phases, key=lambda record: record.start_us + record.host_us, default=None)
    return None if last is None else last.allocated.end


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


FIGURES: Mapping[type[Message], tuple[Figure, ...]] = {
    Step: (
        Figure(
            "step", "Last finished optimizer step", lambda step: step.step, tracker="train/global_step",
            transformers="step",
        ),
        Figure(
            "loss", "Loss of the last step on this rank", lambda step: step.loss, tracker="train/loss", ranks="mean",
            transformers="loss", megatron="megatron.training.loss", may_be_nan=True,
        ),
        Figure(
            "grad_norm", "Norm of the gradients of the last step", lambda step: step.grad_norm,
            tracker="train/grad_norm", transformers="grad_norm", megatron="megatron.training.grad_norm",
            may_be_nan=True,
        ),
        Figure(
            "learning_rate", "Learning rate of the last step", lambda step: step.lr, tracker="train/learning_rate",
            transformers="learning_rate", megatron="megatron.training.learning_rate",
        ),
        Figure("loss_scale", "Loss scale of the last step", lambda step: step.loss_scale, tracker="train/loss_scale"),
        Figure(
            "skipped_steps_total", "Updates skipped by the loss scaler since the exporter started",
            lambda step: float(step.overflow), kind="events", megatron="megatron.training.skipped_iters",
        ),
        Figure(
            "step_duration_seconds", "Host time of the last step", lambda step: step.host_us / 1e6, "seconds",
            tracker="train/step_duration_seconds", megatron="megatron.training.step_duration_ms", megatron_scale=1e3,
        ),
        Figure(
            "step_device_duration_seconds", "Device time of the last step", lambda step: _seconds(step.device_us),
            "seconds", tracker="train/step_device_duration_seconds",
        ),
        Figure(
            "phase_duration_seconds", "Host time of each phase of the last step",
            lambda step: {record.name: record.host_us / 1e6 for record in step.phases}, "seconds", by="phase",
            tracker="train/phase_duration_seconds",
        ),
        Figure(
            "phase_device_duration_seconds", "Device time of each phase of the last step",
            lambda step: {record.name: _seconds(record.device_us) for record in step.phases}, "seconds", by="phase",
            tracker="train/phase_device_duration_seconds",
        ),
        Figure(
            "data_fetch_duration_seconds", "Host time of the training thread in its DataLoaders in the last step",
            lambda step: _seconds(step.fetch_us), "seconds", tracker="train/data_fetch_duration_seconds",
        ),
        Figure(
            "tokens_per_second", "Tokens of this rank per second of the last step, without evaluations and checkpoints",
            lambda step: _training_rate(step, step.tokens), tracker="train/tokens_per_second", ranks="sum",
            megatron="megatron.training.tokens_per_sec",
        ),
        Figure(
            "model_flops_per_second", "Floating-point operations of the model on this rank per second of the last step",
            lambda step: _training_rate(step, step.flops), tracker="train/model_flops_per_second", ranks="sum",
            megatron="megatron.training.throughput_tflops", megatron_scale=1e-12,
        ),
        Figure(
            "memory_allocated_bytes", "Memory allocated at the end of the last step", _last_allocated, "bytes",
            tracker="system/memory_allocated_bytes",
        ),
        Figure(
            "memory_allocated_peak_bytes", "Highest allocated memory in the last step",
            lambda step: _peak(step, "allocated"), "bytes", tracker="system/memory_allocated_peak_bytes",
            megatron="megatron.training.memory_allocated_gb", megatron_scale=1e-9,
        ),
        Figure(
            "memory_reserved_peak_bytes", "Highest reserved memory in the last step",
            lambda step: _peak(step, "reserved"), "bytes", tracker="system/memory_reserved_peak_bytes",
        ),
        Figure(
            "memory_resident_peak_bytes", "Highest resident set in the last step, on the CPU only",
            lambda step: _peak(step, "resident"), "bytes", tracker="system/memory_resident_peak_bytes",
        ),
        Figure(
            "allocator_retries_total", "Times the allocator released its cached memory (cudaMalloc retries)",
            lambda step: step.retries, kind="total",
        ),
        Figure(
            "out_of_memory_errors_total", "Out-of-memory errors that the allocator raised", lambda step: step.ooms,
            kind="total",
        ),
        Figure(
            "probe_duration_seconds", "Cost of ftmon to the training thread in the last step",
            lambda step: step.probe_us / 1e6, "seconds", tracker="system/probe_duration_seconds",
        ),
        Figure(
            "probe_dropped_messages_total", "Messages that the probe of this rank dropped", lambda step: step.dropped,
            kind="total",
        ),
    ),
    Evaluation: (
        Figure("eval_step", "Step of the last evaluation", lambda found: found.step, tracker="eval/global_step"),
        Figure(
            "eval_loss", "Loss of the last evaluation, mean over the label tokens of all ranks",
            lambda found: found.loss, tracker="eval/loss", transformers="eval_loss", may_be_nan=True,
        ),
        Figure(
            "eval_perplexity", "Perplexity of the last evaluation", lambda found: found.perplexity,
            tracker="eval/perplexity", may_be_nan=True,
        ),
        Figure(
            "eval_duration_seconds", "Time of the last evaluation", lambda found: found.seconds, "seconds",
            tracker="eval/duration_seconds", transformers="eval_runtime",
        ),
        Figure(
            "eval_result", "Other results of the last evaluation", lambda found: found.metrics, by="metric",
            tracker="eval", may_be_nan=True,
        ),
    ),
    Checkpoint: (
        Figure("checkpoint_step", "Step of the last checkpoint", lambda found: found.step),
        Figure(
            "checkpoint_timestamp_seconds", "When the last checkpoint was complete, since the epoch",
            lambda found: found.time, "seconds",
        ),
        Figure("checkpoint_duration_seconds", "Time of the last checkpoint", lambda found: found.seconds, "seconds"),
        Figure("checkpoint_size_bytes", "Size of the last checkpoint", lambda found: found.bytes or None, "bytes"),
    ),
    Plan: (
        Figure(
            "planned_steps", "Planned number of optimizer steps", lambda plan: plan.total_steps,
            transformers="max_steps",
        ),
    ),
    Hello: (
        Figure("rank_info", "A rank of the job: 1", lambda hello: 1.0),
        Figure(
            "memory_capacity_bytes", "Memory of the device that a rank computes on",
            lambda hello: hello.device.capacity_bytes, "bytes",
        ),
    ),
    RankState: (
        Figure("rank_state", "State of a rank: 1 for its current one", lambda found: {found.state: 1.0}, by="state"),
    ),
    RunState: (
        Figure("run_state", "State of the run: 1 for its current one", lambda found: {found.state: 1.0}, by="state"),
        Figure("run_exit_status", "Exit status of the job, negative for a signal", lambda found: found.exit_code),
    ),
    DeviceSample: (
        Figure(
            "device_memory_used_bytes", "Memory in use by all processes", lambda found: found.used_bytes, "bytes",
            tracker="system/device_memory_used_bytes",
        ),
        Figure("device_memory_size_bytes", "Memory of the device", lambda found: found.total_bytes, "bytes"),
        Figure(
            "device_utilization_ratio", "Share of the sampling period in which a kernel ran; of a host, busy CPU share",
            lambda found: _scaled(found.utilization_percent, 0.01), "ratio", tracker="system/device_utilization_ratio",
        ),
        Figure(
            "device_power_watts", "Power draw", lambda found: found.power_w, "watts",
            tracker="system/device_power_watts",
        ),
        Figure("device_power_limit_watts", "Power limit", lambda found: found.power_limit_w, "watts"),
        Figure(
            "device_temperature_celsius", "Temperature", lambda found: found.temperature_c, "celsius",
            tracker="system/device_temperature_celsius",
        ),
        Figure(
            "device_sm_clock_hertz", "Clock of the multiprocessors", lambda found: _scaled(found.sm_clock_mhz, 1e6),
            "hertz", tracker="system/device_sm_clock_hertz",
        ),
        Figure("device_memory_clock_hertz", "Clock of the memory",
               lambda found: _scaled(found.memory_clock_mhz, 1e6), "hertz"),
    ),
    HubStats: (
        Figure("hub_received_messages_total", "Messages the hub received", lambda found: found.received, kind="total"),
        Figure(
            "hub_lost_messages_total", "Messages of ranks known to be lost", lambda found: sum(found.lost.values()),
            kind="total",
        ),
        Figure("hub_cpu_ratio", "CPU share of the hub", lambda found: found.cpu_percent / 100, "ratio"),
        Figure("recording_size_bytes", "Size of the recording", lambda found: found.recording_bytes, "bytes"),
        Figure("recording_failed", "Whether recording fails: 1 or 0", lambda found: float(bool(found.recording_error))),
    ),
    ExporterState: (
        Figure(
            "exporter_dropped_points_total", "Points that did not reach the target of an exporter",
            lambda found: found.dropped, kind="total",
        ),
        Figure("exporter_failed", "Whether the target accepts nothing: 1 or 0", lambda found: float(bool(found.error))),
    ),
}  # fmt: skip
"""The figures of each type of message."""


def _of_rank(message: "Step | RankState") -> dict[str, str]:
    return {"rank": str(message.rank)}


def _of_device(sample: DeviceSample) -> dict[str, str]:
    return {"host": sample.host, "kind": sample.kind, "device": str(sample.index), "name": sample.name}


def _of_hello(hello: Hello) -> dict[str, str]:
    device = hello.device
    named = {"host": hello.host, "device": str(device.index), "name": device.name, "framework": hello.framework}
    return {"rank": str(hello.rank), **named, "model": hello.model}


_LABELS: Mapping[type[Message], Callable[[Any], dict[str, str]]] = {
    Step: _of_rank,
    RankState: _of_rank,
    Hello: _of_hello,
    DeviceSample: _of_device,
    Evaluation: lambda found: {"evaluation": found.name},
    ExporterState: lambda found: {"target": found.target},
}


def labels_of(message: Message) -> dict[str, str]:
    """Return the labels that tell apart messages of one type, and are labels of all its figures."""
    labels = _LABELS.get(type(message))
    return labels(message) if labels is not None else {}


def finite_flag(figure: Figure) -> Figure:
    """Return the companion of a figure that can become NaN; ``points`` computes its values."""
    return Figure(
        f"{figure.name}_finite", f"{figure.help}: 1 if it is a finite number, else 0", figure.read, by=figure.by,
        tracker=f"{figure.tracker}{'_' if '/' in figure.tracker else '/'}finite", ranks="min",
    )  # fmt: skip


_FLAGS = {each.name: finite_flag(each) for group in FIGURES.values() for each in group if each.may_be_nan}


def points(message: Message, kind: str = "") -> Iterator[Point]:
    """Yield the values of a message's figures and of their companions; unknown figures are left out.

    ``kind``: only figures of this kind.
    """
    labels = labels_of(message)
    for figure in FIGURES.get(type(message), ()):
        if kind and figure.kind != kind:
            continue
        found = figure.read(message)
        for key, value in found.items() if isinstance(found, Mapping) else (("", found),):
            if value is None:
                continue
            own = {**labels, figure.by: key} if figure.by else labels
            yield Point(figure, own, float(value))
            if figure.may_be_nan:
                yield Point(_FLAGS[figure.name], own, float(math.isfinite(value)))


TIME = Figure(
    "timestamp_seconds", "When the values of a row were recorded, since the epoch", lambda _: None, "seconds",
    tracker="system/timestamp_seconds",
)  # fmt: skip
"""A figure of each row of a tracker, as ``ELAPSED``: some trackers know only when a row reached them."""
ELAPSED = Figure(
    "elapsed_seconds", "The same, since the start of the run", lambda _: None, "seconds",
    tracker="system/elapsed_seconds",
)  # fmt: skip


def tracker_name(figure: Figure, labels: Mapping[str, str], host: str) -> str:
    """Return a value's name in trackers; empty: it has none. ``host`` is the one whose name is left out of names.

    A label other than the rank is appended after a slash; the name of an evaluation follows the prefix, as in the names
    of transformers' Trainer: ``eval/squad_loss``.
    """
    name = figure.tracker
    if not name:
        return ""
    if figure.by:
        name += f"/{labels[figure.by]}"
    evaluation = labels.get("evaluation", "")
    if evaluation and evaluation != "evaluation":
        name = name.replace("/", f"/{evaluation}_", 1)
    if "device" in labels:
        other = f"{labels['host']}/" if labels["host"] != host else ""
        name += f"/{other}{labels['kind']}{labels['device'] if labels['kind'] == 'gpu' else ''}"
    return name
