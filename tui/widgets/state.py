"""State shared by all screens: the source and its model, the theme, and the user's selections."""

import time
from dataclasses import dataclass
from math import floor
from typing import Literal

from ...protocol.analysis.health.machine import HINDERING
from ...protocol.messages.telemetry import DeviceSample
from ...protocol.run.end import ending_in_words
from ...protocol.text import sanitize
from ..model.oom import CaseKey, ConsoleSession
from ..model.rank import RankModel
from ..model.run import HeldWatch, RunModel, activity_words, epoch_words
from ..model.training import ChartView
from ..model.waterfall import highest_prediction
from ..source.base import Connection, Source
from ..source.dry_runs import DryRuns
from .drawing import Theme, count
from .header import Summary
from .plots import Column, Scale

TROUBLE = ("waiting", "hung", "held", "stopped", "gone", "unreachable")


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank at one moment. Bytes, seconds, percent, watts and degrees Celsius; None: not known."""

    rank: int
    device: str  # `GPU 0` or `CPU`
    host: str = ""
    state: str = "starting"
    text: str = ""
    state_seconds: float | None = None  # seconds for which it has been in trouble
    measure: str = "cuda"
    capacity: int = 0
    allocated: int = 0
    peak: int = 0
    peak_phase: str = ""
    behind: int = 0  # reserved memory on a GPU, resident set on a CPU
    spikes: int = 0
    shares: tuple[tuple[str, float], ...] = ()
    step_seconds: float | None = None
    utilization: float | None = None
    power: float | None = None
    temperature: float | None = None
    throttled: str = ""
    host_memory: tuple[int, int] | None = None  # used and total bytes of the host, for a rank on the CPU

    @property
    def in_trouble(self) -> bool:
        return self.state in TROUBLE

    @property
    def share(self) -> float:
        """The rank's peak as a share of its device's capacity."""
        return self.peak / self.capacity if self.capacity else 0.0

    @property
    def words(self) -> tuple[str, str]:
        """Names of the solid and the lighter part of its memory."""
        return ("alloc", "rsvd") if self.measure == "cuda" else ("in use", "resident")


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


def columns_of(rank: RankModel, width: int, now: float, span: int) -> list[Column | None]:
    """Return a rank's last ``width`` columns: behind allocated is reserved, on the CPU the resident set."""
    columns = rank.timeline.window(width, now, span)
    behind = columns.resident if rank.on_cpu else columns.reserved
    found: list[Column | None] = []
    for solid, back, mark in zip(columns.allocated, behind, columns.marks, strict=True):
        severity, spike = (mark.severity, mark.kind == "spike") if mark else ("", False)
        found.append(None if solid < 0 and back < 0 else Column(max(0, solid), max(0, back), severity, spike))
    return found


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
    losses = tuple(float(f"{value:.4g}") for value in model.losses_of(model.job))
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
    return ", ".join([*words, "1 rank" if model.world_size == 1 else f"{model.world_size} ranks"])


def connection_words(connection: Connection, model: RunModel, read_only: bool) -> str:
    """Return the problem of the connection to the run; empty without one."""
    if connection.state == "hub-gone":
        return connection.text or "no hub: the ranks train on, looking for a new one"
    if connection.state == "connecting":
        return connection.text or "connecting"
    if model.hub is not None and model.hub.recording_error:
        return f"not recording: {model.hub.recording_error}"
    lost = f"{connection.lost:,} messages lost" if connection.lost else ""
    return connection.text or lost or ("read-only" if read_only else "")


SPANS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

ViewName = Literal["auto", "cards", "rows", "heat"]
VIEWS: tuple[ViewName, ...] = ("auto", "cards", "rows", "heat")

MESSAGE_SECONDS = 5.0


