"""Converts the model to the widgets' values: rank views, memory columns, summary."""

from math import floor

from ....protocol.analysis.health.gpus import HINDERING
from ....protocol.messages.telemetry import DeviceSample
from ....protocol.run.endings import ending_in_words
from ....protocol.text import sanitize
from ...model.prediction import highest_prediction
from ...model.progress import activity_words, epoch_words
from ...model.rank import RankModel
from ...model.run import RunModel
from ...model.timeline import Columns
from ...source.base import Connection
from ..drawing.figures import count
from ..lines.summary import Summary
from ..plots.memory_graph import Column, Scale
from .rank_view import TROUBLE, RankView

_NICE = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)


def rank_views(model: RunModel) -> list[RankView]:
    """Return the views of all ranks, in rank order."""
    several = len({rank.hello.host for rank in model.ranks.values() if rank.hello}) > 1
    return [rank_view(model, rank, several) for rank in model.ranks.values()]


def rank_view(model: RunModel, rank: RankModel, with_host: bool = False) -> RankView:
    """Return the view of one rank."""
    hello, sample, cpu = rank.hello, model.device_of(rank), rank.on_cpu
    return RankView(
        rank=rank.rank,
        device=_device_name(rank),
        host=hello.host if hello and with_host else "",
        state=rank.state,
        text=rank.state_text,
        state_seconds=floor(max(0.0, model.now - rank.state_since)) if rank.state in TROUBLE else None,
        measure="glibc" if cpu else "cuda",
        capacity=rank.capacity_bytes,
        allocated=_steady(rank.allocated_bytes),
        peak=rank.peak.bytes if rank.peak else 0,
        peak_phase=rank.peak.phase if rank.peak else "",
        behind=_steady(rank.resident_bytes if cpu else rank.reserved_bytes),
        spikes=sum(mark.kind == "spike" for mark in rank.timeline.marks),
        shares=tuple((name, round(share, 3)) for name, share in rank.shares.parts.items() if share > 0),
        step_seconds=float(f"{rank.last.training_us / 1e6:.2g}") if rank.last is not None else None,
        utilization=_rounded(sample.utilization_percent) if sample else None,
        power=_rounded(sample.power_w) if sample else None,
        temperature=_rounded(sample.temperature_c) if sample else None,
        throttled=throttle_of(sample),
        host_memory=(_steady(sample.used_bytes), sample.total_bytes) if sample and cpu else None,
    )


def _steady(size: int) -> int:
    """Round bytes to the displayed precision, so that an invisible change causes no redraw."""
    return size // 2**20 * 2**20 if size < 2**30 else size // (10 * 2**20) * (10 * 2**20)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(round(value))


def _device_name(rank: RankModel) -> str:
    if rank.hello is None:
        return ""
    return "CPU" if rank.hello.device.kind == "cpu" else f"GPU {rank.hello.device.index}"


def throttle_of(sample: DeviceSample | None) -> str:
    """Return the reason why a device is throttled; empty if it is not."""
    return next((reason for reason in sample.throttle_reasons if reason in HINDERING), "") if sample else ""


def columns_of(columns: Columns, cpu: bool) -> list[Column | None]:
    """Convert a timeline's columns to the graph's: behind allocated is reserved, on the CPU the resident set."""
    behind = columns.resident if cpu else columns.reserved
    return [
        None
        if solid < 0 and back < 0
        else Column(
            max(0, solid), max(0, back), mark.severity if mark else "", mark is not None and mark.kind == "spike"
        )
        for solid, back, mark in zip(columns.allocated, behind, columns.marks, strict=True)
    ]


class History:
    """Caches the newest columns of one rank's timeline; within a span of time only the last columns are read again."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._version = -1
        self._columns: list[Column | None] = []

    def columns(self, rank: RankModel, width: int, now: float, span: int) -> list[Column | None]:
        """Return the last ``width`` columns of ``span`` seconds up to ``now``; the same list without a change."""
        timeline = rank.timeline
        key = (id(timeline), id(rank.last), width, span, floor(now / span), len(timeline.marks))
        if key == self._key:
            if self._version == timeline.version or len(self._columns) < 2:
                return self._columns
            fresh = columns_of(timeline.window(2, now, span), rank.on_cpu)
            if fresh != self._columns[-2:]:
                self._columns = self._columns[:-2] + fresh
        else:
            self._columns = columns_of(timeline.window(width, now, span), rank.on_cpu)
            self._key = key
        self._version = timeline.version
        return self._columns


def nice_top(peak: int) -> int:
    """Round bytes up to a round figure in GiB (1, 1.25, 1.5, 2 ... times a power of ten) for the zoomed scale."""
    if peak <= 0:
        return 2**30
    size, power = peak / 2**30, 1.0
    while size >= 10:
        size, power = size / 10, power * 10
    while size < 1:
        size, power = size * 10, power / 10
    return round(next(step for step in _NICE if size <= step) * power * 2**30)


def scale_of(view: RankView, zoom: bool, run_peak: int) -> Scale:
    """Return a rank's scale: its device's capacity, or if zoomed the run's highest peak, common to all ranks."""
    top = nice_top(run_peak) if zoom or not view.capacity else view.capacity
    return Scale(top, view.peak)


