"""Loads the state of a run at any time from its recording, for seeks and late joins; finds runs and recordings."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, floor, inf
from pathlib import Path
from typing import Protocol

from ...protocol.analysis.allocator.snapshot_replay import Replay
from ...protocol.errors import FtmonError, RecordingError
from ...protocol.host.process import ProcessId, is_alive
from ...protocol.messages.control import Alert
from ...protocol.messages.hosts import Job
from ...protocol.messages.telemetry import AllocatorEvents, Checkpoint, Evaluation
from ...protocol.messages.wire import RESTART_LEAP, Frame
from ...protocol.recording.reader import Reader, without_collections
from ...protocol.recording.results import MemoryColumn, PeakMark, RecordingInfo, TrainingPoint
from ...protocol.run.rundir import RunDir
from ...protocol.snapshot.reader import open_snapshot
from ..model.rank import KEPT
from ..model.run import SPARK, RunInfo, RunModel
from ..model.timeline import EMPTY, RATIO, Level
from ..model.training import TrainingHistory


class History(Protocol):
    """The methods common to ``protocol.recording.Reader``, which documents them, and ``RemoteReader``."""

    def info(self) -> RecordingInfo: ...
    def frames(self, after_seq: int, limit: int, until_t: float | None = None) -> list[Frame]: ...
    def state_at(self, t: float) -> list[Frame]: ...
    def memory(self, t0: float, t1: float, columns: int) -> list[MemoryColumn]: ...
    def training(self, rank: int, t0: float, t1: float, limit: int) -> list[TrainingPoint]: ...
    def alerts(self, t0: float | None = None, t1: float | None = None) -> list[Alert]: ...
    def logs(
        self, before_seq: int | None = None, rank: int | None = None, text: str = "", limit: int = 500
    ) -> list[Frame]: ...
    def marks(self) -> list[PeakMark]: ...
    def sampled(self, kind: str, rank: int, limit: int = 240) -> list[Frame]: ...
    def jobs(self) -> list[Frame]: ...
    def step_time(self, step: int) -> float | None: ...
    def seq_at(self, t: float) -> int: ...
    def close(self) -> None: ...


MAX_COLUMNS = 512
MAX_CELLS = 40_000  # maximum number of columns of all ranks together; with many ranks each has fewer
MAX_SAMPLES = 3_000  # maximum number of sampled steps of all ranks together
FEWEST_SAMPLES = 8  # minimum per rank, below which none are read
JOBS_READ = 16  # maximum number of jobs whose curves are read
COURSE_POINTS = 2048  # maximum number of training points read of a rank
COURSE_RANKS = 4  # minimum number of ranks whose training points are read: the others are assumed to be similar
COURSE_CELLS = 8192  # points of all ranks together up to which more of them are read, at most 64
RESULTS_READ = 1000  # maximum number of evaluations, and of checkpoints, that are read, spread over the recording


class Curves:
    """Training figures and results of one job."""

    def __init__(self) -> None:
        self.course = TrainingHistory()
        self.results: list[Frame] = []


class Overview:
    """Memory of every rank in aligned columns, and losses; copies of its parts go into models."""

    def __init__(self, begin: float, end: float, ranks: int) -> None:
        columns = max(32, min(MAX_COLUMNS, MAX_CELLS // max(ranks, 1)))
        self.span = 1  # seconds per column: a power of four, as in a timeline
        while (floor(end / self.span) - floor(begin / self.span) + 1) > columns:
            self.span *= RATIO
        self.first = floor(begin / self.span)
        self.columns = floor(end / self.span) - self.first + 1
        self.end = end
        self.memory: dict[int, Level] = {}
        self.curves: dict[int, Curves] = {}  # by job; a run without jobs has one part, under 0
        self.marks: dict[int, list[PeakMark]] = {}  # by rank: the steps in which a phase reached a new peak
        self.events: dict[int, list[AllocatorEvents]] = {}

    def of(self, job: int) -> Curves | None:
        """Return the curves of a job; of a run with one job its only ones."""
        return self.curves.get(job) or (next(iter(self.curves.values())) if len(self.curves) == 1 else None)


def read_overview(history: History, info: RecordingInfo, cancelled: Callable[[], bool] = lambda: False) -> Overview:
    """Read the overview of a recording; takes up to a second for a long one."""
    end = info.last_t
    overview = Overview(info.first_t, end, len(info.ranks))
    overview.memory = read_memory(history, overview.first, overview.columns, overview.span)
    spans = _job_spans(history, info)
    for job, (begin, until) in spans.items():
        curves = overview.curves[job] = Curves()
        for rank in info.ranks[: max(COURSE_RANKS, min(64, COURSE_CELLS // max(info.last_step, 1)))]:
            if cancelled():
                break
            for point in history.training(rank, begin, until, COURSE_POINTS):
                curves.course.add(point)
    _read_results(overview, spans, history, min(info.ranks, default=0))
    _read_explanations(overview, history, info.ranks, cancelled)
    return overview


def _read_results(overview: Overview, spans: dict[int, tuple[float, float]], history: History, rank: int) -> None:
    found = [frame for kind in ("evaluation", "checkpoint") for frame in history.sampled(kind, rank, RESULTS_READ)]
    for frame in sorted(found, key=lambda frame: frame.seq):
        for job, (begin, until) in spans.items():
            if begin <= frame.t <= until:
                overview.curves[job].results.append(frame)


def _job_spans(history: History, info: RecordingInfo) -> dict[int, tuple[float, float]]:
    jobs = [frame.message for frame in history.jobs() if isinstance(frame.message, Job) and frame.message.shown]
    if len(jobs) < 2:
        return {0: (info.first_t, info.last_t)}
    ends = [*(job.started for job in jobs[1:]), info.last_t]
    spans = {job.number: (job.started, end) for job, end in zip(jobs, ends, strict=True)}
    return dict(list(spans.items())[-JOBS_READ:])


def _read_explanations(overview: Overview, history: History, ranks: list[int], cancelled: Callable[[], bool]) -> None:
    for mark in history.marks():
        overview.marks.setdefault(mark.rank, []).append(mark)
    limit = min(KEPT, MAX_SAMPLES // max(len(ranks), 1))
    for rank in ranks if limit >= FEWEST_SAMPLES else ():
        if cancelled():
            break
        found = [frame.message for frame in history.sampled("events", rank, limit)]
        samples = [message for message in found if isinstance(message, AllocatorEvents)]
        overview.events[rank] = sorted(samples, key=lambda events: events.step)


def read_memory(history: History, first: int, columns: int, span: int, until: float = inf) -> dict[int, Level]:
    """Read aligned columns of ``span`` seconds from column ``first`` (spans since the epoch) on, by rank.

    A single column may end early, at ``until``.
    """
    levels: dict[int, Level] = {}
    end = min(float((first + columns) * span), until)
    for column in history.memory(float(first * span), end, columns) if columns > 0 else ():
        resident = EMPTY if column.resident_peak is None else column.resident_peak
        figures = column.allocated_peak, column.reserved_peak, resident
        levels.setdefault(column.rank, {})[first + column.index] = figures
    return levels


TAIL_FRAMES = 1200  # maximum number of frames before the requested time that are folded one by one
LOG_LINES = 300
FINE_SECONDS = 112  # seconds before the requested time for which memory is read second by second


def describe(info: RecordingInfo) -> RunInfo:
    """Return the run's information from a recording."""
    return RunInfo(info.run_id, info.name, info.kind, list(info.command), info.started, info.host)