class AppState:
    """Shared state of the screens; plain, without Textual."""

    def __init__(self, source: Source | None, theme: Theme, read_only: bool = False) -> None:
        self.source = source
        self.theme = theme
        self.read_only = read_only
        self.selected = 0  # the selected rank of every screen; initially the first
        self.chosen = False
        self.span = 1
        self.view: ViewName = "auto"
        self.held = HeldWatch()
        self.chart = ChartView()  # Window, cursor and axis of the training screen, kept after it is closed
        self.consoles: dict[int, ConsoleSession] = {}
        """Console sessions with held ranks, by rank, kept after their screen is closed."""
        self.dry_runs: dict[CaseKey, DryRuns] = {}
        """Predictions of changes, by their error, kept after its screen is closed."""
        self._zoom: bool | None = None
        self._message: tuple[str, str, float] = ("", "", 0.0)
        self._empty = RunModel()

    @property
    def can_act(self) -> bool:
        return self.source is not None and self.source.can_command and not self.read_only

    def end_dry_runs(self) -> None:
        for one in self.dry_runs.values():
            one.close()
        self.dry_runs.clear()

    @property
    def model(self) -> RunModel:
        """The state to draw; read again at every paint, since a seek replaces it."""
        return self.source.model if self.source is not None else self._empty

    @property
    def rank(self) -> RankModel | None:
        """The selected rank; None before the first one."""
        return self.model.ranks.get(self.selected)

    @property
    def zoom(self) -> bool:
        """Whether graphs reach to the run's highest peak instead of the device's capacity.

        On the CPU this is the default, as the capacity is the host's, shared by all ranks.
        """
        return any(rank.on_cpu for rank in self.model.ranks.values()) if self._zoom is None else self._zoom

    def toggle_zoom(self) -> None:
        self._zoom = not self.zoom

    @property
    def run_peak(self) -> int:
        """The run's highest peak over all ranks, bytes; before the first step, the highest present figure."""
        peak = self.model.peak
        if peak is not None:
            return peak.bytes
        return max((max(r.reserved_bytes, r.resident_bytes) for r in self.model.ranks.values()), default=0)

    @property
    def scale_words(self) -> str:
        """Return text with the scale of graphs and the length of a column."""
        model = self.model
        capacities = {rank.capacity_bytes for rank in model.ranks.values() if rank.capacity_bytes}
        cpu = any(rank.on_cpu for rank in model.ranks.values())
        if self.zoom:
            why = "the run's peak" if model.peak else "no peak yet"
            top = f"graphs 0 to {nice_top(self.run_peak) / 2**30:.4g} GiB ({why})"
        elif len(capacities) == 1:
            top = f"graphs 0 to {capacities.pop() / 2**30:.1f} GiB ({'host RAM' if cpu else 'device'})"
        else:
            top = "graphs 0 to each device's capacity"
        return f"{top}, 1 column = {self.span} s"

    def finer(self) -> None:
        self.span = SPANS[max(0, SPANS.index(self.span) - 1)]

    def coarser(self) -> None:
        self.span = SPANS[min(len(SPANS) - 1, SPANS.index(self.span) + 1)]

    def next_view(self) -> None:
        self.view = VIEWS[(VIEWS.index(self.view) + 1) % len(VIEWS)]

    @property
    def replaying(self) -> bool:
        """Whether the screens show the past: a recording, or a live run paused or rewound."""
        transport = self.source.transport if self.source is not None else None
        return transport is not None and (transport.mode != "live" or not transport.playing)

    def show_message(self, text: str, tone: str = "accent") -> None:
        """Show a line at the bottom for a few seconds."""
        self._message = (text, tone, time.monotonic() + MESSAGE_SECONDS)

    @property
    def message(self) -> tuple[str, str]:
        """The line to show at the bottom, with its tone; empty if there is none."""
        text, tone, until = self._message
        return (text, tone) if text and time.monotonic() < until else ("", "")

    def select_valid(self) -> None:
        ranks = self.model.ranks
        if ranks and not self.chosen:
            self.selected = next(iter(ranks))
        elif ranks and self.selected not in ranks:
            self.selected = min(ranks, key=lambda rank: abs(rank - self.selected))

    def select(self, rank: int) -> None:
        self.selected, self.chosen = rank, True
