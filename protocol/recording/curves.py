"""Figures of training over a run: by step, pooled for long windows, with evaluations and checkpoints.

``training_steps`` has a row for each step of a rank with figures for which ``steps`` has no columns; the view
``throughput`` joins both. ``curves`` pools 16, 128, 1,024 or 8,192 consecutive steps of a rank per row, as
``rollups`` does for memory and times; single steps are read from ``steps`` and ``training_steps``. Both are derived
from the stream.
``evaluations`` and ``checkpoints`` have messages of ``events`` in columns.
"""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import isfinite
from typing import Any

from msgspec.structs import astuple

from ..messages.telemetry import PAUSES, Checkpoint, Evaluation, Step
from ..messages.throughput import mfu
from .pooling import pieces
from .results import TrainingPoint
from .schema import ROLLUP_SIZES

Row = tuple[Any, ...]

StepFigures = tuple[float, int, int, int, int, float, float | None, float | None, float | None, int, int]
"""Figures of one step: ``t``, ``step``, ``training_us``, ``tokens``, ``label_tokens``, ``flops``, ``loss``, ``lr``,
``grad_norm``, ``data_us`` and ``whole_us`` of ``TrainingPoint``; losses, rates and norms may be not finite."""

_Pooled = tuple[int, int, TrainingPoint]
"""First and last stream number, and the point."""


ROWS_A_POINT = 4
"""Maximum number of pooled rows read per point of an answer."""

_STEPS = """SELECT steps.seq, t, steps.rank, steps.step, 1, coalesce(training_us, host_us), steps.tokens,
        coalesce(label_tokens, 0), coalesce(flops, 0.0), loss, lr, grad_norm,
        CASE WHEN data_device_us IS NOT NULL AND device_us IS NOT NULL THEN data_device_us ELSE data_host_us END,
        CASE WHEN data_device_us IS NOT NULL AND device_us IS NOT NULL THEN
            min(device_us, coalesce(training_us, device_us)) ELSE coalesce(training_us, host_us) END
    FROM steps LEFT JOIN training_steps USING(seq) WHERE steps.rank = :rank AND steps.seq BETWEEN :first AND :last
    ORDER BY steps.seq"""
_CURVES = """SELECT * FROM curves WHERE level = :level AND rank = :rank AND last_seq BETWEEN :first AND :last
    AND first_seq >= :first ORDER BY last_seq"""


def training_row(seq: int, step: Step, training_us: int, peak: float | None) -> Row | None:
    """Return a row of ``training_steps``; None if ``steps`` has all figures of the step.

    Args:
        seq: the number of the step in the stream.
        step: the step.
        training_us: its ``training_us``.
        peak: data-sheet peak of the rank's device, FLOP/s; None: unknown.
    """
    rested = training_us != step.host_us
    if not (step.flops or step.label_tokens or rested):
        return None
    share = mfu(step.flops, training_us / 1e6, peak)
    return (seq, training_us if rested else None, step.label_tokens or None, step.flops or None, share)


def evaluation_row(seq: int, t: float, evaluation: Evaluation) -> Row:
    """Return a row of ``evaluations``."""
    return (
        *(seq, t, evaluation.rank, evaluation.step, evaluation.time, evaluation.name, evaluation.loss),
        *(evaluation.perplexity, evaluation.label_tokens, evaluation.seconds, int(evaluation.best)),
    )


def checkpoint_row(seq: int, t: float, checkpoint: Checkpoint) -> Row:
    """Return a row of ``checkpoints``."""
    return (
        *(seq, t, checkpoint.rank, checkpoint.step, checkpoint.time, checkpoint.path),
        *(checkpoint.bytes, checkpoint.seconds, int(checkpoint.best)),
    )


def figures_of(step: Step, t: float) -> StepFigures:
    """Return the figures of one step, which the hub received at ``t``."""
    data = None
    training_us = step.host_us
    for record in step.phases:  # this runs for every step of every rank
        name = record.name
        if name == "data":
            data = record
        elif name in PAUSES:
            training_us -= record.host_us
    if training_us < 0:
        training_us = 0
    whole, data_us = training_us, 0
    if data is not None:
        data_us = data.host_us
        if data.device_us is not None and step.device_us is not None:
            whole, data_us = min(step.device_us, whole), data.device_us
    return (
        *(t, step.step, training_us, step.tokens, step.label_tokens, step.flops),
        *(step.loss, step.lr, step.grad_norm, data_us, whole),
    )


