"""Loads the state of a run at any time from its recording, for seeks and late joins."""

import copy
import gc
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from math import ceil, floor

from ...protocol.messages.telemetry import Checkpoint, Evaluation, Step
from ...protocol.messages.wire import RESTART_LEAP, Frame
from ...protocol.recording.results import RecordingInfo
from ..model.max_pyramid import Level
from ..model.run import RunInfo, RunModel
from .history import History
from .overview import Overview, fine_begin, read_memory

TAIL_FRAMES = 1200
"""Maximum number of frames before the requested time that are folded individually, for recent steps and memory."""

QUICK_TAIL = 400
QUICK_TAIL_A_RANK = 40
"""The same for a quick seek, per rank (at least)."""

LOG_LINES = 300
FINE_SECONDS = 112
"""Seconds before the requested time for which memory is read second by second."""


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
    """Loading was cancelled by another request."""


def load(
    history: History,
    t: float,
    info: RunInfo,
    overview: Overview | None = None,
    *,
    quick: bool = False,
    superseded: Callable[[], bool] = lambda: False,
) -> RunModel:
    """Return the state at hub time ``t``, equal to that after folding all frames, except for steps and logs.

    Recent steps reach back ``TAIL_FRAMES`` (fewer if ``quick``) and logs ``LOG_LINES``; older memory and losses are
    pooled, from ``overview`` if available. ``superseded`` is polled; True cancels the loading.

    Raises:
        Superseded: the loading was cancelled.
        RecordingError: the recording cannot be read.
        HubError: the hub does not answer.
    """
    with _without_collections():
        return _load(history, t, info, overview, quick, superseded)


@contextmanager
def _without_collections() -> Generator[None, None, None]:
    """Pause the garbage collector.

    A load creates tens of thousands of objects that are all kept. Traversing these and all others repeatedly takes as
    long as the load itself.
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
        # The sequence numbers jump after a hub restart, and some of the wanted frames may be before that jump.
        across = max(seq - length - RESTART_LEAP, 0)
        wide = history.frames(across, length, t)
        if wide and tail and wide[-1].seq == tail[-1].seq:
            begin, tail = across, wide
    go_on()
    frames.update((frame.seq, frame) for frame in tail)
    if begin:
        _load_memory(history, tail[0].t if tail else t, t, model, overview)
        go_on()
    # Charts and rates need steps without gaps; of older steps only results, such as the run's peak, are kept.
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
    """Add the run's past to a model.

    Memory before ``until`` (seconds since the epoch) or before its own, and steps before its own. ``now``: the model's
    time if the overview reaches beyond it; a rank without memory receives it up to then.
    """
    for rank, past in overview.memory.items():
        timeline = model.rank(rank).timeline
        end = until
        if end is None:
            end = now if timeline.start is None else timeline.start
        timeline.adopt(past.copy(None if end is None else ceil(end / overview.span)))
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
        if firsts:
            model.losses.adopt(curves.losses, min(firsts))
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
    """Load the memory before ``begin``, the start of the folded frames: by the second, and pooled before that."""
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
