"""Training figures over steps, evaluations and checkpoints, and the window and cursor of their chart.

All figures of a job are kept in buckets of 1, 2, 4, 8 ... steps, which merge as the run grows. Live steps and pooled
points of a recording go into the same buckets.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, isfinite
from statistics import fmean
from typing import Literal, TypeVar

from ...protocol.host.machine import mfu
from ...protocol.messages.telemetry import SAID, Activity, Checkpoint, EarlyStop, Evaluation, Plan, Step
from ...protocol.recording.results import TrainingPoint

CAPACITY = RESULTS = 4096
_PAUSES_KEPT = 5
_Result = TypeVar("_Result", Evaluation, Checkpoint)


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """One bucket, ready to draw. None: unknown."""

    first_step: int
    step: int  # the last step of the bucket; equal to the first if the bucket has one step
    t: float  # time at which the hub received the last step, seconds since the epoch
    tokens: float  # tokens of all ranks from the beginning of the job to this bucket's end
    loss: float | None = None
    low_loss: float | None = None
    high_loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    max_grad_norm: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    data_share: float | None = None  # share of the step in which a rank waits for data
    step_seconds: float | None = None
    loss_not_finite: int = 0
    """Number of steps, one for each rank, whose loss was NaN or infinite; the mean does not include them."""
    grad_norm_not_finite: int = 0

    @property
    def steps(self) -> int:
        """Steps in the bucket."""
        return self.step - self.first_step + 1


_SUMS = (
    *("count", "data_us", "flops", "grad_norm", "loss", "loss_weight", "lr", "lr_weight", "norm_weight"),
    *("loss_not_finite", "grad_norm_not_finite", "tokens", "training_us", "whole_us"),
)


class _Bucket:
    __slots__ = (*_SUMS, "first_step", "high_loss", "low_loss", "max_grad_norm", "step", "t")

    def __init__(self) -> None:
        self.count = self.training_us = self.tokens = self.data_us = self.whole_us = 0
        self.loss_weight = self.lr_weight = self.norm_weight = 0
        self.loss_not_finite = self.grad_norm_not_finite = 0
        self.flops = self.loss = self.lr = self.grad_norm = self.t = 0.0
        self.low_loss = self.max_grad_norm = self.high_loss = None
        self.first_step, self.step = 1 << 62, 0

    def add(self, point: TrainingPoint) -> None:
        count = point.count
        self.count += count
        self.training_us += point.training_us
        self.tokens += point.tokens
        self.flops += point.flops
        self.data_us += point.data_us
        self.whole_us += point.whole_us
        self.t = max(self.t, point.t)
        self.first_step = min(self.first_step, point.first_step)
        self.step = max(self.step, point.step)
        self.loss_not_finite += point.loss_not_finite
        self.grad_norm_not_finite += point.grad_norm_not_finite
        if point.loss is not None:
            weight = point.label_tokens or count
            self.loss += point.loss * weight
            self.loss_weight += weight
            self.low_loss = _least(self.low_loss, point.loss if point.low_loss is None else point.low_loss)
            self.high_loss = _most(self.high_loss, point.loss if point.high_loss is None else point.high_loss)
        if point.lr is not None:
            self.lr += point.lr * count
            self.lr_weight += count
        if point.grad_norm is not None:
            self.grad_norm += point.grad_norm * count
            self.norm_weight += count
            self.max_grad_norm = _most(
                self.max_grad_norm, point.grad_norm if point.max_grad_norm is None else point.max_grad_norm
            )

    def merge(self, other: "_Bucket") -> None:
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.t = max(self.t, other.t)
        self.first_step, self.step = min(self.first_step, other.first_step), max(self.step, other.step)
        self.low_loss = _least(self.low_loss, other.low_loss)
        self.high_loss = _most(self.high_loss, other.high_loss)
        self.max_grad_norm = _most(self.max_grad_norm, other.max_grad_norm)


def _least(one: float | None, other: float | None) -> float | None:
    return other if one is None or (other is not None and other < one) else one


def _most(one: float | None, other: float | None) -> float | None:
    return other if one is None or (other is not None and other > one) else one


class TrainingHistory:
    """All figures of a job over its steps, from any number of ranks."""

    def __init__(self) -> None:
        self.per = 1  # steps per bucket
        self.version = 0
        self._buckets: dict[int, _Bucket] = {}
        self._span = (0, 0)
        self._made: tuple[object, list[HistoryPoint]] = (None, [])

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def first_step(self) -> int | None:
        """The first known step; None while empty."""
        return min((bucket.first_step for bucket in self._buckets.values()), default=None)

    def add(self, point: TrainingPoint) -> None:
        """Add one rank's step, or several that a recording has pooled."""
        bucket = self._buckets.get(point.step // self.per)
        if bucket is None:
            bucket = self._make(point.step)
        bucket.add(point)
        self.version += 1

    def step_after(self, t: float) -> int:
        """Return the first step that the hub received after a time; beyond all steps if there is none."""
        return min((bucket.first_step for bucket in self._buckets.values() if bucket.t > t), default=1 << 62)

    def adopt(self, past: "TrainingHistory", before: int) -> None:
        """Prepend the steps of ``past`` before ``before`` and before those known here; ``past`` is not changed."""
        before = min([before, *(bucket.first_step for bucket in self._buckets.values())])
        while self.per < past.per:
            self._halve()
        for bucket in past._buckets.values():
            if bucket.first_step < before:
                self._make(bucket.step).merge(bucket)
        self.version += 1

    def moments(self, ranks: int, peak: float | None = None) -> list[HistoryPoint]:
        """Return the buckets in order.

        ``ranks``: of the job; unread ones count with the mean tokens of those read. ``peak``: data-sheet peak of a
        rank's device, FLOP/s; None: no MFU.
        """
        key = (self.version, ranks, peak)
        if self._made[0] != key:
            self._made = (key, self._moments(max(1, ranks), peak))
        return self._made[1]

    @property
    def mean_step(self) -> tuple[float, float, float]:
        """Seconds, tokens and FLOPs of a rank's step, means over all steps except the first; zeros if unknown."""
        found = sorted(self._buckets.items())
        kept = [bucket for _, bucket in (found[1:] if len(found) > 1 and self.per == 1 else found)]
        count = max(1, sum(bucket.count for bucket in kept))
        flops = sum(bucket.flops for bucket in kept) if all(bucket.flops for bucket in kept) else 0.0
        seconds, tokens = (sum(getattr(each, name) for each in kept) for name in ("training_us", "tokens"))
        return seconds / 1e6 / count, tokens / count, flops / count

    def loss_means(self, width: int) -> list[float]:
        """Return the job's losses as at most ``width`` means of neighbouring buckets, oldest first: a sparkline."""
        known = [each.loss / each.loss_weight for _, each in sorted(self._buckets.items()) if each.loss_weight]
        group = max(1, -(-len(known) // width))
        return [fmean(known[at : at + group]) for at in range(0, len(known), group)]

    def _moments(self, ranks: int, peak: float | None) -> list[HistoryPoint]:
        found: list[HistoryPoint] = []
        total = 0.0
        for _, bucket in sorted(self._buckets.items()):
            seconds = bucket.training_us / 1e6
            # Since the previous bucket: steps missing in between, or in both, count once.
            new_steps = bucket.step - (found[-1].step if found else bucket.first_step - 1)
            total += bucket.tokens / bucket.count * ranks * new_steps
            speed = bucket.tokens / seconds * ranks if seconds and bucket.tokens else None
            found.append(
                HistoryPoint(
                    *(bucket.first_step, bucket.step, bucket.t, total),
                    bucket.loss / bucket.loss_weight if bucket.loss_weight else None,
                    *(bucket.low_loss, bucket.high_loss),
                    bucket.lr / bucket.lr_weight if bucket.lr_weight else None,
                    bucket.grad_norm / bucket.norm_weight if bucket.norm_weight else None,
                    bucket.max_grad_norm,
                    speed,
                    mfu(bucket.flops, seconds, peak),
                    min(1.0, bucket.data_us / bucket.whole_us) if bucket.whole_us else None,
                    seconds / bucket.count if seconds else None,
                    *(bucket.loss_not_finite, bucket.grad_norm_not_finite),
                )
            )
        return found

    def _make(self, step: int) -> _Bucket:
        key = step // self.per
        if not self._buckets:
            self._span = (key, key)
        low, high = min(self._span[0], key), max(self._span[1], key)
        while high - low >= CAPACITY:
            self._halve()
            key = step // self.per
            low, high = min(self._span[0], key), max(self._span[1], key)
        self._span = (low, high)
        return self._buckets.setdefault(key, _Bucket())

    def _halve(self) -> None:
        self.per *= 2
        old, self._buckets = self._buckets, {}
        for key, bucket in old.items():
            self._buckets.setdefault(key // 2, _Bucket()).merge(bucket)
        self._span = (self._span[0] // 2, self._span[1] // 2)


class Training:
    """Training figures, evaluations and checkpoints of a job."""

    def __init__(self) -> None:
        self.course = TrainingHistory()
        self.evaluations: list[Evaluation] = []  # sorted by step; one per step and name
        self.checkpoints: list[Checkpoint] = []
        self.activity: Activity | None = None  # the run's current activity besides steps; None if unknown
        self.early_stop: EarlyStop | None = None
        self.begun: list[Activity] = []
        self.version = 0
        self._pauses: dict[str, deque[float]] = {name: deque(maxlen=_PAUSES_KEPT) for name in ("eval", "checkpoint")}

    def on_step(self, step: Step, point: TrainingPoint) -> None:
        self.course.add(point)
        if len(step.phases) > 1:
            for record in step.phases:
                kept = self._pauses.get(record.name)
                if kept is not None:
                    kept.append(record.host_us / 1e6)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        _put(self.evaluations, evaluation)
        self.version += 1

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        _put(self.checkpoints, checkpoint)
        self.version += 1

    def on_early_stop(self, stop: EarlyStop) -> None:
        """Fold the end of the training before its planned end."""
        self.early_stop = stop
        self.version += 1

    def on_activity(self, activity: Activity) -> None:
        self.version += 1
        if activity.name in SAID:
            self.begun += [] if activity.over else [activity]
            return
        before, self.activity = self.activity, None if activity.over else activity
        if not activity.over and (before is None or (before.name, before.text) != (activity.name, activity.text)):
            self.begun.append(activity)

    @property
    def said(self) -> list[str]:
        """The settings that were chosen, and notes of the trainer, each once."""
        return list(dict.fromkeys(f"{each.name}: {each.text}" for each in self.begun if each.name in SAID))

    @property
    def evaluation(self) -> Evaluation | None:
        """The latest evaluation with a loss, of the split evaluated first if there are several."""
        named = [each for each in self.evaluations if each.loss is not None]
        return next((each for each in reversed(named) if each.name == named[0].name), None)

    @property
    def best(self) -> Evaluation | None:
        """The evaluation with the lowest loss, of the same split."""
        last = self.evaluation
        known = [each for each in self.evaluations if last is not None and each.name == last.name]
        return min(with_loss(known), key=lambda each: each.loss or 0.0, default=known[0] if known else None)

    def seconds_of(self, kind: str) -> float | None:
        """Return the seconds for which an evaluation (``eval``) or checkpoint pauses training; None before any."""
        pauses = self._pauses[kind]
        if pauses:
            return sum(pauses) / len(pauses)
        if kind == "checkpoint":
            taken = [each.seconds for each in self.checkpoints[-_PAUSES_KEPT:] if each.seconds]
            return sum(taken) / len(taken) if taken else None
        by_step: dict[int, float] = {}
        for each in self.evaluations:
            by_step[each.step] = by_step.get(each.step, 0.0) + each.seconds
        last = [seconds for _, seconds in sorted(by_step.items())[-_PAUSES_KEPT:] if seconds]
        return sum(last) / len(last) if last else None


def _put(known: list[_Result], new: _Result) -> None:
    """Insert a result by step; a result of the same step and name is replaced."""
    place = len(known)
    while place and known[place - 1].step > new.step:
        place -= 1
    for earlier in range(place - 1, -1, -1):
        if known[earlier].step != new.step:
            break
        if _name(known[earlier]) == _name(new):
            known[earlier] = new
            return
    known.insert(place, new)
    del known[:-RESULTS]


def _name(result: Evaluation | Checkpoint) -> str:
    return result.name if isinstance(result, Evaluation) else result.path


def times_left(every: int, at_end: bool, step: int, total: int) -> int:
    """Return the number of actions every n steps (0: never), and maybe after the last, from ``step`` to ``total``."""
    if step >= total:
        return 0
    left = total // every - step // every if every > 0 else 0
    return left + (at_end and (every <= 0 or total % every != 0))


def seconds_of_pauses_left(training: Training, plan: Plan, step: int) -> float:
    """Return the estimated time of the remaining evaluations and checkpoints, from those so far, seconds."""
    evaluations = times_left(plan.evaluate_every, plan.evaluate_at_end, step, plan.total_steps)
    checkpoints = times_left(plan.checkpoint_every, plan.checkpoint_at_end, step, plan.total_steps)
    return evaluations * (training.seconds_of("eval") or 0.0) + checkpoints * (training.seconds_of("checkpoint") or 0.0)


def smoothed(moments: Sequence[HistoryPoint], decay: float) -> list[float | None]:
    """Return the loss smoothed by an exponential moving average with bias correction (Kingma & Ba, Adam, 2015).

    ``decay``: weight of the previous average at each step, 0 to 1; a bucket of n steps decays it by ``decay ** n``. The
    value of a bucket is None if it, and all before, have no loss.
    """
    found: list[float | None] = []
    total = weight = 0.0
    for moment in moments:
        if moment.loss is not None:
            keep = decay ** max(1, moment.steps)
            total = total * keep + moment.loss * (1 - keep)
            weight = weight * keep + (1 - keep)
        found.append(total / weight if weight else None)
    return found


def perplexity_of(evaluation: Evaluation) -> float | None:
    """Return an evaluation's perplexity, reported or from its loss."""
    if evaluation.perplexity is not None or evaluation.loss is None:
        return evaluation.perplexity
    return exp(evaluation.loss) if evaluation.loss < 700 else None


def with_loss(evaluations: Iterable[Evaluation]) -> list[Evaluation]:
    """Return the evaluations that have a loss that can be drawn."""
    return [each for each in evaluations if each.loss is not None and isfinite(each.loss)]


Axis = Literal["steps", "tokens", "time"]
AXES: tuple[Axis, ...] = ("steps", "tokens", "time")

SMOOTHINGS: tuple[int | None, ...] = (None, 10, 30, 100, 300, 1)
"""Number of steps over which the loss is smoothed; None: depends on the length of the run; 1: no smoothing."""

_FIFTIETH = 50
_MOST_SMOOTHED = 1000
FEWEST_STEPS = 8  # steps of the narrowest window
FIGURES = ("lr", "grad_norm", "tokens_per_second", "mfu", "data_share")
"""Attributes of a ``HistoryPoint`` that the second pane may show, in order."""


def x_of(moment: HistoryPoint, axis: Axis, begun: float) -> float:
    """Return a moment's coordinate on an axis: its step, tokens so far, or seconds since ``begun``."""
    if axis == "steps":
        return float(moment.step)
    return moment.tokens if axis == "tokens" else max(0.0, moment.t - begun)


class ChartView:
    """The user's choices, without data of the run.

    Window and cursor are kept in steps, so they stay where they are when the axis changes or the run continues.
    """

    def __init__(self) -> None:
        self.axis: Axis = "steps"
        self.figure = 0
        self.smoothing: int | None = None
        self.span: int | None = None  # steps in view; None: all
        self.end: int | None = None  # the last step in view; None: the newest, as the run continues
        self.cursor: int | None = None  # the step whose figures are shown; None: the newest

    def visible(self, moments: Sequence[HistoryPoint]) -> Sequence[HistoryPoint]:
        """Return the moments in view."""
        if self.span is None or not moments:
            return moments
        last = moments[-1].step if self.end is None else self.end
        first = bisect_left(moments, last - self.span + 1, key=lambda moment: moment.step)
        return moments[first : bisect_right(moments, last, key=lambda moment: moment.step)]

    def at_cursor(self, moments: Sequence[HistoryPoint]) -> int | None:
        """Return the index of the moment whose figures are shown; None without moments."""
        if not moments:
            return None
        if self.cursor is None:
            return len(moments) - 1
        return min(bisect_left(moments, self.cursor, key=lambda moment: moment.step), len(moments) - 1)

    def next_axis(self) -> None:
        self.axis = AXES[(AXES.index(self.axis) + 1) % len(AXES)]

    def next_figure(self, direction: int = 1) -> None:
        self.figure = (self.figure + direction) % len(FIGURES)

    def next_smoothing(self) -> None:
        self.smoothing = SMOOTHINGS[(SMOOTHINGS.index(self.smoothing) + 1) % len(SMOOTHINGS)]

    def smoothed_steps(self, steps: int) -> int:
        """Return the number of steps to smooth over in a run of that length; 1: no smoothing."""
        return self.smoothing or max(5, min(_MOST_SMOOTHED, steps // _FIFTIETH))

    def whole(self) -> None:
        """Show the whole run and follow its end."""
        self.span = self.end = self.cursor = None

    def zoom(self, direction: int, moments: Sequence[HistoryPoint]) -> None:
        """Show half as many steps, or twice as many; the cursor stays where it is on the screen."""
        if not moments:
            return
        first, last = moments[0].first_step, moments[-1].step
        everything = last - first + 1
        before = self.span or everything
        span = max(min(FEWEST_STEPS, everything), before // 2) if direction > 0 else before * 2
        if span >= everything:
            self.span = self.end = None
            return
        end = last if self.end is None else self.end
        if self.cursor is not None:
            share = (end - self.cursor) / before
            end = min(last, max(first + span - 1, round(self.cursor + share * span)))
            self.end = None if end >= last else end
        elif self.end is not None:
            self.end = max(self.end, first + span - 1)
        self.span = span

    def pan(self, share: float, moments: Sequence[HistoryPoint]) -> None:
        """Move the window by a share of its width; at the newest step it follows the run again."""
        if self.span is None or not moments:
            return
        first, last = moments[0].first_step, moments[-1].step
        end = (last if self.end is None else self.end) + round(share * self.span)
        end = max(first + self.span - 1, end)
        self.end = None if end >= last else end

    def move(self, direction: int, moments: Sequence[HistoryPoint], columns: int, begun: float) -> None:
        """Move the cursor to the next column of the chart that has a moment; the window follows."""
        at = self.at_cursor(moments)
        if at is None:
            return
        seen = self.visible(moments)
        low, high = span_of(seen, self.axis, begun)
        column = column_of(x_of(moments[at], self.axis, begun), low, high, columns)
        at += direction
        while 0 <= at < len(moments):
            if column_of(x_of(moments[at], self.axis, begun), low, high, columns) != column:
                break
            at += direction
        self.to(max(0, min(at, len(moments) - 1)), moments)

    def to(self, index: int, moments: Sequence[HistoryPoint]) -> None:
        """Put the cursor at a moment, and the window around it."""
        step, last = moments[index].step, moments[-1].step
        if index == len(moments) - 1:
            self.follow()
            return
        self.cursor = step
        if self.span is not None:
            end = last if self.end is None else self.end
            if step > end:
                end = step
            elif moments[index].first_step <= end - self.span:
                end = moments[index].first_step + self.span - 1
            self.end = None if end >= last else end

    def follow(self) -> None:
        """Show the newest step, and follow the run."""
        self.cursor = self.end = None


def span_of(moments: Sequence[HistoryPoint], axis: Axis, begun: float) -> tuple[float, float]:
    """Return the first and the last coordinate of moments on an axis."""
    if not moments:
        return 0.0, 1.0
    return x_of(moments[0], axis, begun), x_of(moments[-1], axis, begun)


def column_of(x: float, low: float, high: float, columns: int) -> int:
    """Return the column of a coordinate on an axis from ``low`` to ``high``; beyond the edges if it is outside."""
    return round((x - low) / (high - low) * (columns - 1)) if high > low else 0


def value_range(values: Sequence[float], floor: bool = False) -> tuple[float, float]:
    """Return the lowest and highest value to draw, without outliers that would flatten the curve.

    Values farther above the median than three times the distance of the 90th percentile are cut off. With ``floor`` the
    range begins at zero, unless all values are in the upper half of it.
    """
    known = sorted(values)
    if not known:
        return 0.0, 1.0
    median, most = known[len(known) // 2], known[min(len(known) - 1, len(known) * 9 // 10)]
    low, high = known[0], known[-1]
    limit = median + 3 * max(most - median, abs(median) * 0.05)
    if len(known) >= 20 and high > limit:
        high = limit
    floor = floor and low < high / 2
    low = min(0.0, low) if floor else low
    if high <= low:
        margin = abs(high) * 0.1 or 1.0
        return (low if floor and low == 0.0 and high > 0 else low - margin), high + margin
    margin = (high - low) * 0.04
    return low if floor else low - margin, high + margin
