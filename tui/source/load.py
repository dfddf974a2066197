"""The state of a run at any time, from its recording: what a seek and a late join show."""

import copy
import gc
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from math import ceil, floor

from ...protocol.recording.results import RecordingInfo
from ...protocol.telemetry import Checkpoint, Evaluation, Step
from ...protocol.wire import RESTART_LEAP, Frame
from ..model.max_pyramid import Level
from ..model.run import RunInfo, RunModel
from .history import History
from .overview import Overview, fine_begin, read_memory

TAIL_FRAMES = 1200
"""Messages applied one by one before the time sought, at the most: recent steps, recent memory."""

QUICK_TAIL = 400
QUICK_TAIL_A_RANK = 40
"""The same for a seek, which is to be quick: at the least, and for each rank."""

LOG_LINES = 300
FINE_SECONDS = 112
"""Seconds before the time sought whose memory is read second by second."""


def describe(info: RecordingInfo) -> RunInfo:
    """Return the run's information from a recording."""
    return RunInfo(
        id=info.run_id,
        name=info.name,
        kind=info.kind,
        command=list(info.command),
        created=info.started,
        host=info.host,
    )


class Superseded(Exception):  # noqa: N818 - no error: the state is not needed any more
    """Something else is to be loaded instead."""


def load(
    history: History,
    t: float,
    info: RunInfo,
    overview: Overview | None = None,
    *,
    quick: bool = False,
    superseded: Callable[[], bool] = lambda: False,
) -> RunModel:
    """Build the state at hub time ``t``: of everything exactly as if all had been applied, but recent steps and logs.

    Those reach back ``TAIL_FRAMES`` (less when it is to be ``quick``) and ``LOG_LINES``; older memory and step times
    come pooled, from ``overview`` when it is there. ``superseded`` is asked now and then; True gives the loading up.

    Raises:
        Superseded: the loading was given up.
        RecordingError: the recording cannot be read.
        HubError: the hub, asked for it, does not answer.
    """
    with _without_collections():
        return _load(history, t, info, overview, quick, superseded)


@contextmanager
def _without_collections() -> Generator[None, None, None]:
    """Pause the garbage collector.

    A load makes tens of thousands of objects, all of which stay. Traversing them, and all others, again and again takes
    as long as the load itself.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _load(
    history: History,
    t: float,
    info: RunInfo,
    overview: Overview | None,
    quick: bool,
    superseded: Callable[[], bool],
) -> RunModel:
    def go_on() -> None:
        if superseded():
            raise Superseded

    model = RunModel(copy.deepcopy(info))
    seq = history.seq_at(t)
    frames = {frame.seq: frame for frame in history.state_at(t)}
    length = TAIL_FRAMES
    if quick:
        ranks = len({frame.message.rank for frame in frames.values() if isinstance(frame.message, Step)})
        length = min(max(QUICK_TAIL, QUICK_TAIL_A_RANK * ranks), TAIL_FRAMES)
    begin = max(seq - length, 0)
    frames.update((frame.seq, frame) for frame in history.logs(before_seq=seq + 1, limit=LOG_LINES))
    go_on()
    tail = history.frames(begin, length, t)
    if seq > RESTART_LEAP:
        # The numbers go on far beyond those of an earlier hub, and some of the wanted ones may be before that leap.
        across = max(seq - length - RESTART_LEAP, 0)
        wide = history.frames(across, length, t)
        if wide and tail and wide[-1].seq == tail[-1].seq:
            begin, tail = across, wide
    go_on()
    frames.update((frame.seq, frame) for frame in tail)
    if begin:
        _load_memory(history, tail[0].t if tail else t, t, model, overview)
        go_on()
    # Charts and rates need steps without gaps; of older ones (the run's peak) only the results are kept.
    apply_all(model, (frames[number] for number in sorted(frames) if number <= begin))
    job, older = model.job, {number: rank.last for number, rank in model.ranks.items()}
    for rank in model.ranks.values():
        rank.forget_steps()
    model.training.forget_course()
    apply_all(model, (frames[number] for number in sorted(frames) if number > begin))
    for number, last in older.items() if model.job == job else ():
        rank = model.ranks[number]
        if last is not None and not rank.steps:
            rank.remember_step(last)
    if overview is not None:
        adopt_steps(model, overview)
    model.last_seq = max(model.last_seq, seq)
    model.tick(t)
    return model


def apply_all(model: RunModel, frames: Iterable[Frame]) -> None:
    """Apply frames in order."""
    for frame in frames:
        model.apply(frame)


def adopt(model: RunModel, overview: Overview, until: float | None = None, now: float | None = None) -> None:
    """Give a model the run's past.

    Args:
        model: gets memory before ``until``, or before what it has; and steps before those it knows.
        overview: the whole run, copied from.
        until: seconds since the epoch.
        now: the model's time, where the run is known beyond it: a rank without memory gets it up to then.
    """
    for rank, past in overview.memory.items():
        timeline = model.rank(rank).timeline
        end = until
        if end is None:
            end = now if timeline.start is None else timeline.start
        timeline.adopt(past.copy(None if end is None else ceil(end / overview.span)))
    adopt_steps(model, overview)


def adopt_steps(model: RunModel, overview: Overview) -> None:
    """Give a model the step times, losses and explanations of the steps before those it knows."""
    firsts: list[int] = []
    curves = overview.of(model.job)
    for number, rank in model.ranks.items():
        if number in overview.marks:
            rank.memory.adopt(overview.marks[number])
        if number in overview.events:
            rank.allocator.adopt(overview.events[number])
        first = rank.step_ms.first_step
        if first is not None:
            firsts.append(first)
            if curves is not None and number in curves.step_ms:
                rank.step_ms.adopt(curves.step_ms[number], first)
    if firsts and curves is not None:
        model.losses.adopt(curves.losses, min(firsts))
    if curves is not None:
        model.training.course.adopt(curves.course, min(firsts, default=1 << 62))
        for frame in curves.results:
            if frame.t <= model.now and isinstance(frame.message, Evaluation):
                model.training.on_evaluation(frame.message)
            elif frame.t <= model.now and isinstance(frame.message, Checkpoint):
                model.training.on_checkpoint(frame.message)
    for job, past in overview.curves.items():
        if 0 < job < model.job and not model.job_losses.get(job):
            model.job_losses[job] = past.losses


def _load_memory(history: History, begin: float, t: float, model: RunModel, overview: Overview | None) -> None:
    """Load the memory before ``begin``, where the frames begin that reach to ``t``: by the second, and older pooled."""
    span = overview.span if overview is not None else 1
    fine = fine_begin(begin, FINE_SECONDS, span)
    if overview is not None:
        fine = max(fine, overview.first * span)
        rest = floor(fine / span)
        adopt(model, overview, float(rest * span))
        middle = min(span, 16)
        _adopt(model, read_memory(history, rest * span // middle, (fine - rest * span) // middle, middle))
    last = floor(begin)
    _adopt(model, read_memory(history, fine, last - fine, 1))
    _adopt(model, read_memory(history, last, 1, 1, until=t))


def _adopt(model: RunModel, levels: dict[int, Level]) -> None:
    for rank, level in levels.items():
        model.rank(rank).timeline.adopt(level)