def mean_loss(losses: Sequence[tuple[float, int]]) -> float | None:
    """Return the mean of the ranks' losses of one step, weighted by their label tokens if all ranks have some.

    None for no losses.
    """
    if not losses:
        return None
    weights = [tokens for _, tokens in losses] if all(tokens > 0 for _, tokens in losses) else [1] * len(losses)
    return sum(loss * weight for (loss, _), weight in zip(losses, weights, strict=True)) / sum(weights)


def point_of(step: Step, t: float) -> TrainingPoint:
    """Return the point of one step, which the hub received at ``t``."""
    return _point(figures_of(step, t))


def _point(figures: StepFigures) -> TrainingPoint:
    t, step, training_us, tokens, label_tokens, flops, loss, lr, grad_norm, data_us, whole_us = figures
    loss, lr, grad_norm = _number(loss), _number(lr), _number(grad_norm)
    return TrainingPoint(
        t=t,
        step=step,
        first_step=step,
        training_us=training_us,
        tokens=tokens,
        label_tokens=label_tokens,
        flops=flops,
        loss=loss,
        low_loss=loss,
        high_loss=loss,
        lr=lr,
        grad_norm=grad_norm,
        max_grad_norm=grad_norm,
        data_us=data_us,
        whole_us=whole_us,
    )


def _number(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def pool_points(points: Sequence[TrainingPoint]) -> TrainingPoint:
    """Pool points of one rank, in order: counts and times are summed, the rest averaged over steps.

    The mean loss is weighted by label tokens if every point with a loss has some.
    """
    if len(points) == 1:
        return points[0]
    columns = zip(*map(astuple, points), strict=True)
    t, step, first_step, count, training_us, tokens, label_tokens, flops, loss, low_loss, high_loss, *rest = columns
    lr, grad_norm, max_grad_norm, data_us, whole_us = rest
    by_labels = all(labels > 0 for labels, value in zip(label_tokens, loss, strict=True) if value is not None)
    return TrainingPoint(
        t=t[-1],
        step=max(step),
        first_step=min(first_step),
        count=sum(count),
        training_us=sum(training_us),
        tokens=sum(tokens),
        label_tokens=sum(label_tokens),
        flops=sum(flops),
        loss=_mean(loss, label_tokens if by_labels else count),
        low_loss=min(_known(low_loss), default=None),
        high_loss=max(_known(high_loss), default=None),
        lr=_mean(lr, count),
        grad_norm=_mean(grad_norm, count),
        max_grad_norm=max(_known(max_grad_norm), default=None),
        data_us=sum(data_us),
        whole_us=sum(whole_us),
    )


def _known(values: Sequence[float | None]) -> Sequence[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float | None], weights: Sequence[int]) -> float | None:
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum([weight for _, weight in known])
    return sum([value * weight for value, weight in known]) / total if total else None


class Curves:
    """Collects the steps of each rank until they fill a row of ``curves``, and calls ``emit`` with the row."""

    def __init__(self, emit: Callable[[Row], None]) -> None:
        self._emit = emit
        self._steps: dict[int, list[tuple[int, StepFigures]]] = {}
        """Stream number and figures of the steps that are in no row yet, by rank."""
        self._waiting: dict[int, list[list[_Pooled]]] = {}
        """Pooled rows for the next row of the level above, by rank and level."""

    def add(self, seq: int, rank: int, figures: StepFigures) -> None:
        """Add a step of a rank."""
        steps = self._steps.get(rank)
        if steps is None:
            steps = self._steps[rank] = []
        steps.append((seq, figures))
        if len(steps) == ROLLUP_SIZES[0]:
            self._pool(rank, (steps[0][0], seq, pool_points([_point(figures) for _, figures in steps])))
            steps.clear()

    def _pool(self, rank: int, pooled: _Pooled) -> None:
        waiting = self._waiting.get(rank)
        if waiting is None:
            waiting = self._waiting[rank] = [[] for _ in ROLLUP_SIZES]
        self._emit(_curve_row(0, rank, *pooled))
        for level in range(1, len(ROLLUP_SIZES)):
            group = waiting[level]
            group.append(pooled)
            if len(group) < ROLLUP_SIZES[level] // ROLLUP_SIZES[level - 1]:
                return
            pooled = (group[0][0], group[-1][1], pool_points([point for _, _, point in group]))
            group.clear()
            self._emit(_curve_row(level, rank, *pooled))

    def load(self, connection: sqlite3.Connection) -> None:
        """Load the steps and rows that an earlier writer of this file had not pooled when it ended."""
        newest = "SELECT coalesce(max(last_seq), 0) FROM curves WHERE level = ? AND rank = ?"
        for (rank,) in connection.execute("SELECT DISTINCT rank FROM steps").fetchall():
            pooled = [connection.execute(newest, (level, rank)).fetchone()[0] for level in range(len(ROLLUP_SIZES))]
            waiting = self._waiting[rank] = [[] for _ in ROLLUP_SIZES]
            for level in range(1, len(ROLLUP_SIZES)):
                bind = {"level": level - 1, "rank": rank, "first": pooled[level] + 1, "last": 1 << 62}
                waiting[level] = [_from_curve(row) for row in connection.execute(_CURVES, bind)]
            bind = {"rank": rank, "first": pooled[0] + 1, "last": 1 << 62}
            for row in connection.execute(_STEPS, bind).fetchall():
                self.add(row[0], rank, _figures_from(row))