@without_collections()
def load(history: History, t: float, info: RunInfo, overview: Overview | None = None) -> RunModel:
    """Return the state at hub time ``t``, equal to that after folding all frames, except for steps and logs.

    Recent steps reach back ``TAIL_FRAMES`` and logs ``LOG_LINES``; older memory and losses are pooled, from
    ``overview`` if available. Raises ``RecordingError`` if the recording cannot be read, ``HubError`` without an answer
    of the hub.
    """
    model = RunModel(copy.deepcopy(info))
    seq = history.seq_at(t)
    frames = {frame.seq: frame for frame in history.state_at(t)}
    frames.update((frame.seq, frame) for frame in history.logs(before_seq=seq + 1, limit=LOG_LINES))
    begin, tail = _tail(history, seq, TAIL_FRAMES, t)
    frames.update((frame.seq, frame) for frame in tail)
    if begin:
        _load_memory(history, tail[0].t if tail else t, t, model, overview)
    _fold(model, [frames[number] for number in sorted(frames)], begin)
    if overview is not None:
        adopt_steps(model, overview)
    model.last_seq = max(model.last_seq, seq)
    model.tick(t)
    return model


def _tail(history: History, seq: int, length: int, t: float) -> tuple[int, list[Frame]]:
    begin = max(seq - length, 0)
    tail = history.frames(begin, length, t)
    if seq > RESTART_LEAP:
        # The sequence numbers jump after a hub restart, and some of the wanted frames may be before that jump.
        across = max(seq - length - RESTART_LEAP, 0)
        wide = history.frames(across, length, t)
        if wide and tail and wide[-1].seq == tail[-1].seq:
            return across, wide
    return begin, tail


def _fold(model: RunModel, frames: list[Frame], begin: int) -> None:
    # Charts and rates need steps without gaps; of older steps only results, such as the run's peak, are kept.
    for frame in frames:
        if frame.seq <= begin:
            model.apply(frame)
    job, older = model.job, {number: rank.last for number, rank in model.ranks.items()}
    for rank in model.ranks.values():
        rank.steps.clear()
    model.training.course = TrainingHistory()
    for frame in frames:
        if frame.seq > begin:
            model.apply(frame)
    for number, last in older.items() if model.job == job else ():
        rank = model.ranks[number]
        if last is not None and not rank.steps:
            rank.steps.append(last)