def summary_of(model: RunModel, connection: Connection, read_only: bool = False) -> Summary:
    """Return the summary of a run."""
    info, fit, peak, rates = model.info, model.fit, model.peak, model.rates
    losses = tuple(float(f"{value:.4g}") for value in model.losses.means(60))
    expected = highest_prediction(model)
    ended = ""
    if model.training.early_stop is not None and model.state != "failed":
        ended = "stopped early"
    elif model.ended:
        ended = model.state_text or (ending_in_words(model.exit_code, None) if model.exit_code else "")
    return Summary(
        name=info.name or info.id or "run",
        state=model.state,
        trouble=trouble_words(model),
        job=model.job if model.has_jobs else 0,
        activity=activity_words(model),
        step=model.step,
        total_steps=model.total_steps,
        epochs=epoch_words(model),
        seconds_left=model.seconds_left,
        stalled_seconds=stalled_seconds(model),
        ended=ended,
        loss=model.loss,
        losses_by_name=tuple((sanitize(name, 24), value) for name, value in model.losses_by_name.items()),
        losses=losses,
        evaluation_loss=model.training.evaluation.loss if model.training.evaluation else None,
        tokens_per_second=float(f"{rates.tokens_per_second:.3g}") if rates.tokens_per_second else None,
        mfu=None if model.mfu is None else round(model.mfu, 2),
        step_seconds=float(f"{rates.seconds_per_step:.2g}") if rates.seconds_per_step else None,
        peak=peak.bytes if peak else 0,
        capacity=fit.capacity_bytes,
        predicted=expected.predicted_bytes if expected is not None else 0,
        parted=expected is not None and expected.parted,
        setup=setup_words(model),
        connection=connection_words(connection, model, read_only),
    )


def trouble_words(model: RunModel) -> str:
    """Return the number of ranks by trouble: ``1 hung, 3 waiting``."""
    counts = model.rank_states()
    order = ("hung", "held", "gone", "unreachable", "stopped", "waiting")
    return ", ".join(f"{counts[state]} {state}" for state in order if counts.get(state)) if not model.ended else ""


def stalled_seconds(model: RunModel) -> int | None:
    """Return the whole seconds for which ranks in trouble have blocked a run; None while it makes progress."""
    since = [rank.state_since for rank in model.ranks.values() if rank.state in TROUBLE]
    return floor(max(0.0, model.now - min(since))) if since and not model.ended else None


def setup_words(model: RunModel) -> str:
    """Return the setup in words: parameters, ZeRO stage, precision, ranks."""
    info = model.info
    words = [info.model.rsplit("/", 1)[-1]] if info.model else []
    if info.parameters:
        some = 0 < info.trainable_parameters < info.parameters
        trained = f" ({count(info.trainable_parameters)} trained)" if some else ""
        words.append(f"{count(info.parameters)} parameters{trained}")
    if info.zero_stage is not None:
        words.append(f"ZeRO-{info.zero_stage}")
    elif info.framework:
        words.append(info.framework)
    words += [info.precision] if info.precision else []
    words.append("1 rank" if model.world_size == 1 else f"{model.world_size} ranks")
    return ", ".join(words)


def connection_words(connection: Connection, model: RunModel, read_only: bool) -> str:
    """Return the problem of the connection to the run; empty without one."""
    if connection.state == "hub-gone":
        return connection.text or "no hub: the ranks train on, looking for a new one"
    if connection.state == "connecting":
        return connection.text or "connecting"
    if model.hub is not None and model.hub.recording_error:
        return f"not recording: {model.hub.recording_error}"
    if connection.text:
        return connection.text
    if connection.lost:
        return f"{connection.lost:,} messages lost"
    return "read-only" if read_only else ""