def _curve_row(level: int, rank: int, first: int, last: int, point: TrainingPoint) -> Row:
    return (
        *(level, rank, last, first, point.t, point.count, point.first_step, point.step, point.training_us),
        *(point.tokens, point.label_tokens, point.flops, point.loss, point.low_loss, point.high_loss, point.lr),
        *(point.grad_norm, point.max_grad_norm, point.data_us, point.whole_us),
    )


def _from_curve(row: Row) -> tuple[int, int, TrainingPoint]:
    _, _, last, first, t, count, first_step, step, training_us, tokens, labels, flops, loss, low, high = row[:15]
    lr, grad_norm, max_grad_norm, data_us, whole_us = row[15:20]
    point = TrainingPoint(
        *(t, step, first_step, count, training_us, tokens, labels, flops, loss, low, high),
        *(lr, grad_norm, max_grad_norm, data_us, whole_us),
    )
    return first, last, point


def _figures_from(row: Row) -> StepFigures:
    _, t, _, step, _, training_us, tokens, labels, flops, loss, lr, grad_norm, data_us, whole_us = row
    return (t, step, training_us, tokens or 0, labels, flops, loss, lr, grad_norm, data_us or 0, whole_us or 0)


def _from_step(row: Row) -> TrainingPoint:
    return _point(_figures_from(row))


def read_points(connection: sqlite3.Connection, rank: int, first: int, last: int, limit: int) -> list[TrainingPoint]:
    """Read a rank's steps between two numbers of the stream, inclusive, as at most ``limit`` points.

    The points are from the finest level with few enough pooled rows, with single steps at the edges of the window.
    """
    bind = {"rank": rank, "first": first, "last": last}
    steps = connection.execute("SELECT count(*) FROM steps WHERE rank = :rank AND seq BETWEEN :first AND :last", bind)
    (total,) = steps.fetchone()
    level = -1
    while level + 1 < len(ROLLUP_SIZES) and total > ROWS_A_POINT * limit:
        level += 1
        count = (
            "SELECT count(*) FROM curves WHERE level = :level AND rank = :rank AND last_seq BETWEEN :first AND :last"
        )
        (found,) = connection.execute(count, {**bind, "level": level}).fetchone()
        if not found:  # a recording of an earlier version has none
            level -= 1
            break
        total = found
    points: list[TrainingPoint] = []
    group = -(-total // limit) if total else 1
    pending = _rows(connection, rank, first, last, level)
    while some := list(islice(pending, group)):
        points.append(pool_points(some))
    if len(points) > limit:  # single steps at the edges were not counted
        size = -(-len(points) // limit)
        points = [pool_points(points[at : at + size]) for at in range(0, len(points), size)]
    return points


def _rows(connection: sqlite3.Connection, rank: int, first: int, last: int, level: int) -> Iterator[TrainingPoint]:
    for size, begin, end in pieces(connection, "curves", rank, first, last, level):
        bind = {"level": size, "rank": rank, "first": begin, "last": end}
        if size < 0:
            yield from map(_from_step, connection.execute(_STEPS, bind))
        else:
            yield from (_from_curve(row)[2] for row in connection.execute(_CURVES, bind))