def adopt(model: RunModel, overview: Overview, until: float | None = None, now: float | None = None) -> None:
    """Add the run's past to a model.

    Memory before ``until`` (seconds since the epoch) or before its own, and steps before its own. ``now``: the model's
    time if the overview reaches beyond it; a rank without memory receives it up to then.
    """
    for rank, past in overview.memory.items():
        timeline = model.rank(rank).timeline
        end = until
        if end is None:
            end = now if timeline.start is None else timeline.start
        timeline.adopt(past, overview.span, None if end is None else ceil(end / overview.span))
    adopt_steps(model, overview)


def adopt_steps(model: RunModel, overview: Overview) -> None:
    """Add to a model the losses, training figures and explanations of the steps before its own."""
    for number, rank in model.ranks.items():
        if number in overview.marks:
            rank.memory.adopt(overview.marks[number])
        if number in overview.events:
            rank.allocator.adopt(overview.events[number])
    curves = overview.of(model.job)
    if curves is not None:
        firsts = [rank.steps[0].step for rank in model.ranks.values() if rank.steps]
        first = model.training.course.first_step
        firsts += [first] if first is not None else []
        # Before the first step of all, the steps of the overview are still to come.
        model.training.course.adopt(curves.course, min(firsts) if firsts else curves.course.step_after(model.now))
        for frame in curves.results:
            if frame.t <= model.now and isinstance(frame.message, Evaluation):
                model.training.on_evaluation(frame.message)
            elif frame.t <= model.now and isinstance(frame.message, Checkpoint):
                model.training.on_checkpoint(frame.message)
    for job, past in overview.curves.items():
        if 0 < job < model.job and not model.job_losses.get(job):
            model.job_losses[job] = past.course.loss_means(SPARK)


def _load_memory(history: History, begin: float, t: float, model: RunModel, overview: Overview | None) -> None:
    """Load the memory before ``begin``, the start of the folded frames: by the second, and pooled before that."""
    span = overview.span if overview is not None else 1
    # By the second up to `begin`: from a multiple of 16 s on, not within the first pooled column.
    step = min(span, RATIO * RATIO)
    fine = ceil((floor(begin) - FINE_SECONDS) / step) * step
    parts: list[tuple[int, dict[int, Level]]] = []
    if overview is not None:
        fine = max(fine, overview.first * span)
        rest = floor(fine / span)
        adopt(model, overview, float(rest * span))
        middle = min(span, 16)
        parts.append((middle, read_memory(history, rest * span // middle, (fine - rest * span) // middle, middle)))
    last = floor(begin)
    parts += (1, read_memory(history, fine, last - fine, 1)), (1, read_memory(history, last, 1, 1, until=t))
    for width, levels in parts:
        for rank, level in levels.items():
            model.rank(rank).timeline.adopt(level, width)


def open_replays(
    path: str | Path,
    choose: Callable[[list[int]], list[int]] = list,
    meanwhile: Callable[[], object] | None = None,
) -> list[Replay]:
    """Read a snapshot and replay its devices.

    ``choose`` gets the snapshot's devices and returns those to replay; ``meanwhile`` is called while the file is read.
    Raises ``SnapshotError``: one line about the error in the file.
    """
    snapshot = open_snapshot(path, meanwhile)
    return [Replay(snapshot, device) for device in choose(snapshot.devices())]


@dataclass(frozen=True, slots=True)
class Hub:
    """A hub to connect to; a different process at the same addresses is a different hub."""

    addresses: Mapping[str, str]
    process: ProcessId | None = None
    read_only: bool = False


class Endpoint:
    """Finds a run's hub, checks whether it is alive, and opens the recording if it is local."""

    def __init__(self, run: RunDir | None = None, addresses: Mapping[str, str] | None = None) -> None:
        """Use a run directory of this host, or the channels' addresses (``sockets.CHANNELS``) elsewhere."""
        self._run = run
        self._addresses = addresses or {}

    @property
    def local(self) -> bool:
        return self._run is not None

    @property
    def trouble(self) -> str:
        """Why no hub is found, if the reason is not that the hub is gone; else empty."""
        return ""

    def hub(self) -> Hub | None:
        """Return the living hub, or None if there is none."""
        if self._run is None:
            return Hub(self._addresses)
        try:
            self._run.check()
            found = self._run.living_hub()
        except FtmonError:
            return None
        return Hub(found.addresses, found.process, found.read_only) if found else None

    def is_alive(self, hub: Hub) -> bool:
        """Return whether this hub process is alive; True for a hub on another host, where it is unknown."""
        return hub.process is None or is_alive(hub.process)

    def ended(self) -> bool:
        """Return whether the run has ended, and no process would start a hub any more.

        A launcher outlives its job until a hub has recorded the end, even if that hub starts after the end.
        """
        if self._run is None:
            return False
        try:
            launcher = self._run.read_run().launcher
            return self._run.read_exit() is not None if launcher is None else not is_alive(launcher)
        except FtmonError:
            return True

    def open_recording(self) -> History:
        """Open the recording file; raise ``RecordingError`` if it is not on this host, or cannot be read."""
        if self._run is None:
            raise RecordingError("the recording is on another host, and its hub is gone")
        return Reader(self._run.recording)
